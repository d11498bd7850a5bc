"""The loop, from top to bottom: evaluate when due, save when due, then the next update.

What is due is asked at the head of the loop. So a run that was stopped between an update and its
evaluation evaluates when it resumes, and the end of training is no special case. Every decision is
the same in all processes: it comes from the plan, the state, the loss guard or `any_rank`.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

from pipeline.data.batch import Batch, Defect
from pipeline.errors import BadImage, NotFiniteError, RunError, StorageError, TemporaryError
from pipeline.lazy import addon
from pipeline.record.checkpoint import MAX_FAILING_S, MAX_FAILURES, all_finite
from pipeline.train.evaluation import Evaluation
from pipeline.train.job import Job, Process
from pipeline.train.listener import Evaluated, Update
from pipeline.train.records import Records
from pipeline.train.state import TrainState
from pipeline.train.step import Step

_LAST_SAVE_S = 60
"""Seconds for which the last save of a run is tried again."""


class Trainer:
    """The parts with which a process trains. The state changes, the parts stay."""

    def __init__(self, job: Job, process: Process, state: TrainState, records: Records) -> None:
        self.job, self.process, self.state, self.records = job, process, state, records
        config, plan, strategy = job.config, job.plan, state.strategy
        is_graph = config.train.compile == "reduce-overhead"
        kind = addon("models.graph_step").GraphStep if is_graph else Step
        self.step: Step = kind(config, plan, state, process.timer)
        self.metrics = addon("run.metrics").Metrics(job, process, strategy)
        self.divergence = addon("run.divergence").DivergenceWatch(strategy, plan)
        predict = strategy.make_predictor(state.eval_model)
        self.evaluator = addon("models.evaluator").Evaluator(
            state.eval_model, job.source, config, plan, process.group, predict
        )


def train(trainer: Trainer, batches: Iterator[Batch]) -> Evaluation:
    """Train to the plan's last step. Return the evaluation of the last step's model.

    Raises TemporaryError, after a save, if a process was asked to stop, and what `update_once` and
    `save` raise: in all processes together.
    """
    state, plan, metrics = trainer.state, trainer.job.plan, trainer.metrics
    timer, watchdog = trainer.process.timer, trainer.process.watchdog
    first_step = state.step  # above 0 if the run was resumed
    # needs no save, or has one: a step is saved again once its evaluation is known
    saved = (state.step, state.is_evaluated)
    is_stopping = False
    while True:
        is_best = False
        if plan.evaluates_at(state.step) and not state.is_evaluated and not is_stopping:
            found = evaluate(trainer)  # None: asked to stop meanwhile, and the next start evaluates
            is_stopping = found is None
            is_best = found is not None and found.is_best
        is_over = state.is_over(plan)  # at the last step, or by train.patience
        # both are due once an epoch by default, never at step 0
        is_due = is_stopping or is_best or is_over or plan.saves_at(state.step)
        if is_due and saved != (state.step, state.is_evaluated):
            state.confirm_step()  # before the pause, in which nothing ends a process that waits for a peer
            with timer.charge("checkpoint"), watchdog.allow_pause():  # a disk may be slow
                save(trainer, is_last=is_stopping or is_over, is_stopping=is_stopping)
            saved = (state.step, state.is_evaluated)
            metrics.restart_window()
        if is_stopping:  # all processes are here, and the step is on the disk
            raise TemporaryError(
                "asked to stop", f"step {state.step} is saved, the same command resumes from it"
            )
        if spent := metrics.end_of_epoch(state.step):
            for listener in trainer.records.listeners:
                listener.measured(state.step, spent)
        if is_over:
            assert state.evaluation is not None
            if state.step < plan.last_step:
                trainer.process.terminal.log(f"no better evaluation for train.patience={plan.patience}: ends")
            return state.evaluation

        # the first pass with images of a size compiles the model: minutes that are no hang
        compiles = plan.compiles_at(state.step, is_first=state.step == first_step)
        with watchdog.allow_compilation(trainer.process.group) if compiles else nullcontext():
            is_stopping = update_once(trainer, batches)


def update_once(trainer: Trainer, batches: Iterator[Batch]) -> bool:
    """Train on the next global batch and update the weights once.

    Return True if any process was asked to stop.

    batches: this process's passes, in order. Raises in all processes: NotFiniteError if the loss is
    not finite, OutageError if the data stays out of reach, StorageError if too many images are bad,
    RunError if weights differ.
    """
    state, plan = trainer.state, trainer.job.plan
    timer = trainer.process.timer
    loss = trainer.step.forward_backward(batches)  # the gradients are exchanged, the weights as before
    used = trainer.step.used
    with timer.charge("communication"):
        # whatever one process knows, all decide, in one exchange: a process that left by itself
        # would leave the others waiting in their next collective. A signal that comes later waits
        # for the next step. Beside this and the gradients only what is due costs an exchange.
        is_asked = trainer.process.asked_to_stop()  # also reports progress to the watchdog
        # on a GPU this is about the step before: the host never waits for the device
        is_stopping, defects = state.loss_guard.agree(state.step + 1, loss, used, is_asked=is_asked)
    _record_bad_images(trainer, defects)  # other images are in their place, so the update is made
    with timer.charge("optimizer"):
        trainer.step.apply_gradients()
    with timer.charge("tracking"):
        # rank 0 alone has listeners, but all processes take part in the sums that they write
        traced = addon("run.journal").trace(state, used) if trainer.job.config.run.trace else ()
        update = Update(state.step, plan.epoch_at(state.step - 1), *traced)
        for listener in trainer.records.listeners:
            listener.stepped(update)
        trainer.metrics.after_update(state, trainer.records.listeners)
    if plan.watch_every and state.step % plan.watch_every == 0:
        trainer.divergence.compare(state.step)
    return is_stopping


def evaluate(trainer: Trainer) -> Evaluated | None:
    """Evaluate the current model. Return None if a process was asked to stop meanwhile."""
    state, process = trainer.state, trainer.process
    with process.timer.charge("validation"):
        step = state.confirm_step()
        trainer.divergence.compare(step)  # an evaluation of weights that differ would say nothing
        trainer.metrics.report(state, trainer.records.listeners)
        state.strategy.broadcast_buffers(state.eval_model)
        result: Evaluated | None = trainer.evaluator.evaluate(step, process.terminal, process.asked_to_stop)
        if result is None:
            return None
        is_best = state.add_evaluation(result.evaluation)
    with process.timer.charge("tracking"):
        # in all processes: a sharded model is gathered for its digest
        row = addon("run.receipt").receipt_row(state)
        result = replace(result, row=row, is_best=is_best)
        for listener in trainer.records.listeners:
            listener.evaluated(result)
    trainer.metrics.restart_window()
    return result


def save(trainer: Trainer, *, is_last: bool, is_stopping: bool = False) -> None:
    """Have rank 0 save the state, once all processes agree that it may be saved.

    is_last: return only when it is on the disk. Unless the run is stopping, too, a save that fails
    is then tried again, while the other ranks wait.

    Raises NotFiniteError if weights are not finite, StorageError if saves fail, RunError if weights
    differ, and what `update_once` raises about the last step.
    """
    state, job, group = trainer.state, trainer.job, trainer.process.group
    writer = trainer.records.checkpoints  # None on ranks other than 0
    _record_bad_images(trainer, state.loss_guard.sync())
    trainer.metrics.report(state, trainer.records.listeners)  # totals must not be reported again
    step = state.step
    trainer.divergence.compare(step)
    for model in filter(None, (state.model, state.ema)):
        state.strategy.average_buffers(model)
    refusal: RunError | None = None
    if not all_finite(state.model.state_dict().values()):
        refusal = NotFiniteError(
            f"weights are not finite at step {step}: not saved; the earlier checkpoints are good"
        )
    elif writer:
        writer.wait()  # for the save before this one: there is one at a time
        if writer.should_give_up:
            often = f"saves failed {MAX_FAILURES} times in a row and for {MAX_FAILING_S // 60} minutes"
            refusal = writer.error(f"{often}, step {step} is lost")
    group.raise_together(refusal)
    # all processes: a sharded state is gathered here
    contents = state.to_dict(group.all_reduce(state.totals))
    failure: RunError | None = None
    if writer:
        patience_s = min(_LAST_SAVE_S, job.config.run.timeout / 2) if is_last and not is_stopping else 0
        contents = {**contents, **trainer.records.identity, "epoch": job.plan.epoch_at(step)}
        # returns once the tensors are on the host: a thread writes the file while training goes on
        writer.save(contents, step, state.best.step if state.best else None, patience_s)
        if is_last:
            writer.wait()
        if is_last and writer.failures:
            failure = writer.error(f"the last checkpoint, of step {step}, could not be saved")
            if is_stopping and not writer.is_folder_removed:
                remedy = "the same command resumes from the newest checkpoint"
                failure = TemporaryError("asked to stop", f"step {step} could not be saved, {remedy}")
    if is_last:
        group.raise_together(failure)


def _record_bad_images(trainer: Trainer, defects: list[Defect]) -> None:
    """Tell of each bad image once. defects: those of all processes, perhaps known.

    Raises StorageError, in all processes, if there are more than data.max_bad allows.
    """
    if not defects:
        return
    known, images, config = trainer.state.bad_images, trainer.job.source.train, trainer.job.config
    new = []
    for sample, reason in defects:
        if sample not in known:
            known[sample] = reason
            new.append(BadImage(sample, images.name(sample), reason))
    for listener in trainer.records.listeners:
        listener.found(new)
    limit = config.data.max_bad * trainer.job.plan.train_images
    if len(known) > limit:
        raise StorageError(
            f"{len(known)} of {trainer.job.plan.train_images:,} training images cannot be decoded, more than"
            f" data.max_bad={config.data.max_bad:g} allows ({limit:.0f})",
            "raise data.max_bad to train without them, or"
            f" fix the files that 'pipeline data check' names and {config.start_again}",
        )
