"""The guards that `make guards` takes out one by one are where it looks for them."""

import pytest

from faults.guards import GUARDS, ROOT, Guard


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_a_guard_is_one_line_of_its_file(guard: Guard) -> None:
    assert (ROOT / guard.file).read_text().count(guard.line) == 1
