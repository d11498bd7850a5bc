"""All that rank 0 writes: the listeners of a run, in one list."""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pipeline.config.credentials import without_password
from pipeline.data.access import BadImage
from pipeline.data.index import Index
from pipeline.errors import RunError
from pipeline.lazy import part
from pipeline.record.checkpoint import CheckpointWriter
from pipeline.record.failure import clear_failure
from pipeline.record.folder import RunFolder
from pipeline.record.journal import Journal, Trace, events, run_id
from pipeline.supervision import launch_id
from pipeline.train.job import Job, Process
from pipeline.train.listener import End, Evaluated, Listener, Mirror, Start, Update
from pipeline.train.progress import ToTerminal
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
    group, config = process.group, job.config
    evaluated = state.receipt_row() if state.is_evaluated else None
    records = Records()
    error: RunError | None = None
    if group.is_main:
        try:
            if mirror:
                mirror.abandon_after(resumed_from)  # first: a restart must not restore what is set aside here
            _prepare_folder(job, state, resumed_from, process.terminal.log)
            facts = _facts(job, resumed_from, group.device)
            start = Start(state.step, resumed_from, config.run.resume, facts, evaluated)
            records = _list_records(job, process, start, mirror)
            for listener in records.listeners:
                listener.started(start)
        except OSError as reason:
            error = job.folder.write_error(reason)
        except RunError as reason:
            error = reason
    group.raise_together(error)
    if config.track.required:
        group.raise_together(group.run_long_task(records.tracker.error if records.tracker else lambda: None))
    return records


def _list_records(job: Job, process: Process, start: Start, mirror: Mirror | None) -> Records:
    """Return the records of rank 0, whose folder is prepared."""
    config, folder, log = job.config, job.folder, process.terminal.log
    journal = ToJournal(job, start, mirror, log)
    tracker = part("tracker")(job, log) if config.track.uri != "none" else None
    listeners: list[Listener | None] = [
        journal,
        part("receipt")(folder, log),
        ToTrace(folder, start.step) if config.run.trace else None,
        part("report")(job, start.step, log) if config.track.report else None,
        tracker,
        part("mirror listener")(mirror) if mirror else None,
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
        self._folder, self._classes, self._mirror = job.folder, job.source.classes, mirror
        self._world = job.plan.world
        self._worlds = [event["tags"]["world"] for event in events(job.folder.journal, "started")]
        self._journal = Journal(job.folder.journal, log, start.step if start.evaluated else start.step - 1)

    def started(self, start: Start) -> None:
        if self._worlds and self._worlds[-1] != self._world:
            self._event("resized", step=start.step, processes=self._world, before=self._worlds[-1])
        self._event(
            "started",
            step=start.step,
            resumed=start.checkpoint is not None,
            checkpoint=start.checkpoint.name if start.checkpoint else None,
            launch=launch_id(),
            resume=start.resume,
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
        recalls = result.predictions.recalls(self._classes)
        metrics = {
            "val/top1": evaluation.top1,
            "val/top5": evaluation.top5,
            "val/images": float(evaluation.images),
            **{f"val/{name}": value for name, value in evaluation.figures.items()},
        }
        self.measured(evaluation.step, {f"val/recall/{name}": value for name, value in recalls.items()})
        self.measured(evaluation.step, metrics)
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


def describe_result(job: Job, end: End, mirror: Mirror | None) -> dict[str, str]:
    """Return the last lines of a finished run, by name."""
    config, folder, best, last = job.config, job.folder, end.best, end.last
    file = best and folder.checkpoint_of_step(best.step)
    is_last = best is not None and last is not None and best.step == last.step
    rows = {}
    if best is None:
        rows["best"] = "none: no validation had finite logits, so no model is sent or registered"
    if best and last and file:
        rows["best"] = f"step {best.step:,}, top-1 {best.top1:.4f}"
        rows["best"] += " (the last)" if is_last else f"; last: step {last.step:,}, top-1 {last.top1:.4f}"
        rows["best"] += f": {file}"
    if config.track.report:
        rows["report"] = str(folder.report / "index.html")
    uri = part("tracking uri")(config, folder)
    rows["tracker"] = without_password(uri) if uri else "none: the journal alone"
    if mirror:
        rows["mirror"] = f"{config.checkpoint.mirror}{' (incomplete)' if mirror.error else ''}"
    run_dir = shlex.quote(str(folder.path))
    rows["use it"] = f"pipeline predict {run_dir}{'' if is_last or not file else ' --best'} IMAGE ..."
    return rows


def _identity(job: Job) -> dict[str, Any]:
    config, source, index = job.config, job.source, job.source.index
    if config.data.source == "pack":  # it keeps its orientation; predict turns images as the training did
        config = config.replacing("data", orientation="apply" if source.train.upright else "ignore")
    return {
        "config": config.to_yaml(), "data": source.digest, "split": _hash_split(index),
        "classes": list(source.classes), "world": job.plan.world,
    }  # fmt: skip


def _prepare_folder(
    job: Job, state: TrainState, resumed_from: Path | None, log: Callable[[str], None]
) -> None:
    """Set aside what this start replaces, and write what it was asked for. Raises OSError."""
    folder = job.folder
    prepare_folder(resumed_from, state.best_step, folder, log)
    clear_failure(folder.path)
    folder.write(folder.config, job.config.to_yaml().encode())
    folder.write(folder.plan, json.dumps(job.plan.to_dict(), indent=1).encode())


def _facts(job: Job, resumed_from: Path | None, device: torch.device) -> dict[str, Any]:
    """Return the tags of a run: what it is made of, on which machine."""
    config, plan = job.config, job.plan
    return {
        "recipe": config.recipe,
        **({"changes": config.changes} if config.changes else {}),
        **_continued_run(resumed_from, job.folder),
        "world": plan.world,
        "processes_a_node": plan.local_world,
        "threads": plan.threads,
        **({"portable": "yes" if plan.is_portable else plan.portable_reason} if plan.portable_reason else {}),
        "epochs": config.train.epochs,
        "data": job.source.digest,
        **part("provenance")(config.recipe, config.model.arch, device),
    }


def _continued_run(resumed_from: Path | None, folder: RunFolder) -> dict[str, str]:
    """Return the id of the run whose checkpoint this one continues, if that is another run."""
    if resumed_from is None or folder.contains(resumed_from):
        return {}
    other = RunFolder(resumed_from.parent.parent)
    origin = run_id(other.journal) if resumed_from.parent == other.checkpoints else None
    return {"continues": origin} if origin else {}


def _hash_split(index: Index | None) -> dict[str, Any] | None:
    """Return a digest of all names and the rule that holds some out; None if there is val/."""
    if index is None or not index.is_split_by_hash:
        return None
    return {"names": index.names_digest(), "val_split": index.hold_out.share, "split_by": index.hold_out.by}
