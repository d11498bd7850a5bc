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
_REPORTS_IN_A_ROW = 2


class StragglerWatch:
    """Does nothing with one process, and if processes wait for each other within each pass."""

    def __init__(self, strategy: Strategy, log: Callable[[str], None]) -> None:
        self._group, self._log = strategy.group, log
        self._start: Any = None
        self._steps: list[tuple[Any, Any]] = []
        """(start, end) of each step since the last report: seconds, or events of the device."""
        self._slow_rank: int | None = None
        self._times_in_a_row = 0
        self._named: set[int] = set()
        self._is_on = strategy.group.size > 1 and strategy.is_replicated
        if self._is_on:
            strategy.on_gradients_computed(self._end_pass)

    def begin_step(self) -> None:
        """Start to measure a step. Called before its passes."""
        if self._is_on:
            self._start = self._now()

    def pop_times(self) -> Tensor:
        """Return [processes] int64: microseconds since the last call at this rank, 0 at the others.

        Returns [0] if the watch does nothing. Called when a report is due, whose sum has just
        waited for the device: the events have completed.
        """
        if not self._is_on:
            return torch.zeros(0, dtype=torch.int64)
        if self._group.device.type == "cuda":
            seconds = sum(start.elapsed_time(end) / 1000 for start, end in self._steps)
        else:
            seconds = sum(end - start for start, end in self._steps)
        self._steps.clear()
        times = torch.zeros(self._group.size, dtype=torch.int64)
        times[self._group.rank] = round(1e6 * seconds)
        return times

    def log_slow_rank(self, times: list[int], steps: int) -> dict[str, float]:
        """Log a slow rank, and return metrics. times: microseconds of each rank for `steps`."""
        if not times:
            return {}
        slowest = max(range(len(times)), key=lambda rank: times[rank])
        others = median(spent for rank, spent in enumerate(times) if rank != slowest)
        ratio = times[slowest] / max(1, others)
        if ratio < _RECOVERED:
            self._named.clear()
        if ratio < _SLOW:
            self._slow_rank, self._times_in_a_row = None, 0
        elif slowest == self._slow_rank:
            self._times_in_a_row += 1
        else:
            self._slow_rank, self._times_in_a_row = slowest, 1
        if self._times_in_a_row >= _REPORTS_IN_A_ROW and slowest not in self._named:
            self._named.add(slowest)
            self._log(
                f"rank {slowest} is slow: its own part of a step (data, forward, backward) takes"
                f" {times[slowest] / 1000 / steps:,.0f} ms, that of the others {others / 1000 / steps:,.0f} ms: they"
                " wait"
            )
        return {"time/slowest_rank": float(slowest), "time/slowest_rank_ratio": ratio}

    def _end_pass(self) -> None:
        if self._steps and self._steps[-1][0] is self._start:  # a later pass of the same step
            self._steps.pop()
        self._steps.append((self._start, self._now()))

    def _now(self) -> Any:
        if self._group.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
