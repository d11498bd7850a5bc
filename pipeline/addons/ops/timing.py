"""The time of a training: measured on a GPU, and advice on what takes too much of it.

A GPU works asynchronously, so the time that the host spends in the entries of a step is divided in
the proportions that events on the device's stream show. The events are read long after they have
completed.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from pipeline.plan import Plan
from pipeline.record.terminal import format_duration
from pipeline.timing import ENTRIES, Entry, Seconds, StepTimer
from pipeline.train.listener import Listener

_ON_DEVICE: tuple[Entry, ...] = ("copy", "forward_backward", "communication", "optimizer")
_MAX_EVENTS = 256  # pending events, before the completed ones are read
_ADVICE: dict[Entry, tuple[float, str]] = {
    "data": (0.1, "waiting for data {share}: raise data.workers, or pack the data (pipeline data pack)"),
    "copy": (0.2, "converting the images on the device {share}: check what else uses the GPU"),
    "communication": (
        0.25, "waiting for the other processes {share}: raise batch.global or batch.accumulate, so that they"
        " meet less often; look for a slow rank or network",
    ),
    "validation": (0.4, "validation {share}: raise evaluate.every or evaluate.batch"),
    "checkpoint": (0.1, "saving {share}: raise checkpoint.every, or put run.dir on a faster disk"),
    "tracking": (0.02, "logging metrics {share}: raise track.every, or put run.dir on a faster disk"),
}  # fmt: skip
"""The share of the time above which an entry is worth a line of advice, and that line."""
_MIN_AVOIDABLE_S = 1.0
"""Seconds of an epoch below which it is not: a start of a few seconds has noise."""


class CudaStepTimer(StepTimer):
    """The timer of a host whose steps run on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._device: Seconds = dict.fromkeys(_ON_DEVICE, 0.0)
        self._events: deque[tuple[Entry, Any, Any]] = deque()
        """(entry, start, end) of intervals that may not have completed."""
        self._start: Any = None

    def switch_to(self, entry: Entry) -> None:
        before = self._entry
        super().switch_to(entry)
        if before not in _ON_DEVICE and entry not in _ON_DEVICE:
            return
        now = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        now.record()
        if self._start is not None:
            self._events.append((before, self._start, now))
        self._start = now if entry in _ON_DEVICE else None
        if len(self._events) >= _MAX_EVENTS:
            self._read_completed()

    def pop(self) -> Seconds:
        spent = super().pop()
        self._read_completed()
        total = sum(self._device.values())
        if total:
            of_steps = sum(spent[entry] for entry in _ON_DEVICE)
            spent |= {entry: of_steps * seconds / total for entry, seconds in self._device.items()}
        self._device = dict.fromkeys(_ON_DEVICE, 0.0)
        return spent

    def _read_completed(self) -> None:
        while self._events and self._events[0][2].query():
            entry, start, end = self._events.popleft()
            self._device[entry] += start.elapsed_time(end) / 1000


class ToAdvice(Listener):
    """Says what an epoch waited for, once each, and at the end where the time went."""

    def __init__(self, plan: Plan, log: Callable[[str], None]) -> None:
        self._last_step, self._log = plan.last_step, log
        self._spent: Seconds = dict.fromkeys(ENTRIES, 0.0)
        self._advised: set[Entry] = set()

    def measured(self, step: int, metrics: dict[str, float]) -> None:
        spent: Seconds = {entry: metrics[f"time/{entry}_s"] for entry in ENTRIES}
        self._spent = {entry: self._spent[entry] + spent[entry] for entry in ENTRIES}
        advice = advise(spent)
        if advice and advice[0] not in self._advised:
            self._advised.add(advice[0])
            self._log(advice[1])
        if step >= self._last_step:
            total = max(1e-9, sum(self._spent.values()))
            shares = sorted(((self._spent[entry] / total, entry) for entry in ENTRIES), reverse=True)
            texts = [
                f"{entry.replace('_', ' and ')} {share:.0%}" for share, entry in shares if share >= 0.005
            ]
            self._log(f"{format_duration(total)} since the start: {', '.join(texts)}")


def advise(spent: Seconds) -> tuple[Entry, str] | None:
    """Return the largest avoidable entry and a line of advice, or None."""
    total = max(1e-9, sum(spent.values()))
    above = [
        entry for entry, (share, _) in _ADVICE.items() if spent[entry] > max(share * total, _MIN_AVOIDABLE_S)
    ]
    if not above:
        return None
    largest = max(above, key=lambda entry: spent[entry])
    return largest, _ADVICE[largest][1].format(share=f"{spent[largest] / total:.0%}")
