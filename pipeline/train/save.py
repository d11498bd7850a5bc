"""Saving: the processes agree that a step may be saved, and rank 0 writes it."""

from pipeline.errors import NotFiniteError, RunError, StorageError, TemporaryError
from pipeline.record.checkpoint import MAX_FAILING_S, MAX_FAILURES, CheckpointWriter, all_finite
from pipeline.train.trainer import Trainer

LAST_SAVE_S = 60


def save(trainer: Trainer, *, is_last: bool, is_stopping: bool = False) -> None:
    """Have rank 0 save the state.

    is_last: return only when it is on the disk. Unless the run is stopping, too, a save that fails
    is then tried again, while the other ranks wait.

    Raises NotFiniteError if weights are not finite, StorageError if saves fail, RunError if weights
    differ.
    """
    state, job, group = trainer.state, trainer.job, trainer.process.group
    writer = trainer.records.checkpoints  # None on ranks other than 0
    step = state.confirm_step()
    trainer.divergence.compare(step)
    for model in filter(None, (state.model, state.ema)):
        state.strategy.average_buffers(model)
    if writer:
        writer.wait()  # for the save before this one: there is one at a time
    group.raise_together(_refusal(trainer, writer, step))
    best = state.best_step
    is_lost = (
        writer is not None
        and best is not None
        and best != step
        and job.folder.checkpoint_of_step(best) is None
    )
    if any(group.any_rank(is_lost)):
        trainer.process.terminal.log(
            f"the checkpoint of the best model, step {best:,}, is not in the run's folder: the best is chosen again"
            " from here"
        )
        state.forget_best()
    if warning := state.strategy.precision_warning():
        trainer.process.terminal.log(warning)
    contents = state.to_dict(
        group.all_reduce(state.totals)
    )  # all processes: a sharded state is gathered here
    if writer:
        patience_s = min(LAST_SAVE_S, job.config.run.timeout / 2) if is_last and not is_stopping else 0
        epoch = job.plan.epoch_at(step)
        # returns once the tensors are on the host: a thread writes the file while training goes on
        writer.save(
            {**contents, **trainer.records.identity, "epoch": epoch}, step, state.best_step, patience_s
        )
        if is_last:
            writer.wait()
    group.raise_together(_last_failure(trainer, writer, step, is_stopping=is_stopping) if is_last else None)


def _refusal(trainer: Trainer, writer: CheckpointWriter | None, step: int) -> RunError | None:
    """Return why this process cannot go on to save, or None."""
    if not all_finite(trainer.state.model.state_dict().values()):
        return NotFiniteError(
            f"weights are not finite at step {step}: not saved; the earlier checkpoints are good"
        )
    if writer and writer.should_give_up:
        limit = f"{MAX_FAILURES} times in a row and for {MAX_FAILING_S // 60} minutes"
        failure = StorageError(f"saves failed {limit}, step {step} is lost", "free disk space")
        return _removed(trainer, step) if writer.is_folder_removed else failure
    return None


def _last_failure(
    trainer: Trainer, writer: CheckpointWriter | None, step: int, *, is_stopping: bool
) -> RunError | None:
    """Return the error of a last save that failed, or None."""
    if not writer or not writer.failures:
        return None
    if writer.is_folder_removed:
        return _removed(trainer, step)
    if is_stopping:
        return TemporaryError(
            "asked to stop",
            f"step {step} could not be saved, the same command resumes from the newest checkpoint",
        )
    return StorageError(f"the last checkpoint, of step {step}, could not be saved", "free disk space")


def _removed(trainer: Trainer, step: int) -> StorageError:
    return StorageError(
        f"run.dir={trainer.job.folder.path} was removed or renamed during the run, step {step} is lost: leave a run's"
        " folder where it is until the run ends"
    )
