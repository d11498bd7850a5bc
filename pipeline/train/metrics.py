"""Metrics of training while it runs, for the journal and the progress line.

Sums over processes are made only when a report is due; between two reports everything stays on the
device. The totals of a report are part of the state, so a run that resumes between two reports
reports the same numbers.
"""

import math
import os
import resource
import time
from collections import defaultdict
from collections.abc import Sequence

import torch

from pipeline.data.access import READ_FAILURES
from pipeline.group import Group
from pipeline.guards.stragglers import StragglerWatch
from pipeline.plan import Plan
from pipeline.record.terminal import Terminal, format_duration
from pipeline.supervision import process_stat
from pipeline.telemetry.mfu import MfuMeter
from pipeline.telemetry.timing import ENTRIES, Entry, Seconds, StepTimer, advise, describe
from pipeline.train.records import Records
from pipeline.train.state import LOSS_UNIT, TrainState


class Metrics:
    """Computes and logs the metrics of training. All processes call it together; rank 0 writes."""

    def __init__(
        self,
        plan: Plan,
        group: Group,
        timer: StepTimer,
        stragglers: StragglerWatch,
        mfu: MfuMeter,
        records: Records,
        terminal: Terminal,
    ) -> None:
        self._plan = plan
        self._group = group
        self._timer = timer
        self._stragglers = stragglers
        self._mfu = mfu
        self._records = records
        self._terminal = terminal
        self._failed_reads = torch.zeros(len(READ_FAILURES), dtype=torch.int64)
        """Counts of this process since the last report."""
        self._has_bucket = False
        self._is_first_step = True
        self._has_new_steps = False
        self._spent: Seconds = dict.fromkeys(ENTRIES, 0.0)
        self._advised: set[Entry] = set()
        self._timer.pop()  # the time before this is not training
        self.restart_window()

    def restart_window(self) -> None:
        """Begin a new window: the time until now, of an evaluation say, is not that of steps."""
        self._start, self._waited, self._steps = time.perf_counter(), self._timer.seconds["data"], 0
        self._cpu = sum(os.times()[:2])

    def add_failed_reads(self, counts: Sequence[int]) -> None:
        """Count failed attempts to read an image.

        counts: by `READ_FAILURES`; empty if the images are not in a bucket.
        """
        if counts:
            self._has_bucket = True
            self._failed_reads += torch.tensor(counts)

    def after_update(self, state: TrainState) -> None:
        """Report the steps since the last report, if that is due."""
        self._steps += 1
        self._has_new_steps = True
        if self._is_first_step:
            self._is_first_step = False
            self._terminal.log(f"first step done {_seconds_since_start():.1f} s after the start")
        if not self._plan.logs_at(state.step):
            return
        step = state.confirmed_step
        totals = state.totals.cpu()  # waits for the device, so its remaining work is in the time
        times = self._stragglers.pop_times()
        elapsed = max(1e-9, time.perf_counter() - self._start)
        mine = torch.cat([totals, self._failed_reads, times, self._machine(elapsed).flatten()])
        loss, correct, images, *rest = self._group.all_reduce(mine).tolist()
        state.totals.zero_()
        self._failed_reads.zero_()
        failed_reads, rest = rest[: len(READ_FAILURES)], rest[len(READ_FAILURES) :]
        waited = (self._timer.seconds["data"] - self._waited) / elapsed
        images_per_s = self._steps * self._plan.global_batch / elapsed
        metrics = {
            "train/loss": loss / LOSS_UNIT / images,
            "train/top1": correct / images,
            "train/lr": self._plan.learning_rate(step - 1),
            "train/epoch": step / self._plan.steps_per_epoch,
            "time/images_per_s": images_per_s,
            "time/step_ms": 1000 * elapsed / self._steps,
            "time/waiting_for_data": waited,
            **(_failed_read_metrics(failed_reads) if self._has_bucket else {}),
            **self._stragglers.log_slow_rank(rest[: len(times)], self._steps),
            **self._mfu.metrics(images_per_s, self._plan.image_size_at(step - 1)),
            **_by_machine(self._group.hosts, rest[len(times) :]),
        }
        self._records.log_metrics(step, metrics)
        self._show_progress(state, metrics, seconds_per_step=elapsed / self._steps)
        self.restart_window()

    def _show_progress(self, state: TrainState, metrics: dict[str, float], seconds_per_step: float) -> None:
        plan, step = self._plan, state.confirmed_step
        epochs = math.ceil(plan.last_step / plan.steps_per_epoch)
        parts = [
            f"{step / plan.last_step:4.0%}",
            f"epoch {plan.epoch_at(step - 1) + 1}/{epochs}",
            f"step {step:,}/{plan.last_step:,}",
            f"loss {metrics['train/loss']:.4f}",
            f"{format_duration((plan.last_step - step) * seconds_per_step)} left",
            f"best top-1 {state.best.top1:.4f}" if state.best else "",
            f"{metrics['time/images_per_s']:,.0f} images/s",
            f"lr {metrics['train/lr']:.3g}",
            f"waiting for data {metrics['time/waiting_for_data']:.0%}",
        ]
        peak_mib = max((value for name, value in metrics.items() if name.endswith("/gpu_peak_mib")), default=0)
        parts.append(f"GPU memory {peak_mib / 1024:.1f} GiB" if peak_mib else "")
        self._terminal.progress(*filter(None, parts))

    def after_evaluation(self, state: TrainState, is_best: bool) -> None:
        """Report the state's evaluation."""
        evaluation, row = state.evaluation, state.receipt_row()
        assert evaluation is not None
        line, num_classes = evaluation.line, self._plan.num_classes
        if evaluation.lacks_classes(num_classes):
            line += f", {evaluation.describe_balanced(num_classes)}"
        self._terminal.log(f"validation at step {evaluation.step:,}: {line}" + (" (best)" if is_best else ""))
        if evaluation.warning:
            self._terminal.log(evaluation.warning)
        metrics = {
            "val/top1": evaluation.top1,
            "val/top5": evaluation.top5,
            "val/images": float(evaluation.images),
            **{f"val/{name}": value for name, value in evaluation.figures.items()},
        }
        self._records.log_metrics(evaluation.step, metrics)
        self._records.log_evaluation(row)
        self.restart_window()

    def end_of_epoch(self, state: TrainState) -> None:
        """Report where the time went, at the end of an epoch and of the run."""
        plan = self._plan
        is_end = state.step % plan.steps_per_epoch == 0 or state.step >= plan.last_step
        if not is_end or not self._has_new_steps:
            return
        self._has_new_steps = False
        mine = self._timer.pop()
        total = self._group.all_reduce(torch.tensor([round(1e6 * mine[entry]) for entry in ENTRIES]))
        mean: Seconds = dict(zip(ENTRIES, (total / self._group.size / 1e6).tolist(), strict=True))
        self._spent = {entry: self._spent[entry] + mean[entry] for entry in ENTRIES}
        metrics = {f"time/{entry}_s": seconds for entry, seconds in mean.items()}
        self._records.log_metrics(state.step, {"time/epoch_s": sum(mean.values()), **metrics})
        advice = advise(mean, plan, self._group.world.cpus)
        if advice and advice[0] not in self._advised:
            self._advised.add(advice[0])
            self._terminal.log(advice[1])
        if state.step >= plan.last_step:
            self._terminal.log(f"{format_duration(sum(self._spent.values()))} since the start: {describe(self._spent)}")

    def _machine(self, elapsed: float) -> torch.Tensor:
        """Return [processes, 3] int64, in this rank's row: KiB, CPU ‰, KiB of GPU memory."""
        device = self._group.device
        rows = torch.zeros((self._group.size, 3), dtype=torch.int64)
        rows[self._group.rank, 0] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        rows[self._group.rank, 1] = round(1000 * (sum(os.times()[:2]) - self._cpu) / elapsed)
        if device.type == "cuda":
            rows[self._group.rank, 2] = torch.cuda.max_memory_allocated(device) // 1024
        return rows


def _seconds_since_start() -> float:
    """Return the age of this process, imports included."""
    started = int(process_stat(os.getpid())[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def _failed_read_metrics(counts: list[int]) -> dict[str, float]:
    """Return the number of failed attempts to read an image, and of each kind that occurred."""
    kinds = zip(READ_FAILURES, counts, strict=True)
    return {"data/failed_reads": float(sum(counts))} | {
        f"data/failed_reads_{kind}": float(count) for kind, count in kinds if count
    }


def _by_machine(hosts: list[str], rows: list[int]) -> dict[str, float]:
    """Return each machine's metrics: sums over its processes, and the GPU memory of the fullest."""
    metrics: dict[str, float] = defaultdict(float)
    for rank, host in enumerate(hosts):
        memory, cpus, gpu_memory = rows[3 * rank : 3 * rank + 3]
        metrics[f"system/{host}/rss_mib"] += memory / 1024
        metrics[f"system/{host}/cpus_busy"] += cpus / 1000
        if gpu_memory:
            name = f"system/{host}/gpu_peak_mib"
            metrics[name] = max(metrics[name], gpu_memory / 1024)
    return dict(metrics)
