"""All that rank 0 writes: the listeners of a run, in one list."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.data.access import BadImage
from pipeline.errors import RunError
from pipeline.lazy import part
from pipeline.record.checkpoint import CheckpointWriter
from pipeline.record.failure import clear_failure
from pipeline.record.journal import Journal, events
from pipeline.supervision import launch_id
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
            start = Start(state.step, resumed_from, part("facts")(job, resumed_from, group.device), evaluated)
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
        part("trace")(folder, start.step) if config.run.trace else None,
        part("report")(job, start.step, log) if config.track.report else None,
        tracker,
        mirror,
        part("profiler")(job, log) if config.profile.steps else None,
        part("advice")(job.plan, log),
        part("progress")(job, mirror, process.terminal),
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


def _identity(job: Job) -> dict[str, Any]:
    config, source, index = job.config, job.source, job.source.index
    if config.data.source == "pack":  # it keeps its orientation; predict turns images as the training did
        config = config.replacing("data", orientation="apply" if source.train.upright else "ignore")
    split = None  # there is val/
    if index is not None and index.is_split_by_hash:  # all names, and the rule that holds some out
        rule = index.hold_out
        split = {"names": index.names_digest(), "val_split": rule.share, "split_by": rule.by}
    return {
        "config": config.to_yaml(), "data": source.digest, "split": split,
        "classes": list(source.classes), "world": job.plan.world,
    }  # fmt: skip
