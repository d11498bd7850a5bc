"""However a job is started and spread, its weights are the same: to the bit, or within what is stated and why."""

from pathlib import Path

import pytest
from equivalence import outcomes


@pytest.mark.full
def test_every_row_of_the_certificate_is_within_its_tolerance(tmp_path: Path, digits: Path) -> None:
    broken = [f"{one.row.name}: {one.difference:.2g}" for one in outcomes(tmp_path, digits) if not one.holds]
    assert not broken
