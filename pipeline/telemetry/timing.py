"""Where the time goes: each instant of a training belongs to one entry, and one line says what to do about the largest.

Promise: the entries sum to the wall time. Why that holds: there is one clock with one hand, which is moved from entry to
entry; nothing is timed twice and nothing is left out, what has no name is `other`. Moving it there and back costs
1.5 µs, some ten times a step, and never waits for a device.

A GPU works behind the host's back, so what the host spends in the entries of a step is shared out as the device's own
intervals stand to each other. Events on its stream say those; they are read long after, once they have passed.

`communication` is what a step waits for the others: from the gradient of the model's first parameter, the last to come,
to the end of the backward pass, and in the agreement that follows. What is sent while gradients are still made costs
nothing and is not in it.
"""

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch

from pipeline.data.batch import Batch
from pipeline.plan import Plan

Entry = Literal[
    "data", "copy", "forward_backward", "communication", "optimizer", "validation", "checkpoint", "tracking", "other"
]
ENTRIES: tuple[Entry, ...] = get_args(Entry)
Spent = dict[Entry, float]
"""Seconds by entry."""

_OF_STEP: tuple[Entry, ...] = ("copy", "forward_backward", "communication", "optimizer")
_READ_AT = 256  # events on their way, before those that have passed are read

_NOTEWORTHY: Spent = {
    "data": 0.1,
    "copy": 0.2,
    "communication": 0.25,
    "validation": 0.4,
    "checkpoint": 0.1,
    "tracking": 0.02,
}
"""Shares of the time above which an entry is worth a line."""


class Clock:
    """Of a host that does all the work itself."""

    def __init__(self) -> None:
        self.seconds: Spent = dict.fromkeys(ENTRIES, 0.0)
        self._taken = dict(self.seconds)
        self._entry: Entry = "other"
        self._since = time.perf_counter()

    @contextmanager
    def on(self, entry: Entry) -> Iterator[None]:
        """What is done in here counts as `entry`, but for what moves the hand itself."""
        before = self._entry
        self.move(entry)
        try:
            yield
        finally:
            self.move(before)

    def move(self, entry: Entry) -> None:
        """From now on it is `entry`, until the `on` around this ends."""
        now = time.perf_counter()
        self.seconds[self._entry] += now - self._since
        self._entry, self._since = entry, now

    def take(self) -> Spent:
        """What was spent since the last call; the sum is the time since then."""
        self.move(self._entry)
        spent = {entry: self.seconds[entry] - self._taken[entry] for entry in ENTRIES}
        self._taken = dict(self.seconds)
        return spent


class DeviceClock(Clock):
    """Of a host that hands its steps to a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._device: Spent = dict.fromkeys(_OF_STEP, 0.0)
        self._events: deque[tuple[Entry, Any, Any]] = deque()
        self._begin: Any = None

    def move(self, entry: Entry) -> None:
        before = self._entry
        super().move(entry)
        if before not in _OF_STEP and entry not in _OF_STEP:
            return
        now = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        now.record()
        if self._begin is not None:
            self._events.append((before, self._begin, now))
        self._begin = now if entry in _OF_STEP else None
        if len(self._events) >= _READ_AT:
            self._read()

    def take(self) -> Spent:
        spent = super().take()
        self._read()
        total = sum(self._device.values())
        if total:
            of_steps = sum(spent[entry] for entry in _OF_STEP)
            spent |= {entry: of_steps * seconds / total for entry, seconds in self._device.items()}
        self._device = dict.fromkeys(_OF_STEP, 0.0)
        return spent

    def _read(self) -> None:
        while self._events and self._events[0][2].query():
            entry, begin, end = self._events.popleft()
            self._device[entry] += begin.elapsed_time(end) / 1000


def start_clock(device: torch.device) -> Clock:
    return DeviceClock() if device.type == "cuda" else Clock()


class Waiting:
    """An iterator over batches whose time counts as waiting for data."""

    def __init__(self, batches: Iterator[Batch], clock: Clock) -> None:
        self._batches = batches
        self._clock = clock

    def __iter__(self) -> "Waiting":
        return self

    def __next__(self) -> Batch:
        with self._clock.on("data"):
            return next(self._batches)


def describe(spent: Spent) -> str:
    """The entries that are seen in whole percents, the largest first."""
    total = max(1e-9, sum(spent.values()))
    parts = sorted(((seconds / total, entry) for entry, seconds in spent.items()), reverse=True)
    return ", ".join(f"{entry.replace('_', ' and ')} {share:.0%}" for share, entry in parts if share >= 0.005)


def advise(spent: Spent, plan: Plan, cpus: int) -> tuple[Entry, str] | None:
    """The largest entry that need not be so large, and a line on it; None where all is well. cpus: of this machine."""
    total = max(1e-9, sum(spent.values()))
    above: Spent = {entry: spent[entry] / total for entry, limit in _NOTEWORTHY.items() if spent[entry] > limit * total}
    if not above:
        return None
    largest = max(above, key=lambda entry: above[entry])
    match largest:
        case "data":
            head, remedy = "waiting for data", f"{_workers(spent, plan, cpus)}, or pack the data (pipeline data pack)"
        case "copy":
            head, remedy = "copying to the device", "look at the machine's PCIe link and at what else uses its memory"
        case "communication":
            head = "waiting for the other processes"
            remedy = (
                "raise batch.global or batch.accumulate, so that they meet less often; look for a slow rank or network"
            )
        case "validation":
            head, remedy = "validation", "raise evaluate.every or evaluate.batch"
        case "checkpoint":
            head, remedy = "saving", "raise checkpoint.every, or put run.dir on a faster disk"
        case _:
            head, remedy = "reporting", "raise track.every, or put run.dir on a faster disk"
    return largest, f"{head} {above[largest]:.0%}: {remedy}"


def _workers(spent: Spent, plan: Plan, cpus: int) -> str:
    """How many loader workers a node would keep up: those there are were busy all the time, or the loop did it itself."""
    others = max(1e-9, sum(spent[entry] for entry in (*_OF_STEP, "tracking", "other")))
    busy = plan.workers_per_node * (others + spent["data"]) if plan.workers else spent["data"] * plan.local_world
    needed = max(plan.workers_per_node + 1, math.ceil(busy / others))
    enough = f"{needed} worker{'s' * (needed > 1)} would do"
    if needed <= cpus:
        return f"{enough} (data.workers={needed})"
    return f"{enough} and the CPUs are {cpus}: take a machine with more"
