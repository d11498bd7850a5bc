"""The lines of a run for people: its progress, its validations, and what it leaves behind."""

import math
import os
import shlex
import time
from typing import Any

from pipeline.addons.ops.credentials import without_password
from pipeline.addons.run.journal import checkpoint_of_step
from pipeline.errors import BadImage
from pipeline.lazy import addon
from pipeline.record.terminal import Terminal
from pipeline.supervision import process_stat
from pipeline.train.evaluation import Evaluation
from pipeline.train.job import Job
from pipeline.train.listener import End, Evaluated, Listener, Update


class ToTerminal(Listener):
    """Shows progress, validations and bad images, and at the end where the results are."""

    def __init__(self, job: Job, mirror: Any, terminal: Terminal) -> None:
        self._job, self._mirror, self._terminal = job, mirror, terminal
        self._is_first_step = True

    def found(self, bad_images: list[BadImage]) -> None:
        for bad in bad_images:
            self._terminal.log(f"bad image {bad.name}: {bad.reason}; another image takes its place")

    def stepped(self, update: Update) -> None:
        if self._is_first_step:
            self._is_first_step = False
            started = int(process_stat(os.getpid())[19]) / os.sysconf("SC_CLK_TCK")
            seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - started  # imports included
            self._terminal.log(f"first step done {seconds:.1f} s after the start")

    def evaluated(self, result: Evaluated) -> None:
        note = " (best)" if result.is_best else ""
        log_evaluation(f"validation at step {result.evaluation.step:,}", result, self._terminal, note)

    def closed(self, end: End) -> None:
        if not end.is_finished:
            return
        config, folder, best = self._job.config, self._job.folder, end.best
        file = best and checkpoint_of_step(folder.checkpoints, best.step)
        rows = {}
        if best is None:
            rows["best"] = "none: no validation had finite logits, so no model is sent or registered"
        elif file:
            rows["best"] = f"step {best.step:,}, {best.headline}: {file}"
        if config.track.report:
            rows["report"] = str(folder.report / "index.html")
        uri = addon("mlflow.uri").tracking_uri(config, folder)
        rows["tracker"] = without_password(uri) if uri else "none: the journal alone"
        if self._mirror:
            rows["mirror"] = f"{config.checkpoint.mirror}{' (incomplete)' if self._mirror.error else ''}"
        flag = " --best" if best and file and best.step != end.step else ""
        rows["use it"] = f"pipeline predict {shlex.quote(str(folder.path))}{flag} IMAGE ..."
        width = max(map(len, rows))
        for name, text in rows.items():
            self._terminal.log(f"  {name:<{width}}  {text}")

    def reported(self, step: int, metrics: dict[str, float], best: Evaluation | None) -> None:
        plan = self._job.plan
        epochs = math.ceil(plan.last_step / plan.steps_per_epoch)
        seconds_left = (plan.last_step - step) * metrics["time/step_ms"] / 1000
        parts = [
            f"{step / plan.last_step:4.0%}",
            f"epoch {plan.epoch_at(step - 1) + 1}/{epochs}",
            f"step {step:,}/{plan.last_step:,}",
            f"loss {metrics['train/loss']:.4f}",
            f"{format_duration(seconds_left)} left",
            f"best {best.headline}" if best else "",
            f"{metrics['time/images_per_s']:,.0f} images/s",
            f"lr {metrics['train/lr']:.3g}",
            f"waiting for data {metrics['time/waiting_for_data']:.0%}",
        ]
        self._terminal.progress(*filter(None, parts))


def log_evaluation(title: str, result: Evaluated, terminal: Terminal, note: str) -> None:
    """Show the figures of an evaluation, and name the images that could not be decoded."""
    for bad in result.bad_images:
        terminal.log(f"bad image {bad.name}: {bad.reason}; it counts as a wrong prediction")
    found = result.evaluation
    figures = {**found.main, "loss": math.nan, **found.figures}
    names = {
        "top1": "top-1", "top5": "top-5", "map": "mAP", "f1": "F1", "subset": "all labels right",
        "loss": "loss", "ece": "ECE", "top1_plain": "top-1 without mirror images",
    }  # fmt: skip
    shown = [f"{word} {figures[name]:.4f}" for name, word in names.items() if name in figures]
    line = f"{', '.join(shown)}, {found.images} of {found.total} images"
    if found.not_finite:
        line += (
            f"; the logits of {found.not_finite} of {found.images} images are not finite: they count as"
            " wrong, and this model is never the best; lower optimizer.lr or set train.clip"
        )
    terminal.log(f"{title}: {line}{note}")


def format_duration(seconds: float) -> str:
    """Return a duration such as `1 h 02 min`, `3 min 20 s` or `12 s`."""
    total = round(seconds)
    if total >= 3600:
        return f"{total // 3600} h {total % 3600 // 60:02d} min"
    return f"{total // 60} min {total % 60:02d} s" if total >= 60 else f"{total} s"
