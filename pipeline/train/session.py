"""One process's part in a run, from start to end: join, build, train, end.

The `main` of a rank. It connects what the other modules do and contains no arithmetic. Its promise
is the order: parts are complete before the state is loaded; rank 0 holds the folder's lock before
anything is written to it; and however the run ends, the journal says so, the sender gets time to
deliver it, and no process exits before rank 0 has saved.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from pipeline import errors
from pipeline import group as groups
from pipeline.config.schema import Config
from pipeline.data.loader import LoaderError, TrainBatches, batches
from pipeline.data.sources import Source
from pipeline.data.transfer import to_device
from pipeline.errors import RunError, shorten
from pipeline.guards.signals import StopRequest
from pipeline.guards.watchdog import COMPILATION_S, Watchdog
from pipeline.model.weights import weights_digest
from pipeline.plan import divide_resources, request_digest
from pipeline.record.checkpoint import eval_model, eval_weights
from pipeline.record.folder import RunFolder
from pipeline.record.journal import final_status
from pipeline.record.receipt import Receipt
from pipeline.record.terminal import Terminal, make_terminal
from pipeline.timing import make_timer
from pipeline.train.build import build_state
from pipeline.train.ending import crash, end_of, leave, record_end, record_hang
from pipeline.train.evaluate import Evaluator
from pipeline.train.job import Job, Process
from pipeline.train.join import agree_on_plan, broadcast_source, check_same_request, join
from pipeline.train.listener import Mirror
from pipeline.train.loop import train
from pipeline.train.records import Records, describe_result, open_records
from pipeline.train.resume import VerifiedCheckpoint, broadcast_contents, resume
from pipeline.train.state import Evaluation, TrainState
from pipeline.train.trainer import Trainer
from pipeline.world import World

_SHOWN_RECALLS = 10
_MARGIN_S = 10
_GPU_MARGIN_S = 120  # the watchdog's margin and the part of a step between a collective and its last progress


@dataclass(frozen=True)
class Prepared:
    """The findings of rank 0 before the group forms."""

    source: Source
    table: str
    """The plan, as text."""
    found: VerifiedCheckpoint | None = None
    """The checkpoint to resume from."""
    weights: dict[str, Tensor] | None = None
    """First weights, if model.init names some and no checkpoint replaces them."""
    mirror: Mirror | None = None
    """Holds the lease of `checkpoint.mirror`."""
    resume: str = "auto"
    """`run.resume`, or its replacement at a restart."""


def run_training(
    config: Config, world: World, folder: RunFolder, prepare: Callable[[], Prepared] | None, stop: StopRequest
) -> str:
    """Train as one process of `world`, and return the result line.

    Raises a RunError if there is none.

    prepare: on rank 0, which holds the folder's lock; None in the other processes.
    """
    terminal = make_terminal(is_main=world.is_main)
    request = request_digest(config, world)
    # nothing here refers to what is prepared, so that training keeps no checkpoint in memory
    trainer, is_saved = _set_up(
        config, world, folder, _prepare(config, world, folder, prepare, stop) if prepare else None, stop
    )
    job, process, state = trainer.job, trainer.process, trainer.state
    group, watchdog, plan = process.group, process.watchdog, job.plan
    try:
        data = TrainBatches(job.source.train, config, plan, group.rank)
        positions = range(state.step * plan.accumulate, max(state.step, plan.last_step) * plan.accumulate)
        watchdog.begin_training(partial(record_hang, trainer), config.same_command)
        with closing(batches(data, positions, plan, pin=group.device.type == "cuda")) as loaded:
            evaluation = train(trainer, to_device(loaded, group.device), is_saved=is_saved)
    except LoaderError as error:
        folder.check_ours()
        errors.save_failure(folder.path, error, request)
        crash(trainer, error)
    except RunError as error:
        watchdog.stop()
        # the modules that raise it do not know the configuration
        error.remedy = error.remedy.replace("the same command", config.same_command)
        with _saving_failure(config, folder, request, terminal):
            errors.save_failure(folder.path, error, request)  # the mirror gets it, too
            group.run_long_task(partial(leave, trainer, error))
            group.shutdown()
            raise
    except Exception as error:
        crash(trainer, error, is_secondary=groups.is_peer_failure(error))
    line = _done_line(plan.epoch_at(state.step), evaluation, state.weights_digest())
    watchdog.stop()
    end = end_of(trainer, "FINISHED", line)
    try:
        group.run_long_task(partial(record_end, trainer, end))
        group.shutdown()
    except RuntimeError as error:
        # rank 0 has recorded the end by now, whichever rank is lost meanwhile
        if not (group.is_main and groups.is_peer_failure(error) and final_status(folder.journal) == "FINISHED"):
            raise
        terminal.log("another process was lost after the last step: the run is finished all the same")
    for listener in trainer.records.listeners:  # the other ranks leave meanwhile, and free their GPUs
        listener.closed(end)
    if trainer.records.listeners:
        terminal.log_summary(describe_result(job, end, trainer.records.mirror))
    return line


def run_evaluation(config: Config, world: World, contents: dict[str, Any], source: Source | None) -> str:
    """Validate a checkpoint's contents as one process of `world`, and return the result line."""
    terminal = make_terminal(is_main=world.is_main)
    group = join(config, world)
    source = broadcast_source(config, group, source)
    model = eval_model(contents, config.model).to(group.device)
    evaluator = Evaluator(model, source.val, config, divide_resources(config, world), group)
    result = evaluator.evaluate(contents["step"], terminal, lambda: False)
    assert result is not None
    terminal.log_bad_images(result.bad_images)
    terminal.log(f"validation: {result.evaluation.line}")
    recalls = result.predictions.lowest_recalls(len(source.classes), _SHOWN_RECALLS)
    shown = [f"{shorten(source.classes[label], 24)} {correct}/{images}" for label, correct, images in recalls]
    count, balanced = result.predictions.classes_with_images, result.evaluation.describe_balanced(len(source.classes))
    part = f"the lowest of {count:,} classes" if len(shown) < count else "each class"
    terminal.log(f"{balanced}, recall of {part}: {', '.join(shown)}")
    if result.evaluation.warning:
        terminal.log(result.evaluation.warning)
    group.shutdown()
    return _done_line(contents["epoch"], result.evaluation, weights_digest(eval_weights(contents)))


def _prepare(
    config: Config, world: World, folder: RunFolder, prepare: Callable[[], Prepared], stop: StopRequest
) -> Prepared:
    """Return rank 0's findings, and show the plan.

    Raises EarlyStopError at a signal: nothing is changed before.
    """
    watchdog = _new_watchdog(config, world, folder, stop)
    watchdog.start()
    try:
        with stop.raise_on_signal():
            prepared = prepare()
    finally:
        watchdog.stop()
    _announce(config, folder, prepared, make_terminal(is_main=True))
    return prepared


def _new_watchdog(config: Config, world: World, folder: RunFolder, stop: StopRequest) -> Watchdog:
    # longer than a collective may take, so that a collective that fails reports its own error
    timeout_s = config.run.timeout + _MARGIN_S
    return Watchdog(timeout_s, folder.path / f"hang-rank-{world.rank}.txt", world.rank, stop, folder.check_ours)


def _set_up(
    config: Config, world: World, folder: RunFolder, prepared: Prepared | None, stop: StopRequest
) -> tuple[Trainer, bool]:
    """Join the group, build all parts, load the state and open the records.

    Return the trainer, and False if its state comes from a checkpoint in another folder.

    The checkpoint's bytes and contents are local here, so that training does not keep them in
    memory.
    """
    terminal = make_terminal(is_main=world.is_main)
    found = prepared.found if prepared else None
    mirror = prepared.mirror if prepared else None
    with ExitStack() as setting_up:
        with _saving_failure(config, folder, request_digest(config, world), terminal):
            # one process waits for no peers
            with stop.exit_on_signal() if world.size > 1 else stop.raise_on_signal():
                group = join(config, world)
            if not group.is_main:
                folder.join_holder()  # rank 0, which has the lock by now
            watchdog = _new_watchdog(config, world, folder, stop)
            setting_up.callback(watchdog.stop)
            watchdog.start()
            group.set_device_timeout(config.run.timeout + COMPILATION_S + _GPU_MARGIN_S)
            process = Process(group, terminal, make_timer(group.device.type), watchdog, stop)
            check_same_request(config, group)
            source = broadcast_source(config, group, prepared.source if prepared else None)
            job = Job(config, agree_on_plan(config, group, source), source, folder)
            contents = broadcast_contents(found, group)
            weights = prepared.weights if prepared else None
            job, state = build_state(job, process, weights, is_resumed=contents is not None)
            watchdog.beat()
            if contents:
                resume(state, contents, config, group, terminal.log)
            resumed_from = found.path if found else None
            (is_moved,) = group.any_rank(resumed_from is not None and not folder.contains(resumed_from))
        if _is_finished(job, state, terminal):
            records = Records()
            group.run_long_task(partial(_update_mirror, mirror, stop))
        else:
            records = open_records(job, process, state, resumed_from, mirror)
        trainer = Trainer(job, process, state, records)
        setting_up.pop_all()  # the watchdog also watches the training
    return trainer, not is_moved


def _announce(config: Config, folder: RunFolder, prepared: Prepared, terminal: Terminal) -> None:
    """Show the plan, now that the request has passed all checks. Set an earlier run aside first."""
    if prepared.resume == "never":
        aside = folder.set_aside()
        terminal.show(f"moved the contents of {folder.path} to {aside}" if aside else "a fresh start")
    terminal.show(f"{config.recipe} in {folder.path}\n{prepared.table}")


def _is_finished(job: Job, state: TrainState, terminal: Terminal) -> bool:
    """Return True, in all processes, if an earlier start finished this run and recorded that."""
    plan, folder, group = job.plan, job.folder, state.strategy.group
    (is_unrecorded,) = group.any_rank(group.is_main and final_status(folder.journal) != "FINISHED")
    if state.step < plan.last_step or not state.is_evaluated or is_unrecorded:
        return False
    terminal.log(f"already finished: {folder.path} is at step {state.step:,} of {plan.last_step:,}")
    if group.is_main:
        Receipt(folder).write(terminal.log)  # the earlier start may have been killed before it did
    return True


@contextmanager
def _saving_failure(config: Config, folder: RunFolder, request: str, terminal: Terminal) -> Iterator[None]:
    """Save a permanent failure for the next start of this request, and log what to do then."""
    try:
        yield
    except RunError as error:
        folder.check_ours()
        if errors.save_failure(folder.path, error, request):
            advice = folder.advice_after_failure(error, config)
            terminal.log(f"with run.resume=auto this request now fails at once: {advice}")
        elif error.code in errors.PERMANENT:
            terminal.log(f"{errors.FAILURE} could not be written: {config.same_command} tries again")
        raise


def _update_mirror(mirror: Mirror | None, stop: StopRequest) -> None:
    """Send what an earlier start of a finished run could not send."""
    if mirror:
        mirror.start()
        mirror.close(stop.seconds_left)


def _done_line(epoch: int, evaluation: Evaluation, weights: str) -> str:
    return (
        f"done step={evaluation.step} epoch={epoch} top1={evaluation.top1:.4f} top5={evaluation.top5:.4f}"
        f" images={evaluation.images}/{evaluation.total} weights=sha256:{weights}"
    )
