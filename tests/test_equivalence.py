"""Every launcher and parallel mode gives the same weights, bit for bit or within a tolerance."""

from pathlib import Path

import pytest
from equivalence import COMPILED, ROWS, Row, outcomes

from pipeline.machine import missing_to_compile


@pytest.mark.full
def test_the_rows_of_up_to_two_processes_are_within_their_tolerance(tmp_path: Path, digits: Path) -> None:
    rows = tuple(row for row in ROWS if row.processes <= 2 and not row.name.endswith(", again"))
    assert not _out_of_tolerance(rows, tmp_path, digits)


@pytest.mark.long
def test_every_row_of_the_table_is_within_its_tolerance(tmp_path: Path, digits: Path) -> None:
    assert not _out_of_tolerance(ROWS, tmp_path, digits)


@pytest.mark.full
@pytest.mark.skipif(bool(missing_to_compile()), reason=f"torch.compile needs {missing_to_compile()}")
def test_compiled_models_are_within_their_tolerance(tmp_path: Path, digits: Path) -> None:
    assert not _out_of_tolerance(COMPILED, tmp_path, digits)


def _out_of_tolerance(rows: tuple[Row, ...], folder: Path, digits: Path) -> list[str]:
    found = outcomes(rows, folder, digits)
    return [f"{outcome.row.name}: {outcome.difference:.2g}" for outcome in found if not outcome.is_within_tolerance]
