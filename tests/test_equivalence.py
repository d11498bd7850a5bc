"""Every launcher, parallel mode and recipe has the weights of docs/equivalence.md, bit for bit."""

from pathlib import Path

import pytest
from equivalence import COMPILED, RECIPES, ROWS, Row, digest, outcomes, published, train, train_recipe

from pipeline.addons.models.compilation import missing_to_compile

needs_compiler = pytest.mark.skipif(bool(missing_to_compile()), reason=f"needs {missing_to_compile()}")
SMALL_ROWS = [row for row in ROWS if row.processes <= 2 and not row.name.endswith(", again")]
QUICK = ("one process", "torchrun", "two nodes", "exact, 2 processes", "fsdp, 2 processes", "2 stages")


def test_the_page_has_every_row_and_recipe_and_rows_without_a_tolerance_are_identical() -> None:
    weights = published()
    assert weights.keys() == {row.name for row in (*ROWS, *COMPILED[:1])} | RECIPES.keys()
    assert all(weights[row.name] == weights[row.against] for row in ROWS if not row.tolerance)


@pytest.mark.parametrize(
    "row",
    [row if row.name in QUICK else pytest.param(row, marks=pytest.mark.full) for row in SMALL_ROWS],
    ids=lambda row: row.name,
)
def test_a_row_of_up_to_two_processes_has_the_published_weights(
    row: Row, tmp_path: Path, digits: Path
) -> None:
    assert digest(row, train(row, tmp_path, digits)) == published()[row.name]


@pytest.mark.full
@pytest.mark.parametrize("name", RECIPES)
def test_a_short_run_of_a_recipe_has_the_published_weights(name: str, tmp_path: Path) -> None:
    assert train_recipe(name, tmp_path) == published()[name]


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(ROWS, marks=pytest.mark.long, id="all"),
        pytest.param(COMPILED, marks=[pytest.mark.full, needs_compiler], id="compiled"),
    ],
)
def test_every_row_is_within_its_tolerance(rows: tuple[Row, ...], tmp_path: Path, digits: Path) -> None:
    for outcome in outcomes(rows, tmp_path, digits):
        assert outcome.difference <= outcome.row.tolerance, outcome
