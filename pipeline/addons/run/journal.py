"""The rows of a run's journal, from which most other records can be made again, and its trace."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.data.batch import Batch
from pipeline.errors import BadImage
from pipeline.record.checkpoint_files import list_checkpoints, step_of
from pipeline.record.folder import RunFolder
from pipeline.record.journal import Journal, JsonLines, events, final_status, read
from pipeline.supervision import launch_id
from pipeline.train.evaluation import Evaluation
from pipeline.train.job import Job
from pipeline.train.listener import End, Evaluated, Listener, Start, Update
from pipeline.train.state import TrainState


def checkpoint_of_step(folder: Path, step: int) -> Path | None:
    """Return the newest checkpoint of that step in `folder`, or None."""
    return next((path for path in list_checkpoints(folder) if step_of(path) == step), None)


class ToJournal(Listener):
    """Writes the rows from which the other records can be made again."""

    def __init__(self, job: Job, start: Start, mirror: Any, log: Callable[[str], None]) -> None:
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

    def reported(self, step: int, metrics: dict[str, float], best: Evaluation | None) -> None:
        self.measured(step, metrics)

    def measured(self, step: int, metrics: dict[str, float]) -> None:
        self._folder.check_ours()
        self._journal.log_metrics(step, metrics)

    def evaluated(self, result: Evaluated) -> None:
        evaluation = result.evaluation
        by_class = result.predictions.by_class(self._job.source.classes)
        figures = {**evaluation.main, "images": float(evaluation.images), **evaluation.figures}
        self.measured(evaluation.step, {f"val/{name}": value for name, value in by_class.items()})
        self.measured(evaluation.step, {f"val/{name}": value for name, value in figures.items()})
        self._event("evaluated", **result.row)

    def saved(self, checkpoint: Path) -> None:
        self._log_mirror()
        self._event("saved", checkpoint=checkpoint.name)

    def ended(self, end: End) -> None:
        self._log_mirror()
        path = end.best and checkpoint_of_step(self._folder.checkpoints, end.best.step)
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


def is_finished(folder: RunFolder) -> bool:
    """Return True if the run's last start finished it and recorded that."""
    return final_status(folder.journal) == "FINISHED"


def trace(state: TrainState, used: list[Batch]) -> tuple[list[int], str]:
    """Return the sample ids of the last update in global order, and one digest over all samples.

    All processes call this together.
    """
    state.confirm_step()  # nothing of a step whose loss is bad is recorded
    by_rank = state.strategy.group.all_gather(
        [(batch.ids.tolist(), batch.digests.numpy().tobytes()) for batch in used]
    )
    passes = [ids_and_digests for of_rank in by_rank for ids_and_digests in of_rank]
    digest = hashlib.sha256(b"".join(digests for _, digests in passes)).hexdigest()
    return [sample for ids, _ in passes for sample in ids], digest


class ToTrace(Listener):
    """Writes `trace.jsonl`: the sample ids of each update, and a digest of its batch."""

    def __init__(self, folder: RunFolder, step: int) -> None:
        """Open the file and cut off the rows after `step`: these updates are made again."""
        self._folder = folder
        ends = [end for row, end in read(folder.trace) if row.get("step", 0) <= step]
        self._lines = JsonLines(folder.trace, ends[-1] if ends else 0)

    def stepped(self, update: Update) -> None:
        self._folder.check_ours()
        # an error is not logged: the journal is on the same disk and logs its own
        row = {"step": update.step, "epoch": update.epoch, "ids": update.sample_ids}
        self._lines.append({**row, "batch_sha256": update.batch_sha256})
