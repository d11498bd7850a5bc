"""Every launcher, parallel mode and recipe has the weights of docs/equivalence.md, bit for bit.

The same seed gives the same weights with any environment and number of workers. They are the same
on every x86-64 CPU with AVX2.
"""

from pathlib import Path

import pytest
from equivalence import PAGE, RECIPES, ROWS, SIZE, Row, digest, measured, train, train_recipe
from harness import Job, MakeJob

from pipeline.addons.models.compilation import missing_to_compile
from pipeline.config.load import recipe_names

needs_compiler = pytest.mark.skipif(bool(missing_to_compile()), reason=f"needs {missing_to_compile()}")
COMPILED = [row for row in ROWS.values() if row.name.startswith("ResNet-18")]
SMALL_ROWS = [
    row
    for row in ROWS.values()
    if row.processes[0] in "12" and row not in COMPILED and not row.name.endswith(", again")
]
QUICK = ("one process", "torchrun", "two nodes", "exact, 2 processes", "fsdp, 2 processes", "2 stages")


def test_the_page_has_every_recipe_and_rows_without_a_tolerance_are_identical() -> None:
    lines = PAGE.read_text().splitlines()
    assert all(str(row) in lines for row in ROWS.values())
    assert {*RECIPES, "digits", "finetune", "finetune-cpu"} == set(recipe_names())
    assert all(row.weights == ROWS[row.against].weights for row in ROWS.values() if row.tolerance == "0")


@pytest.mark.parametrize(
    "row",
    [row if row.name in QUICK else pytest.param(row, marks=pytest.mark.full) for row in SMALL_ROWS],
    ids=lambda row: row.name,
)
def test_up_to_two_processes_have_the_published_weights(row: Row, tmp_path: Path, digits: Path) -> None:
    assert digest(row, train(row, tmp_path, digits)) == row.weights


@pytest.mark.full
@pytest.mark.parametrize("name", RECIPES)
def test_a_short_run_of_a_recipe_has_the_published_weights(name: str, tmp_path: Path) -> None:
    assert train_recipe(name, tmp_path) == RECIPES[name][1]


@pytest.mark.parametrize(
    "rows",
    [pytest.param(ROWS.values(), marks=pytest.mark.long, id="all"),
     pytest.param(COMPILED, marks=[pytest.mark.full, needs_compiler], id="compiled")],
)  # fmt: skip
def test_every_row_is_within_its_tolerance(rows: list[Row], tmp_path: Path, digits: Path) -> None:
    for row in measured(rows, tmp_path, digits):
        assert float(row.difference) <= float(row.tolerance), row


# This model has dropout in addition to batch norm, which tests the network's own randomness.
SHORT = ("model.arch=mobilenet_v3_small", *SIZE, "train.max_steps=12", "evaluate.every=12 steps",
         "data.workers=2")  # fmt: skip
WEIGHTS = {1: "2998ac8f76090e3b", 2: "0a23028d4bc37f41", 3: "8dba439ac8062dc1"}
"""The first 16 digits of the weights, by the number of processes."""


def weights(run: Job) -> str:
    return (run.run() if run.env else run.run_in_forks()).done["weights"][:16]


@pytest.mark.fault("I3")
@pytest.mark.parametrize("nproc", [2, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 3))])
def test_the_same_command_gives_the_same_weights(job: MakeJob, nproc: int) -> None:
    assert weights(job(*SHORT, nproc=nproc)) == WEIGHTS[nproc]


@pytest.mark.fault("F3")
@pytest.mark.full
def test_threads_workers_prefetch_and_tracing_change_nothing(job: MakeJob) -> None:
    one, seven = ({"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count} for count in "17")
    for run in (
        job(*SHORT, "data.workers=0", env=one), job(*SHORT, "data.workers=3", "data.prefetch=5", env=seven),
        job(*SHORT, "run.trace=false", "checkpoint.every=5 steps"),
    ):  # fmt: skip
        assert weights(run) == WEIGHTS[1]
