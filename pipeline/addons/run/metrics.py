"""Metrics of training while it runs.

Sums over processes are made only when a report is due; between two reports everything stays on the
device. The totals of a report are part of the state, so a run that resumes between two reports
reports the same numbers. On a GPU they are read one step later: the host would wait for the device,
which would then have nothing to do until the host has queued the next step.
"""

import os
import resource
import time
from collections import defaultdict
from typing import Any

import torch

from pipeline.addons.run.mfu import MfuMeter
from pipeline.addons.run.stragglers import StragglerWatch
from pipeline.lazy import addon
from pipeline.parallel.strategy import Strategy
from pipeline.timing import ENTRIES
from pipeline.train.evaluation import LOSS_UNIT
from pipeline.train.job import Job, Process
from pipeline.train.listener import Listener
from pipeline.train.state import TrainState


class Metrics:
    """Computes the metrics of training. All processes call it together."""

    def __init__(self, job: Job, process: Process, strategy: Strategy) -> None:
        self._plan, self._group, self._timer = job.plan, process.group, process.timer
        self._accuracy = "train/subset" if job.source.label_sets else "train/top1"
        self._mfu = MfuMeter(job.config, job.plan, process.group)
        self._pop_failed_reads = addon("store.ranges").pop_failures if job.config.is_in_store else list
        self._has_new_steps = False
        self.is_late = is_cuda = process.group.device.type == "cuda"  # a report is made a step later
        self._due = 0  # the step of a report that is not made yet
        self._totals = torch.zeros(3, dtype=torch.int64, pin_memory=is_cuda)
        self._timer.pop()  # the time before this is not training
        self._stragglers = StragglerWatch(strategy, process.timer, process.terminal.log)
        self.restart_window()

    def restart_window(self) -> None:
        """Begin a new window: the time until now, of an evaluation say, is not that of steps."""
        self._start, self._steps = self._mark(), 0

    def _mark(self) -> tuple[Any, float, float]:
        """Return now (a GPU: an event), and the seconds until then that data and CPUs took."""
        now: Any = time.perf_counter()
        if self._group.device.type == "cuda":
            now = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
            now.record()
        return now, self._timer.spent_on("data"), sum(os.times()[:2])

    def after_update(self, state: TrainState, listeners: list[Listener]) -> None:
        """Count an update, and tell the listeners of the report that is due."""
        self.report(state, listeners)  # of the step before
        self._steps += 1
        self._has_new_steps = True
        if self._plan.logs_at(state.step):
            self._due = state.step
            self._totals.copy_(state.totals, non_blocking=True)
            self._end = self._mark()
            state.totals.zero_()
            if not self.is_late:
                self.report(state, listeners)

    def report(self, state: TrainState, listeners: list[Listener]) -> None:
        """Tell the listeners of the report that is due, if its step's loss is finite.

        Raises as `TrainState.confirm_step`, which has already confirmed all steps but the latest.
        """
        if not self._due:
            return
        step, self._due = self._due, 0
        if step == state.step:
            state.confirm_step()
        (start, waited, cpu), (end, waited_until, cpu_until) = self._start, self._end
        if isinstance(end, float):
            elapsed = max(1e-9, end - start)
        else:
            end.synchronize()  # the totals have been copied before it
            elapsed = start.elapsed_time(end) / 1000
        failed_reads = torch.tensor(self._pop_failed_reads(), dtype=torch.int64)
        machine = self._machine((cpu_until - cpu) / elapsed)
        parts = [self._totals, failed_reads, self._stragglers.pop_times(), machine.flatten()]
        sums = torch.split(self._group.all_reduce(torch.cat(parts)), [len(part) for part in parts])
        (loss, correct, images), failed, times, machines = (total.tolist() for total in sums)
        images_per_s = self._steps * self._plan.global_batch / elapsed
        metrics = {
            "train/loss": loss / LOSS_UNIT / images,
            self._accuracy: correct / images,
            "train/lr": self._plan.learning_rate(step - 1),
            "train/epoch": step / self._plan.steps_per_epoch,
            "time/images_per_s": images_per_s,
            "time/step_ms": 1000 * elapsed / self._steps,
            "time/waiting_for_data": (waited_until - waited) / elapsed,
            **({"data/failed_reads": float(failed[0])} if failed else {}),
            **self._stragglers.log_slow_rank(times, self._steps),
            **self._mfu.metrics(images_per_s, self._plan.image_size_at(step - 1)),
            **_by_machine(self._group.hosts, machines),
        }
        self._start, self._steps = self._end, 0
        for listener in listeners:
            listener.reported(step, metrics, state.best)

    def end_of_epoch(self, step: int) -> dict[str, float]:
        """Return where the time went, at the end of an epoch and of the run; {} at other steps."""
        is_end = step % self._plan.steps_per_epoch == 0 or step >= self._plan.last_step
        if not is_end or not self._has_new_steps:
            return {}
        self._has_new_steps = False
        mine = self._timer.pop()
        total = self._group.all_reduce(torch.tensor([round(1e6 * mine[entry]) for entry in ENTRIES]))
        means = (total / self._group.size / 1e6).tolist()
        spent = {f"time/{entry}_s": seconds for entry, seconds in zip(ENTRIES, means, strict=True)}
        return {"time/epoch_s": sum(means), **spent}

    def _machine(self, cpus: float) -> torch.Tensor:
        """Return [processes, 3] int64, in this rank's row: KiB, CPU ‰, KiB of GPU memory."""
        device = self._group.device
        rows = torch.zeros((self._group.size, 3), dtype=torch.int64)
        rows[self._group.rank, 0] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        rows[self._group.rank, 1] = round(1000 * cpus)
        if device.type == "cuda":
            rows[self._group.rank, 2] = torch.cuda.max_memory_allocated(device) // 1024
        return rows


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
