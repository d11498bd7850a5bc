"""The straggler watch: a process that the others wait for is named.

A process's own time runs from the start of a step until its gradients are computed: data, forward
and backward, without the wait for the other processes' gradients. On a GPU two events on its stream
measure it. The watch exchanges nothing by itself: the times travel in the sum that a report makes
anyway.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from pipeline.parallel.strategy import Strategy

_SLOW, _RECOVERED = 1.5, 1.2  # own time over the median of the others


class StragglerWatch:
    """Does nothing with one process, and if processes wait for each other within each pass."""

    def __init__(self, strategy: Strategy, log: Callable[[str], None]) -> None:
        self._group, self._log = strategy.group, log
        self._steps: list[list[Any]] = []
        """[start, end] of each step since the last report: seconds, or events of the device."""
        self._last_slow: int | None = None
        self._named: set[int] = set()
        """The slow ranks that were named since none was slow."""
        self._is_on = strategy.group.size > 1 and strategy.is_replicated
        if self._is_on:
            strategy.on_gradients_computed(self._end_pass)

    def begin_step(self) -> None:
        """Start to measure a step. Called before its passes."""
        if self._is_on:
            now = self._now()
            self._steps.append([now, now])

    def _end_pass(self) -> None:
        self._steps[-1][1] = self._now()  # that of the last pass counts

    def pop_times(self) -> Tensor:
        """Return [processes] int64: microseconds since the last call at this rank, 0 at the others.

        Returns [0] if the watch does nothing. Called when a report is due, whose sum has just
        waited for the device: the events have completed.
        """
        times = torch.zeros(self._group.size if self._is_on else 0, dtype=torch.int64)
        if self._is_on:
            is_cuda = self._group.device.type == "cuda"
            seconds = [
                start.elapsed_time(end) / 1000 if is_cuda else end - start for start, end in self._steps
            ]
            times[self._group.rank] = round(1e6 * sum(seconds))
        self._steps.clear()
        return times

    def log_slow_rank(self, times: list[int], steps: int) -> dict[str, float]:
        """Log a rank that is slow twice in a row, and return metrics.

        times: microseconds of each rank for `steps`.
        """
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

    def _now(self) -> Any:
        if self._group.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
