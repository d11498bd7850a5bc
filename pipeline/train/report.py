"""What is said about training while it runs: metrics to the journal, the trace, the progress line.

Sums over processes are made only when a report is due; between two reports everything stays on the device. The window of
a report is part of the state, so that a run resumed in the middle of it reports the same numbers.
"""

import hashlib
import math
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from pipeline.data.loader import Batch
from pipeline.group import Group
from pipeline.plan import Plan
from pipeline.record.journal import Journal, Trace
from pipeline.record.receipt import Receipt
from pipeline.record.terminal import Terminal, duration
from pipeline.train.efficiency import NoFigure
from pipeline.train.state import TrainState
from pipeline.train.step import LOSS_UNIT
from pipeline.train.watch import NoPace


class Waiting:
    """An iterator over batches that knows how long it was waited for."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self.seconds = 0.0

    def __iter__(self) -> "Waiting":
        return self

    def __next__(self) -> Batch:
        start = time.perf_counter()
        try:
            return next(self._batches)
        finally:
            self.seconds += time.perf_counter() - start


class Report:
    """Rank 0 writes; all take part in the sums. journal and receipt are None where nothing is to be written."""

    def __init__(
        self,
        plan: Plan,
        group: Group,
        terminal: Terminal,
        waiting: Waiting,
        pace: NoPace,
        efficiency: NoFigure,
        journal: Journal | None,
        receipt: Receipt | None,
    ) -> None:
        self._plan = plan
        self._group = group
        self._terminal = terminal
        self._waiting = waiting
        self._pace = pace
        self._efficiency = efficiency
        self._journal = journal
        self._receipt = receipt
        self._has_stepped = False
        self.restart_clock()

    def restart_clock(self) -> None:
        """Time spent so far, in an evaluation say, is not that of training steps."""
        self._start, self._waited, self._steps = time.perf_counter(), self._waiting.seconds, 0
        self._cpu = sum(os.times()[:2])

    def updated(self, state: TrainState) -> None:
        """After each update."""
        self._steps += 1
        if not self._has_stepped:
            self._has_stepped = True
            self._terminal.say(f"first step done {_seconds_since_start():.1f} s after the start")
        if not self._plan.reports_at(state.step):
            return
        loss, correct, images, *times = self._group.sum(torch.cat([state.totals.cpu(), self._pace.take()])).tolist()
        state.totals.zero_()
        elapsed = max(1e-9, time.perf_counter() - self._start)
        waited = (self._waiting.seconds - self._waited) / elapsed
        images_per_s = self._steps * self._plan.global_batch / elapsed
        rate = self._plan.learning_rate(state.step - 1)
        metrics = {
            "train/loss": loss / LOSS_UNIT / images,
            "train/top1": correct / images,
            "train/lr": rate,
            "train/epoch": state.step / self._plan.steps_per_epoch,
            "time/images_per_s": images_per_s,
            "time/step_ms": 1000 * elapsed / self._steps,
            "time/waiting_for_data": waited,
            **self._pace.judge(times, self._steps),
            **self._efficiency.figures(images_per_s, self._plan.size(state.step - 1)),
            **_system(self._group.device, (sum(os.times()[:2]) - self._cpu) / elapsed),
        }
        if self._journal:
            self._journal.report(state.step, metrics)
        left = (self._plan.last_step - state.step) * elapsed / self._steps
        epochs = math.ceil(self._plan.last_step / self._plan.steps_per_epoch)
        self._terminal.progress(
            f"epoch {self._plan.epoch(state.step - 1) + 1}/{epochs}  step {state.step:,}/{self._plan.last_step:,}"
            f"  loss {metrics['train/loss']:.4f}  lr {rate:.3g}  {images_per_s:,.0f} images/s"
            f"  data {waited:.0%}  {duration(left)} left"
        )
        self.restart_clock()

    def evaluated(self, state: TrainState, is_best: bool) -> None:
        evaluation, account = state.evaluation, state.account()
        assert evaluation is not None
        self._terminal.say(
            f"validation at step {evaluation.step:,}: top-1 {evaluation.top1:.4f}, top-5 {evaluation.top5:.4f}, loss"
            f" {evaluation.loss:.4f}, {evaluation.images} of {evaluation.total} images" + (" (best)" if is_best else "")
        )
        if self._journal:
            self._journal.report(
                evaluation.step,
                {
                    "val/top1": evaluation.top1,
                    "val/top5": evaluation.top5,
                    "val/loss": evaluation.loss,
                    "val/images": float(evaluation.images),
                },
            )
            self._journal.event("evaluated", **account)
        if self._receipt:
            self._receipt.write(self._terminal.say)
        self.restart_clock()


def trace_update(trace: Trace | None, state: TrainState, plan: Plan, group: Group, used: list[Batch]) -> None:
    """The trace of the update just made: ids in global order and one digest over all samples' digests."""
    parts = group.gather([(batch.ids.tolist(), batch.digests.numpy().tobytes()) for batch in used])
    if trace:
        passes = [one for part in parts for one in part]
        digest = hashlib.sha256(b"".join(digests for _, digests in passes)).hexdigest()
        trace.update(state.step, plan.epoch(state.step - 1), [sample for ids, _ in passes for sample in ids], digest)


def _seconds_since_start() -> float:
    """Since this process was started, imports included."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def _system(device: torch.device, cpus: float) -> dict[str, float]:
    facts = {"system/rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "system/cpus_busy": cpus}
    if device.type == "cuda":
        facts["system/gpu_peak_mib"] = torch.cuda.max_memory_allocated(device) / 2**20
    return facts
