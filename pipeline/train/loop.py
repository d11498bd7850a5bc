"""The loop, from top to bottom: evaluate when due, save when due, then the next update.

What is due is asked at the head of the loop. So a run that was stopped between an update and its
evaluation evaluates when it resumes, and the end of training is no special case. Every decision is
the same in all processes: it comes from the plan, from the state, or from `any_rank`.
"""

from collections.abc import Iterator
from contextlib import nullcontext

from pipeline.data.batch import Batch
from pipeline.errors import NotFiniteError, StorageError, TemporaryError
from pipeline.record.checkpoint import MAX_FAILING_S, MAX_FAILURES, all_finite
from pipeline.train.state import Evaluation
from pipeline.train.step import update_once
from pipeline.train.trainer import Trainer

LAST_SAVE_S = 60


def train(trainer: Trainer, batches: Iterator[Batch], *, is_saved: bool) -> Evaluation:
    """Train to the plan's last step. Return the evaluation of the last step's model.

    is_saved: False if the state comes from a checkpoint in another folder, so that it must be saved
    here too.

    Raises TemporaryError, after a save, if a process was asked to stop, and what `update_once` and
    `save` raise: in all processes together.
    """
    state, plan, timer, metrics = trainer.state, trainer.plan, trainer.timer, trainer.metrics
    first_step = state.step
    saved = (state.step, state.is_evaluated) if is_saved else None
    is_stopping = False
    trainer.profiler.at_step(state.step)
    while True:
        is_best = False
        if plan.evaluates_at(state.step) and not state.is_evaluated and not is_stopping:
            with timer.charge("validation"):
                evaluation = evaluate(trainer)
            if evaluation is None:
                is_stopping = True
            else:
                is_best = state.add_evaluation(evaluation)
                with timer.charge("tracking"):
                    metrics.after_evaluation(state, is_best)
        if (is_stopping or is_best or plan.saves_at(state.step)) and saved != (state.step, state.is_evaluated):
            with timer.charge("checkpoint"), trainer.watchdog.allow_pause():  # a disk may be slow
                save(trainer, is_last=is_stopping or state.step >= plan.last_step, is_stopping=is_stopping)
            saved = (state.step, state.is_evaluated)
            metrics.restart_window()
        if is_stopping:
            raise TemporaryError("asked to stop", f"step {state.step} is saved, the same command resumes from it")
        metrics.end_of_epoch(state)
        if state.step >= plan.last_step:
            assert state.evaluation is not None
            return state.evaluation

        compiles = plan.compiles_at(state.step, is_first=state.step == first_step)
        with trainer.watchdog.allow_compilation(trainer.group) if compiles else nullcontext():
            is_stopping = update_once(trainer, batches)


def evaluate(trainer: Trainer) -> Evaluation | None:
    """Evaluate the current model. Return None if a process was asked to stop meanwhile."""
    state = trainer.state
    step = state.confirmed_step
    trainer.divergence.compare(step)
    trainer.strategy.broadcast_buffers(state.eval_model)
    result = trainer.evaluator.evaluate(step, trainer.asked_to_stop)
    if result is None:
        return None
    trainer.terminal.log_bad_images(trainer.evaluator.images, result.defects)
    trainer.records.keep_predictions(result)
    for counts in result.failed_reads:
        trainer.metrics.add_failed_reads(counts)
    return result.evaluation


def save(trainer: Trainer, *, is_last: bool, is_stopping: bool = False) -> None:
    """Have rank 0 save the state.

    is_last: return only when it is on the disk. Unless the run is stopping, too, a save that fails
    is then tried again, while the other ranks wait.

    Raises NotFiniteError if weights are not finite, StorageError if saves fail, DivergedError if
    weights differ.
    """
    state, group, records = trainer.state, trainer.group, trainer.records
    step = state.confirmed_step
    trainer.divergence.compare(step)
    trainer.strategy.average_buffers(state.model)
    if state.ema is not None:
        trainer.strategy.average_buffers(state.ema)
    records.wait_for_save()
    best = state.best_step
    not_finite, gave_up, best_is_lost, is_removed = group.any_rank(
        not all_finite(state.model.state_dict().values()),
        records.gave_up_saving,
        best is not None and best != step and records.lacks_checkpoint(best),
        records.is_folder_removed,
    )
    removed = StorageError(
        f"run.dir={trainer.config.run_dir} was removed or renamed during the run, step {step} is lost: leave a run's"
        " folder where it is until the run ends"
    )
    if not_finite:
        raise NotFiniteError(f"weights are not finite at step {step}: not saved; the earlier checkpoints are good")
    if gave_up and is_removed:
        raise removed
    if gave_up:
        limit = f"{MAX_FAILURES} times in a row and for {MAX_FAILING_S // 60} minutes"
        raise StorageError(f"saves failed {limit}, step {step} is lost", "free disk space")
    if best_is_lost:
        trainer.terminal.log(
            f"the checkpoint of the best model, step {best:,}, is not in the run's folder: the best is chosen again"
            " from here"
        )
        state.forget_best()
    warning = trainer.strategy.precision_warning()
    if warning:
        trainer.terminal.log(warning)
    contents = state.to_dict(group.all_reduce(state.totals))
    patience_s = min(LAST_SAVE_S, trainer.config.run.timeout / 2) if is_last and not is_stopping else 0
    records.save(contents, trainer.plan.epoch_at(step), step, state.best_step, patience_s)
    if is_last:
        records.wait_for_save()
    failed, is_removed = group.any_rank(is_last and records.last_save_failed, records.is_folder_removed)
    if failed and is_removed:
        raise removed
    if failed and is_stopping:
        raise TemporaryError(
            "asked to stop", f"step {step} could not be saved, the same command resumes from the newest checkpoint"
        )
    if failed:
        raise StorageError(f"the last checkpoint, of step {step}, could not be saved", "free disk space")
