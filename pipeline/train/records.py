"""All that rank 0 writes: journal, receipt, trace, checkpoints, samples, and the MLflow sender.

The other processes have `NullRecords`, so the code that trains asks nowhere who it is.
"""

import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline import errors
from pipeline.config.credentials import without_password
from pipeline.config.schema import Config
from pipeline.data.index import Index
from pipeline.data.sources import Source
from pipeline.errors import RunError
from pipeline.plan import Plan
from pipeline.record import page, sender
from pipeline.record.checkpoint import CheckpointWriter
from pipeline.record.folder import RunFolder
from pipeline.record.journal import Journal, events, run_id
from pipeline.record.mirror import Mirror
from pipeline.record.provenance import provenance
from pipeline.record.receipt import Receipt
from pipeline.record.sender import Sender
from pipeline.record.terminal import Terminal
from pipeline.record.trace import Trace
from pipeline.supervision import launch_id
from pipeline.train.evaluate import EvalResult
from pipeline.train.resume import prepare_folder
from pipeline.train.samples import Samples
from pipeline.train.state import TrainState


class Records:
    """The records of one start of a run. All methods are cheap, except those that wait."""

    def __init__(
        self, config: Config, plan: Plan, state: TrainState, folder: RunFolder, source: Source,
        resumed_from: Path | None, evaluated: dict[str, Any] | None, mirror: Mirror | None, terminal: Terminal,
    ) -> None:  # fmt: skip
        """Open everything and record the start. Raises OSError if the folder cannot be written.

        Raises RunError if the mirror cannot record a rollback.

        resumed_from: the checkpoint. evaluated: its receipt row, if its model is evaluated.
        """
        log = terminal.log
        if mirror:
            mirror.abandon_after(resumed_from)  # first: a restart must not restore what is set aside here
        prepare_folder(resumed_from, state.best_step, folder, log)
        errors.clear_failure(folder.path)
        folder.write(folder.config, config.to_yaml().encode())
        folder.write(folder.plan, json.dumps(plan.to_dict(), indent=1).encode())
        self._config, self._folder, self._mirror, self._terminal = config, folder, mirror, terminal
        self._classes = source.classes
        seen = config
        if config.data.source == "pack":  # it keeps its orientation; predict turns images as the training did
            seen = config.replacing("data", orientation="apply" if source.train.upright else "ignore")
        # what a checkpoint contains in addition to the state
        self._identity = {
            "config": seen.to_yaml(), "data": source.digest, "split": _hash_split(source.index),
            "classes": list(source.classes), "world": plan.world,
        }  # fmt: skip
        worlds = [start["tags"]["world"] for start in events(folder.journal, "started")]
        self._journal = Journal(folder.journal, log, state.step if evaluated else state.step - 1)
        on_saved = mirror.upload if mirror else lambda: None
        self._checkpoints = CheckpointWriter(folder, config.checkpoint.keep, log, on_saved)
        self._trace = Trace(folder.trace, state.step) if config.run.trace else None
        facts = {
            "recipe": config.recipe,
            **({"changes": config.changes} if config.changes else {}),
            **_continued_run(resumed_from, folder),
            "world": plan.world,
            "processes_a_node": plan.local_world,
            "threads": plan.threads,
            **({"portable": "yes" if plan.is_portable else plan.portable_reason} if plan.portable_reason else {}),
            "epochs": config.train.epochs,
            "data": source.digest,
            **provenance(config.recipe, config.model.arch, state.strategy.group.device),
        }
        if worlds and worlds[-1] != plan.world:
            self._journal.log_event("resized", step=state.step, processes=plan.world, before=worlds[-1])
        self._journal.log_event(
            "started",
            step=state.step,
            resumed=resumed_from is not None,
            checkpoint=resumed_from.name if resumed_from else None,
            launch=launch_id(),
            resume=config.run.resume,
            tags=facts,
        )
        if evaluated:  # a checkpoint is synced and the journal is not: a machine may have lost this row
            self._journal.log_event("evaluated", **evaluated)
        self._receipt = Receipt(folder)
        self._receipt.write(log)
        self._samples = Samples(folder, source, config, state.step, log) if config.track.report else None
        if self._samples:
            self._samples.save_augmented(plan)
        if config.track.uri != "none" and (ignored := sender.ignored_variables()):
            log(f"MLflow{ignored}")
        self._sender: Sender | None = None
        try:
            self._sender = sender.start(config, folder)
        except OSError as error:
            log(f"MLflow's sender could not be started: {error.strerror}; 'pipeline sync' sends the journal later")
        if mirror:
            mirror.start()

    def wait_for_tracker(self) -> RunError | None:
        """Return None once MLflow is reached, or the error if it is not at the first attempt."""
        try:
            if self._sender:
                self._sender.wait_until_ready()
        except RunError as error:
            return error
        return None

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of a step."""
        self._folder.check_ours()
        self._journal.log_metrics(step, metrics)

    def log_event(self, name: str, **fields: Any) -> None:
        """Record an event."""
        self._folder.check_ours()
        self._journal.log_event(name, **fields)

    def log_evaluation(self, row: dict[str, Any]) -> None:
        """Record an evaluated model in journal and receipt."""
        self.log_event("evaluated", **row)
        self._receipt.write(self._terminal.log)

    def log_sample_ids(self, step: int, epoch: int, ids: list[int], batch_sha256: str) -> None:
        """Record which samples an update used."""
        if self._trace:
            self._folder.check_ours()
            self._trace.append(step, epoch, ids, batch_sha256)

    def keep_predictions(self, result: EvalResult) -> None:
        """Record the recall of each class, and keep the predictions for the report."""
        recalls = result.predictions.recalls(self._classes)
        self.log_metrics(result.evaluation.step, {f"val/recall/{name}": value for name, value in recalls.items()})
        if self._samples:
            self._samples.save_evaluation(result)

    def save(self, state: dict[str, Any], epoch: int, step: int, best_step: int | None, patience_s: float) -> None:
        """Start to write a checkpoint, in a thread, which retries for `patience_s`."""
        self._log_mirror_events()
        self._checkpoints.save({**state, **self._identity, "epoch": epoch}, step, best_step, patience_s)

    def wait_for_save(self) -> None:
        """Return when no checkpoint is being written, and record the last that was completed."""
        self._checkpoints.wait()
        if saved := self._checkpoints.pop_saved():
            self.log_event("saved", checkpoint=saved.name)

    @property
    def gave_up_saving(self) -> bool:
        """True if saves have failed for so long that the run must end."""
        return self._checkpoints.should_give_up

    @property
    def last_save_failed(self) -> bool:
        return self._checkpoints.last_failed

    @property
    def is_folder_removed(self) -> bool:
        return self._checkpoints.is_folder_removed

    def lacks_checkpoint(self, step: int) -> bool:
        """Return True if the folder has no checkpoint of `step`."""
        return self._checkpoints.path_of_step(step) is None

    def finish(self, state: TrainState, line: str, seconds_left: Callable[[], float | None]) -> None:
        """Record the end of a finished run, also in the mirror.

        If a node is lost later, the Job needs no other node to complete. seconds_left: see `end`.
        """
        self._record_end(state, "FINISHED", line)
        if self._mirror:
            self._mirror.close(seconds_left)

    def deliver(self, state: TrainState, seconds_left: Callable[[], float | None]) -> None:
        """Make the report of a finished run, wait for the sender, and log a summary."""
        if self._samples:
            self._samples.draw_report()
            self._samples.write_page()
        self._close_sender(seconds_left)
        self._terminal.log_summary(self._summary(state))

    def end(self, state: TrainState, status: str, line: str, seconds_left: Callable[[], float | None]) -> None:
        """Record the end of a run without a result; let the sender and the mirror deliver it.

        status: FAILED or KILLED, as MLflow has it. seconds_left: the time until this process must
        end, or None.
        """
        self._record_end(state, status, line)
        if self._samples:
            self._samples.write_page()
        if self._mirror:
            self._mirror.upload()  # meanwhile
        self._close_sender(seconds_left)
        if self._mirror:
            self._mirror.close(seconds_left)

    def _record_end(self, state: TrainState, status: str, line: str) -> None:
        self.wait_for_save()
        self._folder.check_ours()
        self._log_mirror_events()
        self._journal.log_event("ended", status=status, step=state.step, line=line, best=self._best_file(state))
        self._receipt.write(self._terminal.log)

    def _close_sender(self, seconds_left: Callable[[], float | None]) -> None:
        log = self._terminal.log
        if self._sender and not self._sender.close(log, seconds_left):
            command = f"pipeline sync {shlex.quote(str(self._folder.path))}"
            reason = f" ({last})" if (last := sender.last_failure(self._folder)) else ""
            log(f"MLflow did not take everything{reason}: the journal keeps it, '{command}' sends it")

    def crash(self, step: int, status: str, line: str) -> None:
        """Record a crash at `step`, once a checkpoint that is being written is complete."""
        self.wait_for_save()
        self.log_event("ended", status=status, step=step, line=line)

    def flush_mirror(self, seconds: float) -> None:
        """Upload what the mirror lacks, for at most `seconds`.

        The disk may be gone after this process.
        """
        if self._mirror:
            end = time.monotonic() + seconds
            self._mirror.close(lambda: end - time.monotonic())

    def _log_mirror_events(self) -> None:
        while self._mirror and self._mirror.failures:
            self._journal.log_event("mirror failed", reason=self._mirror.failures.pop(0))
        while self._mirror and self._mirror.uploaded:
            self._journal.log_event("mirrored", checkpoint=self._mirror.uploaded.pop(0))

    def _summary(self, state: TrainState) -> dict[str, str]:
        best, file = state.best, self._best_file(state)
        rows = {}
        if best is None:
            rows["best"] = "none: no validation had finite logits, so no model is sent or registered"
        last = state.evaluation
        is_last = best is not None and last is not None and best.step == last.step
        if best and last and file:
            rows["best"] = f"step {best.step:,}, top-1 {best.top1:.4f}"
            rows["best"] += " (the last)" if is_last else f"; last: step {last.step:,}, top-1 {last.top1:.4f}"
            rows["best"] += f": {self._folder.checkpoints / file['file']}"
        if self._config.track.report:
            rows["report"] = str(self._folder.report / page.FILE_NAME)
        uri = sender.tracking_uri(self._config, self._folder)
        rows["tracker"] = without_password(uri) if uri else "none: the journal alone"
        if self._mirror:
            rows["mirror"] = f"{self._config.checkpoint.mirror}{' (incomplete)' if self._mirror.error else ''}"
        run_dir = shlex.quote(str(self._folder.path))
        rows["use it"] = f"pipeline predict {run_dir}{'' if is_last or not file else ' --best'} IMAGE ..."
        return rows

    def _best_file(self, state: TrainState) -> dict[str, Any] | None:
        path = self._checkpoints.path_of_step(state.best.step) if state.best else None
        return {"step": state.best.step, "file": path.name} if state.best and path else None


class NullRecords(Records):
    """Writes nothing: for every process but rank 0."""

    gave_up_saving = False
    last_save_failed = False
    is_folder_removed = False

    def __init__(self) -> None:
        pass

    def wait_for_tracker(self) -> None:
        return None

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        pass

    def log_event(self, name: str, **fields: Any) -> None:
        pass

    def log_evaluation(self, row: dict[str, Any]) -> None:
        pass

    def log_sample_ids(self, step: int, epoch: int, ids: list[int], batch_sha256: str) -> None:
        pass

    def keep_predictions(self, result: EvalResult) -> None:
        pass

    def save(self, state: dict[str, Any], epoch: int, step: int, best_step: int | None, patience_s: float) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def lacks_checkpoint(self, step: int) -> bool:
        return False

    def finish(self, state: TrainState, line: str, seconds_left: Callable[[], float | None]) -> None:
        pass

    def deliver(self, state: TrainState, seconds_left: Callable[[], float | None]) -> None:
        pass

    def end(self, state: TrainState, status: str, line: str, seconds_left: Callable[[], float | None]) -> None:
        pass

    def crash(self, step: int, status: str, line: str) -> None:
        pass

    def flush_mirror(self, seconds: float) -> None:
        pass


def open_records(
    config: Config, plan: Plan, state: TrainState, folder: RunFolder, source: Source, resumed_from: Path | None,
    mirror: Mirror | None, terminal: Terminal,
) -> Records:  # fmt: skip
    """Return this process's records. All processes call this together, and raise together.

    Raises RequestError or StorageError if the folder cannot be written, RequestError if a required
    tracker is away.
    """
    group = state.strategy.group
    evaluated = state.receipt_row() if state.is_evaluated else None
    records: Records = NullRecords()
    error: RunError | None = None
    if group.is_main:
        try:
            records = Records(config, plan, state, folder, source, resumed_from, evaluated, mirror, terminal)
        except OSError as reason:
            error = folder.write_error(reason)
        except RunError as reason:
            error = reason
    group.raise_together(error)
    if config.track.required:
        group.raise_together(group.run_long_task(records.wait_for_tracker))
    return records


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
