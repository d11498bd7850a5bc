"""However a job is started and spread, its weights are the same: to the bit, or within what is stated and why."""

from pathlib import Path

import pytest
from equivalence import COMPILED, ROWS, Row, outcomes

from pipeline.machine import missing_to_compile


@pytest.mark.full
def test_every_row_of_the_certificate_is_within_its_tolerance(tmp_path: Path, digits: Path) -> None:
    assert not _broken(ROWS, tmp_path, digits)


@pytest.mark.full
@pytest.mark.skipif(bool(missing_to_compile()), reason=f"torch.compile wants {missing_to_compile()}")
def test_what_is_compiled_is_too(tmp_path: Path, digits: Path) -> None:
    assert not _broken(COMPILED, tmp_path, digits)


def _broken(rows: tuple[Row, ...], folder: Path, digits: Path) -> list[str]:
    return [f"{one.row.name}: {one.difference:.2g}" for one in outcomes(rows, folder, digits) if not one.holds]
