"""Time accounting: every moment of training is charged to exactly one entry.

Promise: the entries sum to the wall time. Why it holds: a timer always charges exactly one entry,
and switches from entry to entry; what has no name is `other`. A switch costs less than a
microsecond and never waits for a device.

`communication` is what a step waits for other processes: from the moment when its own gradients are
computed to the end of the backward pass, and in the agreement that follows.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

Entry = Literal[
    "data", "copy", "forward_backward", "communication", "optimizer", "validation", "checkpoint", "tracking",
    "other",
]  # fmt: skip
ENTRIES: tuple[Entry, ...] = get_args(Entry)
Seconds = dict[Entry, float]


class StepTimer:
    """The timer of a host that does all the work itself; see also `addons.run.timing`."""

    def __init__(self) -> None:
        self.seconds: Seconds = dict.fromkeys(ENTRIES, 0.0)
        """Charged to each entry since the timer was made."""
        self._popped = dict(self.seconds)
        self._entry: Entry = "other"
        self._since = time.perf_counter()

    @contextmanager
    def charge(self, entry: Entry) -> Iterator[None]:
        """Charge the time in this context to `entry`, except for contexts inside it."""
        before = self._entry
        self.switch_to(entry)
        try:
            yield
        finally:
            self.switch_to(before)

    def switch_to(self, entry: Entry) -> None:
        """Charge the time from now on to `entry`, until the enclosing `charge` ends."""
        now = time.perf_counter()
        self.seconds[self._entry] += now - self._since
        self._entry, self._since = entry, now

    def pop(self) -> Seconds:
        """Return what was charged since the last call; the sum is the wall time since then."""
        self.switch_to(self._entry)
        spent = {entry: self.seconds[entry] - self._popped[entry] for entry in ENTRIES}
        self._popped = dict(self.seconds)
        return spent

    def spent_on(self, *entries: Entry) -> float:
        """Return the seconds since the timer was made that are charged to these entries."""
        return sum(self.seconds[entry] for entry in entries)
