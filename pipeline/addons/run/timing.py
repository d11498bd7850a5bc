"""The time of a training: measured on a GPU, and advice on what takes too much of it.

A GPU works asynchronously, so the time of a step is measured by events on the device's stream. They
are read long after they have completed. The host may wait while the device is busy: that costs
nothing. Only while the device has nothing to do, the time is charged to what the host does then.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from pipeline.addons.run.progress import format_duration
from pipeline.plan import Plan
from pipeline.timing import ENTRIES, Entry, Seconds, StepTimer
from pipeline.train.listener import Listener, Start

_ON_DEVICE: tuple[Entry, ...] = ("copy", "forward_backward", "communication", "optimizer")
# validation and checkpoint wait for the device themselves: the host measures them
_MEASURED = tuple(entry for entry in ENTRIES if entry not in ("validation", "checkpoint"))
_MAX_INTERVALS = 256  # pending ones, before those that have completed are read
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
_MIN_AVOIDABLE_S = 1.0  # seconds of an epoch below which it is not: a start of a few seconds has noise


class CudaStepTimer(StepTimer):
    """The timer of a host whose steps run on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        # charged to each entry on the device's time line
        self._measured: Seconds = dict.fromkeys(ENTRIES, 0.0)
        self._popped_measured = dict(self._measured)
        # (the host's entries and seconds, start, end) of intervals that may not have completed
        self._intervals: deque[tuple[list[tuple[Entry, float]], Any, Any]] = deque()
        self._on_host: list[tuple[Entry, float]] = []  # the host's entries and seconds since the last event
        self._last_event: Any = None

    def switch_to(self, entry: Entry) -> None:
        before, since = self._entry, self._since
        super().switch_to(entry)
        self._on_host.append((before, self._since - since))
        if before in _ON_DEVICE or entry in _ON_DEVICE:
            self._record_event()

    def pop(self) -> Seconds:
        spent = super().pop()
        # After the last event of an epoch come its validation and its save, which wait for the
        # device: there the host's time is right, and no event ends it before the next step.
        for entry, seconds in self._on_host:
            self._measured[entry] += seconds
        self._last_event = None
        self._record_event()
        self._read_completed()
        measured = {entry: self._measured[entry] - self._popped_measured[entry] for entry in _MEASURED}
        self._popped_measured = dict(self._measured)
        if total := sum(measured.values()):
            seconds = sum(spent[entry] for entry in measured)
            spent |= {entry: seconds * part / total for entry, part in measured.items()}
        return spent

    def spent_on(self, *entries: Entry) -> float:
        self._read_completed()
        return sum(self._measured[entry] for entry in entries)

    def _record_event(self) -> None:
        now = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        now.record()
        if self._last_event is not None:
            self._intervals.append((self._on_host, self._last_event, now))
        self._last_event, self._on_host = now, []
        if len(self._intervals) >= _MAX_INTERVALS:
            self._read_completed()

    def _read_completed(self) -> None:
        while self._intervals and self._intervals[0][2].query():
            on_host, start, end = self._intervals.popleft()
            self._charge(on_host, start.elapsed_time(end) / 1000)

    def _charge(self, on_host: list[tuple[Entry, float]], seconds: float) -> None:
        """Charge an interval of the device to what the host did at its end.

        An interval outside the entries of a step ends when the host queues the next one: for so
        long, the device had nothing to do. If it is longer than the host's part, a copy was late.
        """
        for entry, spent in reversed(on_host):
            self._measured[entry] += min(spent, seconds)
            seconds -= min(spent, seconds)
        longest, _ = max(on_host, key=lambda part: part[1])
        self._measured[longest] += seconds


class ToAdvice(Listener):
    """Says what an epoch waited for, once each, and at the end where the time went."""

    def __init__(self, plan: Plan, log: Callable[[str], None]) -> None:
        self._plan, self._log, self._step = plan, log, 0
        self._spent: Seconds = dict.fromkeys(ENTRIES, 0.0)
        self._advised: set[Entry] = set()

    def started(self, start: Start) -> None:
        self._step = start.step

    def measured(self, step: int, metrics: dict[str, float]) -> None:
        spent: Seconds = {entry: metrics[f"time/{entry}_s"] for entry in ENTRIES}
        self._spent = {entry: self._spent[entry] + spent[entry] for entry in ENTRIES}
        advice = advise(spent, (step - self._step) * self._plan.global_batch)
        self._step = step
        if advice and advice[0] not in self._advised:
            self._advised.add(advice[0])
            self._log(advice[1])
        if step >= self._plan.last_step:
            total = max(1e-9, sum(self._spent.values()))
            shares = sorted(((self._spent[entry] / total, entry) for entry in ENTRIES), reverse=True)
            texts = [f"{name.replace('_', ' and ')} {share:.0%}" for share, name in shares if share >= 0.005]
            self._log(f"{format_duration(total)} since the start: {', '.join(texts)}")


def advise(spent: Seconds, images: int) -> tuple[Entry, str] | None:
    """Return the largest avoidable entry and a line of advice, or None.

    images: trained on in that time.
    """
    total = max(1e-9, sum(spent.values()))
    least = {entry: max(share * total, _MIN_AVOIDABLE_S) for entry, (share, _) in _ADVICE.items()}
    above = [entry for entry in _ADVICE if spent[entry] > least[entry]]
    if not above:
        return None
    largest = max(above, key=lambda entry: spent[entry])
    share = f"{spent[largest] / total:.0%}"
    if largest == "data":
        training = total - spent["validation"] - spent["checkpoint"]
        could = images / max(1e-9, training - spent["data"])
        share += f" ({images / training:,.0f} images/s arrive, {could:,.0f} could be trained on)"
    return largest, _ADVICE[largest][1].format(share=share)
