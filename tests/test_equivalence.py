"""Every launcher, parallel mode and recipe has the weights of docs/equivalence.md, bit for bit."""

from pathlib import Path

import pytest
from equivalence import COMPILED, RECIPES, ROWS, Row, digest, outcomes, published, train, train_recipe

from pipeline.machine import missing_to_compile

SMALL_ROWS = tuple(row for row in ROWS if row.processes <= 2 and not row.name.endswith(", again"))


def test_the_page_has_every_row_and_recipe_and_rows_without_a_tolerance_are_identical() -> None:
    weights = published()
    assert weights.keys() == {row.name for row in (*ROWS, *COMPILED[:1])} | RECIPES.keys()
    assert all(weights[row.name] == weights[row.against] for row in ROWS if not row.tolerance)


@pytest.mark.full
@pytest.mark.parametrize("row", SMALL_ROWS, ids=lambda row: row.name)
def test_a_row_of_up_to_two_processes_has_the_published_weights(
    row: Row, tmp_path: Path, digits: Path
) -> None:
    assert digest(row, train(row, tmp_path, digits)) == published()[row.name]


@pytest.mark.full
@pytest.mark.parametrize("name", RECIPES)
def test_a_short_run_of_a_recipe_has_the_published_weights(name: str, tmp_path: Path) -> None:
    assert train_recipe(name, tmp_path) == published()[name]


@pytest.mark.long
def test_every_row_is_within_its_tolerance(tmp_path: Path, digits: Path) -> None:
    assert not _out_of_tolerance(ROWS, tmp_path, digits)


@pytest.mark.full
@pytest.mark.skipif(bool(missing_to_compile()), reason=f"torch.compile needs {missing_to_compile()}")
def test_compiled_models_are_within_their_tolerance(tmp_path: Path, digits: Path) -> None:
    assert not _out_of_tolerance(COMPILED, tmp_path, digits)


def _out_of_tolerance(rows: tuple[Row, ...], folder: Path, digits: Path) -> list[str]:
    found = outcomes(rows, folder, digits)
    return [
        f"{outcome.row.name}: {outcome.difference:.2g}"
        for outcome in found
        if not outcome.is_within_tolerance
    ]
