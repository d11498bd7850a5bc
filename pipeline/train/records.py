"""All that rank 0 writes: the listeners of a run, in one list."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import RunError
from pipeline.lazy import addon
from pipeline.record.checkpoint import CheckpointWriter
from pipeline.record.failure import clear_failure
from pipeline.train.job import Job, Process
from pipeline.train.listener import Listener, Start
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
    mirror: Any = None
    tracker: Any = None


def open_records(
    job: Job, process: Process, state: TrainState, resumed_from: Path | None, mirror: Any
) -> Records:
    """Return this process's records, once the start is recorded.

    All processes call and raise this together: RequestError or StorageError if the folder cannot be
    written, RequestError if a required tracker is away, RunError if the mirror takes no rollback.

    resumed_from: the checkpoint. mirror: that of rank 0, which holds its lease.
    """
    group, config, folder = process.group, job.config, job.folder
    evaluated = addon("run.receipt").receipt_row(state) if state.is_evaluated else None
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
            facts = addon("run.provenance").facts(job, resumed_from, group.device)
            start = Start(state.step, resumed_from, facts, evaluated)
            records = _list_records(job, process, start, mirror)
            if mirror:
                mirror.announce()  # before the tracker: a start on another disk must be the same MLflow run
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


def _list_records(job: Job, process: Process, start: Start, mirror: Any) -> Records:
    """Return the records of rank 0, whose folder is prepared."""
    config, folder, log = job.config, job.folder, process.terminal.log
    tracker = addon("mlflow.sender").ToMLflow(config, folder, log) if config.track.uri != "none" else None
    listeners: list[Listener | None] = [
        addon("run.journal").ToJournal(job, start, mirror, log),
        addon("run.receipt").ToReceipt(folder, log),
        addon("run.journal").ToTrace(folder, start.step) if config.run.trace else None,
        addon("report.samples").ToReport(job, start.step, log) if config.track.report else None,
        tracker,
        mirror,
        addon("run.profiler").ToProfile(job, log) if config.profile.steps else None,
        addon("run.timing").ToAdvice(job.plan, log),
        addon("run.progress").ToTerminal(job, mirror, process.terminal),
    ]
    told = [listener for listener in listeners if listener]

    def saved(checkpoint: Path) -> None:
        for listener in told:
            listener.saved(checkpoint)

    writer = CheckpointWriter(folder, config.checkpoint.keep, log, saved)
    return Records(told, writer, _identity(job), mirror, tracker)


def _identity(job: Job) -> dict[str, Any]:
    """Return the parts of a checkpoint that say whose state it is."""
    config, source, index = job.config, job.source, job.source.index
    if config.data.source == "pack":  # it keeps its orientation; predict turns images as the training did
        config = config.replacing("data", orientation="apply" if index.upright else "ignore")
    return {
        "config": config.to_yaml(), "data": source.digest,
        "split": index.split_rule() if index else None,
        "classes": list(source.classes), "world": job.plan.world,
        **({"several_labels": True} if source.label_sets else {}),
    }  # fmt: skip
