"""Every launcher, parallel mode and recipe has the weights of docs/equivalence.md, bit for bit."""

from pathlib import Path

import pytest
from equivalence import PAGE, RECIPES, ROWS, Recipe, Row, digest, measured, train, train_recipe

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
    assert all(str(row) in lines for row in (*ROWS.values(), *RECIPES.values()))
    assert {*RECIPES, "digits", "finetune", "finetune-cpu"} == set(recipe_names())
    assert all(row.weights == ROWS[row.against].weights for row in ROWS.values() if row.tolerance == "0")


@pytest.mark.parametrize(
    "row",
    [row if row.name in QUICK else pytest.param(row, marks=pytest.mark.full) for row in SMALL_ROWS],
    ids=lambda row: row.name,
)
def test_a_row_of_up_to_two_processes_has_the_published_weights(
    row: Row, tmp_path: Path, digits: Path
) -> None:
    assert digest(row, train(row, tmp_path, digits)) == row.weights


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_short_run_of_a_recipe_has_the_published_weights(recipe: Recipe, tmp_path: Path) -> None:
    assert train_recipe(recipe, tmp_path) == recipe


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(ROWS.values(), marks=pytest.mark.long, id="all"),
        pytest.param(COMPILED, marks=[pytest.mark.full, needs_compiler], id="compiled"),
    ],
)
def test_every_row_is_within_its_tolerance(rows: list[Row], tmp_path: Path, digits: Path) -> None:
    for row in measured(rows, tmp_path, digits):
        assert float(row.difference) <= float(row.tolerance), row
