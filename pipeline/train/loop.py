"""The loop, as prose: fetch, forward and backward, agree, update, record, evaluate when due, save when due.

What is due at a step is asked at the loop's head, so that a run that was stopped between an update and its evaluation
does on resumption what was still owed, and the end of training is no special case. Every decision in here is taken by all
processes alike: it comes from the plan, from the state, or from `agree`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeline.config.schema import Config
from pipeline.data.batch import Batch
from pipeline.data.sources import Images
from pipeline.errors import NotFiniteError, StorageError, TemporaryError
from pipeline.group import Group
from pipeline.guards.nonfinite import Losses
from pipeline.guards.signals import StopRequest
from pipeline.guards.stragglers import NullPace, NullWatch
from pipeline.guards.watchdog import Watchdog
from pipeline.parallel import Strategy
from pipeline.plan import Plan
from pipeline.record.checkpoint import Checkpoints, all_finite
from pipeline.record.journal import Journal
from pipeline.record.receipt import Receipt
from pipeline.record.terminal import Terminal
from pipeline.record.trace import Trace
from pipeline.telemetry.mfu import NullEfficiency
from pipeline.telemetry.profiler import NullProfiler
from pipeline.telemetry.timing import Clock, Waiting
from pipeline.train.evaluate import Evaluator
from pipeline.train.metrics import Report, trace_update
from pipeline.train.samples import NullSamples
from pipeline.train.state import Evaluation, TrainState
from pipeline.train.step import Step


@dataclass
class Training:
    """A run that is ready to go. What only rank 0 has is None elsewhere."""

    config: Config
    plan: Plan
    group: Group
    strategy: Strategy
    state: TrainState
    step: Step
    losses: Losses
    train_images: Images
    evaluator: Evaluator
    identity: dict[str, object]
    """What a checkpoint says besides the state: configuration, data digest, classes."""
    terminal: Terminal
    stop: StopRequest
    watchdog: Watchdog
    watch: NullWatch
    pace: NullPace
    efficiency: NullEfficiency
    clock: Clock
    is_moved: bool = False
    """The state comes from the checkpoint of another folder: it is not saved here yet."""
    samples: NullSamples = field(default_factory=NullSamples)
    profile: NullProfiler = field(default_factory=NullProfiler)
    journal: Journal | None = None
    receipt: Receipt | None = None
    trace: Trace | None = None
    checkpoints: Checkpoints | None = None


def train(run: Training, batches: Iterator[Batch]) -> Evaluation:
    """Train to the plan's last step; the evaluation of the last step's model.

    TemporaryError if asked to stop (a checkpoint of that step exists) or if the data stays out of reach, NotFiniteError,
    DivergedError, StorageError: at all processes.
    """
    state, plan, group = run.state, run.plan, run.group
    clock = run.clock
    waiting = Waiting(batches, clock)
    report = Report(plan, group, run.terminal, clock, run.pace, run.efficiency, run.journal, run.receipt)
    first_step = state.step
    stopping, saved = False, None if run.is_moved else (state.step, state.is_evaluated)
    while True:
        is_best = False
        if plan.evaluates_at(state.step) and not state.is_evaluated and not stopping:
            with clock.on("validation"):
                evaluation = _evaluate(run)
            if evaluation:
                is_best = state.take(evaluation)
                with clock.on("tracking"):
                    report.evaluated(state, is_best)
            stopping = evaluation is None
        if (stopping or is_best or plan.saves_at(state.step)) and saved != (state.step, state.is_evaluated):
            with clock.on("checkpoint"):
                _save(run, last=stopping or state.step >= plan.last_step)
            saved = (state.step, state.is_evaluated)
            report.restart_clock()
        if stopping:
            raise TemporaryError(f"asked to stop: step {state.step} is saved, the same command goes on from it")
        report.account(state)
        if state.step >= plan.last_step:
            assert state.evaluation is not None
            return state.evaluation

        if plan.compiles_at(state.step, is_first=state.step == first_step):
            run.watchdog.wait_for_compilation()
        run.pace.start()
        loss, used = run.step.forward_backward(waiting)
        with clock.on("communication"):
            stopping, not_finite, defects, outage = group.any_rank(
                _asked_to_stop(run),
                run.losses.look(state.step + 1, loss, used),
                any(batch.defects for batch in used),
                any(batch.outage for batch in used),
            )
        if outage:  # not saved: batch norm has counted what are no images
            group.raise_together(next((batch.outage for batch in used if batch.outage), None))
        if not_finite:
            raise run.losses.failure()
        if defects:
            _note_defects(run, used)
        with clock.on("optimizer"):
            run.step.update(run.losses.guard)
        with clock.on("tracking"):
            if run.config.run.trace:
                _settle(run)
                trace_update(run.trace, state, plan, group, used)
            if plan.reports_at(state.step):
                _settle(run)
            report.updated(state)
        run.profile.updated(state.step)
        run.watch.updated(state.step)


def _asked_to_stop(run: Training) -> bool:
    """Asked once a step and once a batch of an evaluation, which is as often as there is progress."""
    run.watchdog.beat()
    return run.stop.asked()


def _settle(run: Training) -> None:
    """Wait until the device has looked at the losses so far: that time is the steps', whatever it is that waits."""
    with run.clock.on("communication"):
        run.losses.settle()


def _evaluate(run: Training) -> Evaluation | None:
    _settle(run)
    run.watch.compare(run.state.step)
    run.strategy.share_buffers(run.state.eval_model)
    result = run.evaluator.evaluate(run.state.step, lambda: _asked_to_stop(run))
    if result is None:
        return None
    run.terminal.log_defects(run.evaluator.images, result.defects)
    run.samples.judged(result)
    return result.evaluation


def _save(run: Training, *, last: bool) -> None:
    """Have rank 0 save the state; with `last`, return only when it is on disk."""
    state, writer = run.state, run.checkpoints
    _settle(run)
    run.watch.compare(state.step)
    run.strategy.average_buffers(state.model)
    if state.ema:
        run.strategy.average_buffers(state.ema)
    finite = all_finite(state.model.state_dict().values())
    if writer:
        writer.wait()
    broken, exhausted, best_is_lost = run.group.any_rank(
        not finite, writer is not None and writer.exhausted, _is_best_lost(run)
    )
    if broken:
        raise NotFiniteError(
            f"weights are not finite at step {state.step}: not saved; the checkpoints before it are good"
        )
    if exhausted:
        raise StorageError(
            f"no checkpoint could be saved five times in a row, step {state.step} is lost: make room on the disk"
        )
    if best_is_lost:
        assert state.best is not None
        run.terminal.log(
            f"the checkpoint of the best model, step {state.best.step:,}, is not in the run's folder: from here on the best"
            " is chosen again"
        )
        state.forget_best()
    remark = run.strategy.remark()
    if remark:
        run.terminal.log(remark)
    totals = run.group.all_reduce(state.totals)
    contents = {**state.to_dict(totals), **run.identity, "epoch": run.plan.epoch(state.step)}
    if writer:
        best = state.best.step if state.best else None
        writer.save(contents, state.step, best)
        if last:
            writer.wait()
    (failed,) = run.group.any_rank(last and writer is not None and writer.last_failed)
    if failed:
        raise StorageError(f"the last checkpoint, of step {state.step}, could not be saved: make room on the disk")


def _is_best_lost(run: Training) -> bool:
    """Return True on rank 0 if the best model's checkpoint is not in the run's folder."""
    best = run.state.best
    if run.checkpoints is None or best is None or best.step == run.state.step:
        return False
    return run.checkpoints.of_step(best.step) is None


def _note_defects(run: Training, used: list[Batch]) -> None:
    """Name each bad image once, and end the run when there are too many."""
    known = run.state.bad_images
    for part in run.group.all_gather([defect for batch in used for defect in batch.defects]):
        for sample, defect in part:
            if sample not in known:
                known[sample] = defect
                run.terminal.log(f"bad image {run.train_images.name(sample)}: {defect}; another stands in for it")
                if run.journal:
                    run.journal.event("bad image", id=sample, file=run.train_images.name(sample), defect=defect)
    limit = run.config.data.max_bad * run.plan.train_images
    if len(known) > limit:
        raise StorageError(
            f"{len(known)} of {run.plan.train_images:,} training images cannot be decoded, more than"
            f" data.max_bad={run.config.data.max_bad:g} allows ({limit:.0f}): raise data.max_bad to go on without them, or"
            " fix the files that 'pipeline data check' names and start again with run.resume=never"
        )
