"""What is said about training while it runs: metrics to the journal, the trace, the progress line.

Sums over processes are made only when a report is due; between two reports everything stays on the device. The window of
a report is part of the state, so that a run resumed in the middle of it reports the same numbers.
"""

import hashlib
import math
import os
import resource
import time
from collections import defaultdict

import torch

from pipeline.data.batch import Batch
from pipeline.group import Group
from pipeline.guards.stragglers import NullPace
from pipeline.plan import Plan
from pipeline.record.journal import Journal
from pipeline.record.receipt import Receipt
from pipeline.record.terminal import Terminal, duration
from pipeline.record.trace import Trace
from pipeline.supervision import process_stat
from pipeline.telemetry.mfu import NullEfficiency
from pipeline.telemetry.timing import ENTRIES, Clock, Entry, Spent, advise, describe
from pipeline.train.state import TrainState
from pipeline.train.step import LOSS_UNIT


class Report:
    """Rank 0 writes; all take part in the sums. journal and receipt are None where nothing is to be written."""

    def __init__(
        self,
        plan: Plan,
        group: Group,
        terminal: Terminal,
        clock: Clock,
        pace: NullPace,
        efficiency: NullEfficiency,
        journal: Journal | None,
        receipt: Receipt | None,
    ) -> None:
        self._plan = plan
        self._group = group
        self._terminal = terminal
        self._clock = clock
        self._pace = pace
        self._efficiency = efficiency
        self._journal = journal
        self._receipt = receipt
        self._has_stepped = False
        self._spent: Spent = dict.fromkeys(ENTRIES, 0.0)
        self._is_new_epoch = True
        self._advised: set[Entry] = set()
        clock.take()  # what came before training is in no account
        self.restart_clock()

    def restart_clock(self) -> None:
        """Time spent so far, in an evaluation say, is not that of training steps."""
        self._start, self._waited, self._steps = time.perf_counter(), self._clock.seconds["data"], 0
        self._cpu = sum(os.times()[:2])

    def updated(self, state: TrainState) -> None:
        """After each update."""
        self._steps += 1
        self._is_new_epoch = False
        if not self._has_stepped:
            self._has_stepped = True
            self._terminal.log(f"first step done {_seconds_since_start():.1f} s after the start")
        if not self._plan.reports_at(state.step):
            return
        totals = state.totals.cpu()  # waits for the device, so what it still did is in the time
        pace = self._pace.take()
        elapsed = max(1e-9, time.perf_counter() - self._start)
        mine = torch.cat([totals, pace, self._machine(elapsed).flatten()])
        loss, correct, images, *rest = self._group.all_reduce(mine).tolist()
        state.totals.zero_()
        times, machines = rest[: len(pace)], rest[len(pace) :]
        waited = (self._clock.seconds["data"] - self._waited) / elapsed
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
            **_by_machine(self._group.hosts, machines),
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

    def _machine(self, elapsed: float) -> torch.Tensor:
        """[processes, 3] int64: KiB of memory, thousandths of CPUs busy, KiB of GPU memory, in this process's row."""
        device = self._group.device
        rows = torch.zeros((self._group.size, 3), dtype=torch.int64)
        rows[self._group.rank, 0] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        rows[self._group.rank, 1] = round(1000 * (sum(os.times()[:2]) - self._cpu) / elapsed)
        if device.type == "cuda":
            rows[self._group.rank, 2] = torch.cuda.max_memory_allocated(device) // 1024
        return rows

    def evaluated(self, state: TrainState, is_best: bool) -> None:
        evaluation, account = state.evaluation, state.account()
        assert evaluation is not None
        self._terminal.log(
            f"validation at step {evaluation.step:,}: top-1 {evaluation.top1:.4f}, top-5 {evaluation.top5:.4f}, loss"
            f" {evaluation.loss:.4f}, {evaluation.images} of {evaluation.total} images" + (" (best)" if is_best else "")
        )
        if evaluation.warning:
            self._terminal.log(evaluation.warning)
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
            self._receipt.write(self._terminal.log)
        self.restart_clock()

    def account(self, state: TrainState) -> None:
        """Once all that is due at a step is done: at the end of an epoch, and of the run, where its time went."""
        plan = self._plan
        if self._is_new_epoch or not (state.step % plan.steps_per_epoch == 0 or state.step >= plan.last_step):
            return
        self._is_new_epoch = True
        mine = self._clock.take()
        total = self._group.all_reduce(torch.tensor([round(1e6 * mine[entry]) for entry in ENTRIES]))
        mean: Spent = dict(zip(ENTRIES, (total / self._group.size / 1e6).tolist(), strict=True))
        self._spent = {entry: self._spent[entry] + mean[entry] for entry in ENTRIES}
        if self._journal:
            metrics = {f"time/{entry}_s": seconds for entry, seconds in mean.items()}
            self._journal.report(state.step, {"time/epoch_s": sum(mean.values()), **metrics})
        advice = advise(mean, plan, self._group.world.cpus)
        if advice and advice[0] not in self._advised:
            self._advised.add(advice[0])
            self._terminal.log(advice[1])
        if state.step >= plan.last_step:
            self._terminal.log(f"{duration(sum(self._spent.values()))} since the start: {describe(self._spent)}")


def trace_update(trace: Trace | None, state: TrainState, plan: Plan, group: Group, used: list[Batch]) -> None:
    """The trace of the update just made: ids in global order and one digest over all samples' digests."""
    parts = group.all_gather([(batch.ids.tolist(), batch.digests.numpy().tobytes()) for batch in used])
    if trace:
        passes = [one for part in parts for one in part]
        digest = hashlib.sha256(b"".join(digests for _, digests in passes)).hexdigest()
        trace.update(state.step, plan.epoch(state.step - 1), [sample for ids, _ in passes for sample in ids], digest)


def _seconds_since_start() -> float:
    """Since this process was started, imports included."""
    started = int(process_stat(os.getpid())[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def _by_machine(hosts: list[str], rows: list[int]) -> dict[str, float]:
    """Metrics of each machine by its name: of its processes together, and the GPU memory of the fullest."""
    facts: dict[str, float] = defaultdict(float)
    for rank, host in enumerate(hosts):
        memory, cpus, gpu_memory = rows[3 * rank : 3 * rank + 3]
        facts[f"system/{host}/rss_mib"] += memory / 1024
        facts[f"system/{host}/cpus_busy"] += cpus / 1000
        if gpu_memory:
            name = f"system/{host}/gpu_peak_mib"
            facts[name] = max(facts[name], gpu_memory / 1024)
    return dict(facts)
