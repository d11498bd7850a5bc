"""The output of rank 0 while it trains."""

import math
import os
import time

from pipeline.data.access import BadImage
from pipeline.plan import Plan
from pipeline.record.terminal import Terminal, format_duration
from pipeline.supervision import process_stat
from pipeline.train.listener import Evaluated, Listener, Update


class ToTerminal(Listener):
    """Shows progress, validations and bad images."""

    def __init__(self, plan: Plan, terminal: Terminal) -> None:
        self._plan, self._terminal = plan, terminal
        self._is_first_step = True

    def found(self, bad_images: list[BadImage]) -> None:
        for bad in bad_images:
            self._terminal.log(f"bad image {bad.name}: {bad.reason}; another image takes its place")

    def stepped(self, update: Update) -> None:
        if self._is_first_step:
            self._is_first_step = False
            self._terminal.log(f"first step done {_seconds_since_start():.1f} s after the start")
        if update.metrics:
            self._show_progress(update)

    def evaluated(self, result: Evaluated) -> None:
        evaluation, num_classes = result.evaluation, self._plan.num_classes
        self._terminal.log_bad_images(result.bad_images)
        line = evaluation.line
        if evaluation.lacks_classes(num_classes):
            line += f", {evaluation.describe_balanced(num_classes)}"
        self._terminal.log(
            f"validation at step {evaluation.step:,}: {line}" + (" (best)" if result.is_best else "")
        )
        if evaluation.warning:
            self._terminal.log(evaluation.warning)

    def _show_progress(self, update: Update) -> None:
        plan, step, metrics = self._plan, update.step, update.metrics
        epochs = math.ceil(plan.last_step / plan.steps_per_epoch)
        seconds_left = (plan.last_step - step) * metrics["time/step_ms"] / 1000
        peak_mib = max(
            (value for name, value in metrics.items() if name.endswith("/gpu_peak_mib")), default=0
        )
        parts = [
            f"{step / plan.last_step:4.0%}",
            f"epoch {update.epoch + 1}/{epochs}",
            f"step {step:,}/{plan.last_step:,}",
            f"loss {metrics['train/loss']:.4f}",
            f"{format_duration(seconds_left)} left",
            "" if update.best_top1 is None else f"best top-1 {update.best_top1:.4f}",
            f"{metrics['time/images_per_s']:,.0f} images/s",
            f"lr {metrics['train/lr']:.3g}",
            f"waiting for data {metrics['time/waiting_for_data']:.0%}",
            f"GPU memory {peak_mib / 1024:.1f} GiB" if peak_mib else "",
        ]
        self._terminal.progress(*filter(None, parts))


def _seconds_since_start() -> float:
    """Return the age of this process, imports included."""
    started = int(process_stat(os.getpid())[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
