"""The rank watch: weights that should be alike are compared, and a process that the others wait for is named.

Promise: no checkpoint holds weights that the processes do not agree on. Each process sums the bits of each tensor as
integers, on its device, and the sums are compared every `run.watch` and before each evaluation and save: one flipped bit
changes a sum. Who differs from most is named, with the first tensor; with no majority it is who differs from rank 0, and
that nobody can say which is right. The run then ends as one that crashed (exit 1): its hardware or software is broken, not
the request, and the checkpoints before are good, so a launcher may well start it again.

How fast a process is on its own is what passes between the begin of a step and the gradient of the model's first parameter,
the last to come: data, forward and backward, without the wait for the peers' gradients, which is after. On a GPU two events
on its stream say it. No exchange is made for it: the times travel in the sum that a report makes anyway.
"""

import socket
import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import DivergedError
from pipeline.parallel import Strategy
from pipeline.plan import Plan
from pipeline.telemetry.timing import Clock

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SLOW, _RECOVERED = 1.5, 1.2
_REPORTS_IN_A_ROW = 2


class NullWatch:
    """Of one process, of processes that each have another part of the model, or with run.watch=none."""

    def updated(self, step: int) -> None:
        """After each update: compare when it is due."""

    def compare(self, step: int) -> None:
        """DivergedError at all processes if their weights are not the same."""


class Watch(NullWatch):
    def __init__(self, strategy: Strategy, plan: Plan) -> None:
        self._strategy, self._plan = strategy, plan
        self._alike_at: int | None = None

    def updated(self, step: int) -> None:
        if self._plan.watches_at(step):
            self.compare(step)

    def compare(self, step: int) -> None:
        if step == self._alike_at:
            return
        tensors = self._strategy.replicated_tensors()
        everyones = self._strategy.group.all_gather(torch.stack([bit_sum(one) for one in tensors.values()]).tolist())
        if any(sums != everyones[0] for sums in everyones):
            hosts = self._strategy.group.all_gather(socket.gethostname())
            raise DivergedError(_account(list(tensors), everyones, hosts, step, self._alike_at))
        self._alike_at = step


class NullPace:
    """Of one process, which waits for nobody, or of those that wait for each other all the time."""

    def start(self) -> None:
        """Before the passes of a step."""

    def take(self) -> Tensor:
        """[processes] int64: this process's microseconds since the last call, in its place; else 0."""
        return torch.zeros(0, dtype=torch.int64)

    def judge(self, times: list[int], steps: int) -> dict[str, float]:
        """Metrics of `steps` steps from everybody's microseconds; says who is slow."""
        return {}


class Pace(NullPace):
    def __init__(self, strategy: Strategy, clock: Clock, log: Callable[[str], None]) -> None:
        self._group, self._clock, self._log = strategy.group, clock, log
        self._start: Any = None
        self._made: list[tuple[Any, Any]] = []
        """(begin, end) of the steps whose time is not added yet."""
        self._slow_before: int | None = None
        self._times_in_a_row = 0
        self._named: set[int] = set()
        first = next(one for one in strategy.model.parameters() if one.requires_grad)
        first.register_post_accumulate_grad_hook(self._has_gradients)  # type: ignore[no-untyped-call]

    def start(self) -> None:
        self._start = self._now()

    def take(self) -> Tensor:
        """Asked when a report is due, whose sums have just waited for the device: its events have passed."""
        cuda = self._group.device.type == "cuda"
        own = sum(start.elapsed_time(end) / 1000 if cuda else end - start for start, end in self._made)
        self._made.clear()
        times = torch.zeros(self._group.size, dtype=torch.int64)
        times[self._group.rank] = round(1e6 * own)
        return times

    def judge(self, times: list[int], steps: int) -> dict[str, float]:
        slowest = max(range(len(times)), key=lambda rank: times[rank])
        others = median(spent for rank, spent in enumerate(times) if rank != slowest)
        ratio = times[slowest] / max(1, others)
        if ratio < _RECOVERED:
            self._named.clear()
        again = slowest == self._slow_before
        self._slow_before = slowest if ratio >= _SLOW else None
        self._times_in_a_row = (self._times_in_a_row * again + 1) * (ratio >= _SLOW)
        if self._times_in_a_row >= _REPORTS_IN_A_ROW and slowest not in self._named:
            self._named.add(slowest)
            self._log(
                f"rank {slowest} is slow: its own part of a step (data, forward, backward) takes"
                f" {times[slowest] / 1000 / steps:,.0f} ms, that of the others {others / 1000 / steps:,.0f} ms: they wait"
            )
        return {"time/slowest_rank": float(slowest), "time/slowest_rank_ratio": ratio}

    def _has_gradients(self, _: Tensor) -> None:
        end = self._now()
        if self._made and self._made[-1][0] is self._start:  # of several passes the last counts
            self._made.pop()
        self._made.append((self._start, end))
        self._clock.move("communication")

    def _now(self) -> Any:
        """The time, or an event of the device that has it."""
        if self._group.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def start_watch(strategy: Strategy, plan: Plan) -> NullWatch:
    return Watch(strategy, plan) if plan.world > 1 and plan.watch_every and strategy.is_replicated else NullWatch()


def start_pace(strategy: Strategy, clock: Clock, log: Callable[[str], None]) -> NullPace:
    return Pace(strategy, clock, log) if strategy.group.size > 1 and strategy.is_replicated else NullPace()


def bit_sum(tensor: Tensor) -> Tensor:
    """The tensor's bits, summed as integers modulo 2^64, on its device: 40 ms for a ResNet-50 on one thread of a CPU."""
    return tensor.detach().view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)


def _account(names: list[str], sums: list[list[int]], hosts: list[str], step: int, alike_at: int | None) -> str:
    counts = Counter(map(tuple, sums))
    common, holders = counts.most_common(1)[0]
    has_majority = 2 * holders > len(sums)
    reference = list(common) if has_majority else sums[0]
    odd = [rank for rank, own in enumerate(sums) if own != reference]
    first = next(name for at, name in enumerate(names) if any(sums[rank][at] != reference[at] for rank in odd))
    who = " and ".join(f"rank {rank} on {hosts[rank]}" for rank in odd)
    than = f"{holders} of {len(sums)} processes" if has_majority else "rank 0, and nobody can say which is right"
    since = f"at step {alike_at} all were alike" if alike_at is not None else "since the start nobody had compared"
    return (
        f"the weights have diverged: at step {step} {who} held others than {than}, first in {first} ({since}): nothing of"
        " it is saved, the same command goes on from the checkpoint before; if it happens again, look at that rank's"
        " device, memory and software"
    )
