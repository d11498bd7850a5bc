"""All that rank 0 writes: the listeners of a run, in one list."""

import json
import math
import os
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pipeline.config.credentials import without_password
from pipeline.errors import BadImage, RunError
from pipeline.lazy import part
from pipeline.plan import Plan
from pipeline.record.checkpoint import CheckpointWriter
from pipeline.record.failure import clear_failure
from pipeline.record.folder import RunFolder
from pipeline.record.journal import Journal, Trace, events, run_id
from pipeline.record.terminal import Terminal, format_duration
from pipeline.supervision import launch_id, process_stat
from pipeline.train.job import Job, Process
from pipeline.train.listener import End, Evaluated, Listener, Mirror, Start, Update
from pipeline.train.resume import prepare_folder
from pipeline.train.state import TrainState


@dataclass(frozen=True)
class Records:
    """The records of this process: on rank 0 all, on the others none."""

    listeners: list[Listener] = field(default_factory=list)
    """In the order in which they are told what happens."""
    checkpoints: CheckpointWriter | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    """The parts of a checkpoint that are not the state: configuration, data, classes, world."""
    mirror: Mirror | None = None
    tracker: Any = None


def open_records(
    job: Job, process: Process, state: TrainState, resumed_from: Path | None, mirror: Mirror | None
) -> Records:
    """Return this process's records, once the start is recorded.

    All processes call this together and raise together: RequestError or StorageError if the folder
    cannot be written, RequestError if a required tracker is away, RunError if the mirror cannot
    record a rollback.

    resumed_from: the checkpoint. mirror: that of rank 0, which holds its lease.
    """
    group, config, folder = process.group, job.config, job.folder
    evaluated = state.receipt_row() if state.is_evaluated else None
    records = Records()
    error: RunError | None = None
    if group.is_main:
        try:
            if mirror:
                mirror.abandon_after(resumed_from)  # first: a restart must not restore what is set aside here
            best_step = state.best.step if state.best else None
            prepare_folder(resumed_from, best_step, folder, process.terminal.log)
            clear_failure(folder.path)
            folder.write(folder.config, config.to_yaml().encode())
            folder.write(folder.plan, json.dumps(job.plan.to_dict(), indent=1).encode())
            start = Start(state.step, resumed_from, _facts(job, resumed_from, group.device), evaluated)
            records = _list_records(job, process, start, mirror)
            for listener in records.listeners:
                listener.started(start)
        except OSError as reason:
            error = folder.write_error(reason)
        except RunError as reason:
            error = reason
    group.raise_together(error)
    if config.track.required:
        group.raise_together(group.run_long_task(records.tracker.error if records.tracker else lambda: None))
    return records


def _list_records(job: Job, process: Process, start: Start, mirror: Mirror | None) -> Records:
    """Return the records of rank 0, whose folder is prepared."""
    config, folder, log = job.config, job.folder, process.terminal.log
    tracker = part("tracker")(job, log) if config.track.uri != "none" else None
    listeners: list[Listener | None] = [
        ToJournal(job, start, mirror, log),
        part("receipt")(folder, log),
        ToTrace(folder, start.step) if config.run.trace else None,
        part("report")(job, start.step, log) if config.track.report else None,
        tracker,
        mirror,
        part("profiler")(job, log) if config.profile.steps else None,
        ToTerminal(job.plan, process.terminal),
        part("advice")(job.plan, log),
    ]
    told = [listener for listener in listeners if listener]

    def saved(checkpoint: Path) -> None:
        for listener in told:
            listener.saved(checkpoint)

    writer = CheckpointWriter(folder, config.checkpoint.keep, log, saved)
    return Records(told, writer, _identity(job), mirror, tracker)


class ToJournal(Listener):
    """Writes the rows from which the other records can be made again."""

    def __init__(self, job: Job, start: Start, mirror: Mirror | None, log: Callable[[str], None]) -> None:
        self._job, self._folder, self._mirror = job, job.folder, mirror
        self._worlds = [event["tags"]["world"] for event in events(job.folder.journal, "started")]
        self._journal = Journal(job.folder.journal, log, start.step if start.evaluated else start.step - 1)

    def started(self, start: Start) -> None:
        world = self._job.plan.world
        if self._worlds and self._worlds[-1] != world:
            self._event("resized", step=start.step, processes=world, before=self._worlds[-1])
        self._event(
            "started",
            step=start.step,
            resumed=start.checkpoint is not None,
            checkpoint=start.checkpoint.name if start.checkpoint else None,
            launch=launch_id(),
            resume=self._job.config.run.resume,
            tags=start.facts,
        )
        if start.evaluated:  # a checkpoint is synced and the journal is not: a machine may have lost this row
            self._event("evaluated", **start.evaluated)

    def found(self, bad_images: list[BadImage]) -> None:
        for bad in bad_images:
            self._event("bad image", id=bad.id, file=bad.name, defect=bad.reason)

    def stepped(self, update: Update) -> None:
        if update.metrics:
            self.measured(update.step, update.metrics)

    def measured(self, step: int, metrics: dict[str, float]) -> None:
        self._folder.check_ours()
        self._journal.log_metrics(step, metrics)

    def evaluated(self, result: Evaluated) -> None:
        evaluation = result.evaluation
        recalls = result.predictions.recalls(self._job.source.classes)
        figures = {"top1": evaluation.top1, "top5": evaluation.top5, "images": float(evaluation.images)}
        figures |= evaluation.figures
        self.measured(evaluation.step, {f"val/recall/{name}": value for name, value in recalls.items()})
        self.measured(evaluation.step, {f"val/{name}": value for name, value in figures.items()})
        self._event("evaluated", **result.row)

    def saved(self, checkpoint: Path) -> None:
        self._log_mirror()
        self._event("saved", checkpoint=checkpoint.name)

    def ended(self, end: End) -> None:
        self._log_mirror()
        path = end.best and self._folder.checkpoint_of_step(end.best.step)
        best = {"step": end.best.step, "file": path.name} if end.best and path else None
        self._event("ended", status=end.status, step=end.step, line=end.line, best=best)

    def _event(self, name: str, **fields: Any) -> None:
        self._folder.check_ours()
        self._journal.log_event(name, **fields)

    def _log_mirror(self) -> None:
        """Record what the mirror's thread has done since the last call."""
        while self._mirror and self._mirror.failures:
            self._event("mirror failed", reason=self._mirror.failures.pop(0))
        while self._mirror and self._mirror.uploaded:
            self._event("mirrored", checkpoint=self._mirror.uploaded.pop(0))


class ToTrace(Listener):
    """Writes which samples each update used."""

    def __init__(self, folder: RunFolder, step: int) -> None:
        self._folder, self._trace = folder, Trace(folder.trace, step)

    def stepped(self, update: Update) -> None:
        self._folder.check_ours()
        self._trace.append(update.step, update.epoch, update.sample_ids, update.batch_sha256)


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
            started = int(process_stat(os.getpid())[19]) / os.sysconf("SC_CLK_TCK")
            seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - started  # imports included
            self._terminal.log(f"first step done {seconds:.1f} s after the start")
        if update.metrics:
            self._show_progress(update)

    def evaluated(self, result: Evaluated) -> None:
        self._terminal.log_bad_images(result.bad_images)
        best = " (best)" if result.is_best else ""
        self._terminal.log(f"validation at step {result.evaluation.step:,}: {result.evaluation.line}{best}")

    def _show_progress(self, update: Update) -> None:
        plan, step, metrics = self._plan, update.step, update.metrics
        epochs = math.ceil(plan.last_step / plan.steps_per_epoch)
        seconds_left = (plan.last_step - step) * metrics["time/step_ms"] / 1000
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
        ]
        self._terminal.progress(*filter(None, parts))


def describe_result(job: Job, end: End, mirror: Mirror | None) -> dict[str, str]:
    """Return the last lines of a finished run, by name."""
    config, folder, best = job.config, job.folder, end.best
    file = best and folder.checkpoint_of_step(best.step)
    rows = {}
    if best is None:
        rows["best"] = "none: no validation had finite logits, so no model is sent or registered"
    elif file:
        rows["best"] = f"step {best.step:,}, top-1 {best.top1:.4f}: {file}"
    if config.track.report:
        rows["report"] = str(folder.report / "index.html")
    uri = part("tracking uri")(config, folder)
    rows["tracker"] = without_password(uri) if uri else "none: the journal alone"
    if mirror:
        rows["mirror"] = f"{config.checkpoint.mirror}{' (incomplete)' if mirror.error else ''}"
    flag = " --best" if best and file and best.step != end.step else ""
    rows["use it"] = f"pipeline predict {shlex.quote(str(folder.path))}{flag} IMAGE ..."
    return rows


def _identity(job: Job) -> dict[str, Any]:
    config, source, index = job.config, job.source, job.source.index
    if config.data.source == "pack":  # it keeps its orientation; predict turns images as the training did
        config = config.replacing("data", orientation="apply" if index.upright else "ignore")
    return {
        "config": config.to_yaml(), "data": source.digest,
        "split": index.split_rule() if index else None,
        "classes": list(source.classes), "world": job.plan.world,
    }  # fmt: skip


def _facts(job: Job, resumed_from: Path | None, device: torch.device) -> dict[str, Any]:
    """Return the tags of a run: what it is made of, on which machine."""
    config, plan = job.config, job.plan
    facts = {"recipe": config.recipe}
    if config.changes:
        facts["changes"] = config.changes
    if resumed_from and not job.folder.contains(resumed_from):  # continues another run
        other = RunFolder(resumed_from.parent.parent)
        if resumed_from.parent == other.checkpoints and (origin := run_id(other.journal)):
            facts["continues"] = origin
    return {
        **facts,
        "world": plan.world,
        "processes_a_node": plan.local_world,
        "threads": plan.threads,
        **({"portable": "yes" if plan.is_portable else plan.portable_reason} if plan.portable_reason else {}),
        "epochs": config.train.epochs,
        "data": job.source.digest,
        **part("provenance")(config.recipe, config.model.arch, device),
    }
