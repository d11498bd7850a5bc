"""The straggler watch: a process that the others wait for is named.

A process's own time is what the step timer charges to data, forward and backward, without the wait
for the other processes' gradients. The watch exchanges nothing by itself: the times travel in the
sum that a report makes anyway.
"""

from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from pipeline.parallel.strategy import Strategy
from pipeline.timing import Entry, StepTimer

_OWN: tuple[Entry, ...] = ("data", "copy", "forward_backward")
_SLOW, _RECOVERED = 1.5, 1.2  # own time over the median of the others


class StragglerWatch:
    """Does nothing with one process, and if processes wait for each other within each pass."""

    def __init__(self, strategy: Strategy, timer: StepTimer, log: Callable[[str], None]) -> None:
        self._group, self._timer, self._log = strategy.group, timer, log
        self._is_on = strategy.group.size > 1 and strategy.is_replicated
        self._before = timer.spent_on(*_OWN)
        self._last_slow: int | None = None
        self._named: set[int] = set()  # the slow ranks that were named since none was slow

    def pop_times(self) -> Tensor:
        """Return [processes] int64: microseconds since the last call at this rank, 0 at the others.

        Returns [0] if the watch does nothing.
        """
        times = torch.zeros(self._group.size if self._is_on else 0, dtype=torch.int64)
        if self._is_on:
            now = self._timer.spent_on(*_OWN)
            times[self._group.rank], self._before = round(1e6 * (now - self._before)), now
        return times

    def log_slow_rank(self, times: list[int], steps: int) -> dict[str, float]:
        """Log a rank that is slow twice in a row; return metrics. times: of each rank in µs."""
        if not times:
            return {}
        slowest = max(range(len(times)), key=lambda rank: times[rank])
        others = median(spent for rank, spent in enumerate(times) if rank != slowest)
        ratio = times[slowest] / max(1, others)
        if ratio < _RECOVERED:
            self._named.clear()
        slow = slowest if ratio >= _SLOW else None
        if slow is not None and slow == self._last_slow and slow not in self._named:
            self._named.add(slow)
            own, other = (f"{spent / 1000 / steps:,.0f} ms" for spent in (times[slow], others))
            part = "its own part of a step (data, forward, backward)"
            self._log(f"rank {slow} is slow: {part} takes {own}, that of the others {other}: they wait")
        self._last_slow = slow
        return {"time/slowest_rank": float(slowest), "time/slowest_rank_ratio": ratio}
