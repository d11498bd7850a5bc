"""One process's part in a run, from start to end: join, build, train, end.

The `main` of a rank. It connects what the other modules do and contains no arithmetic. Its promise
is the order: parts are complete before the state is loaded; rank 0 holds the folder's lock before
anything is written to it; and however the run ends, the journal says so, the sender gets time to
deliver it, and no process exits before rank 0 has saved.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from torch import Tensor

from pipeline import errors, randomness
from pipeline import group as groups
from pipeline.config.load import training_keys
from pipeline.config.schema import Config
from pipeline.data.batch import format_sample_ids
from pipeline.data.index import Index
from pipeline.data.loader import LoaderError, TrainBatches, batches
from pipeline.data.sources import Source, open_source, sent_source
from pipeline.data.transfer import to_device
from pipeline.device import choose_device
from pipeline.errors import RequestError, RunError, TemporaryError, one_line, summary
from pipeline.group import Group
from pipeline.guards.memory import fit_passes, make_try_pass
from pipeline.guards.nonfinite import make_loss_guard
from pipeline.guards.signals import StopRequest
from pipeline.guards.watchdog import COMPILATION_S, Watchdog
from pipeline.model.architectures import Normalise, build
from pipeline.model.weights import load_weights, weights_digest
from pipeline.parallel import choose_strategy
from pipeline.parallel.strategy import Strategy
from pipeline.plan import Plan, divide_resources, make_plan, request_digest
from pipeline.portable import portability, use_exact_roots
from pipeline.record.checkpoint import copy_to_host, eval_model, eval_weights
from pipeline.record.figures import shorten
from pipeline.record.folder import RunFolder
from pipeline.record.journal import final_status
from pipeline.record.mirror import Mirror
from pipeline.record.receipt import Receipt
from pipeline.record.terminal import Terminal, make_terminal
from pipeline.supervision import kill_stopped_peers, launch_id, report_to_agent, stop_restarts
from pipeline.telemetry.timing import make_timer
from pipeline.train.evaluate import Evaluator
from pipeline.train.job import Job, Process
from pipeline.train.listener import End
from pipeline.train.loop import train
from pipeline.train.pretrained import freeze, load_pretrained
from pipeline.train.records import Records, describe_result, open_records
from pipeline.train.resume import VerifiedCheckpoint, broadcast_contents, resume
from pipeline.train.state import Evaluation, TrainState
from pipeline.train.step import warm_up
from pipeline.train.trainer import Trainer
from pipeline.world import World

_SHOWN_RECALLS = 10
_MARGIN_S = 10
_CRASH_MIRROR_S = 10
"""Seconds that a process that crashes may upload to the mirror."""
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
        watchdog.begin_training(partial(_record_hang, trainer), config.same_command)
        with closing(batches(data, positions, plan, pin=group.device.type == "cuda")) as loaded:
            evaluation = train(trainer, to_device(loaded, group.device), is_saved=is_saved)
    except LoaderError as error:
        folder.check_ours()
        errors.save_failure(folder.path, error, request)
        _crash(trainer, error)
    except RunError as error:
        watchdog.stop()
        # the modules that raise it do not know the configuration
        error.remedy = error.remedy.replace("the same command", config.same_command)
        with _saving_failure(config, folder, request, terminal):
            errors.save_failure(folder.path, error, request)  # the mirror gets it, too
            group.run_long_task(partial(_leave, trainer, error))
            group.shutdown()
            raise
    except Exception as error:
        _crash(trainer, error, is_secondary=groups.is_peer_failure(error))
    line = _done_line(plan.epoch_at(state.step), evaluation, state.weights_digest())
    watchdog.stop()
    end = _end(trainer, "FINISHED", line)
    try:
        group.run_long_task(partial(_record_end, trainer, end))
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
    group = _join(config, world)
    source = _broadcast_source(config, group, source)
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
                group = _join(config, world)
            if not group.is_main:
                folder.join_holder()  # rank 0, which has the lock by now
            watchdog = _new_watchdog(config, world, folder, stop)
            setting_up.callback(watchdog.stop)
            watchdog.start()
            group.set_device_timeout(config.run.timeout + COMPILATION_S + _GPU_MARGIN_S)
            process = Process(group, terminal, make_timer(group.device), watchdog, stop)
            _check_same_request(config, group)
            source = _broadcast_source(config, group, prepared.source if prepared else None)
            job = Job(config, _agree_on_plan(config, group, source), source, folder)
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


def _join(config: Config, world: World) -> Group:
    """Configure torch, choose the device and join the process group."""
    if portability(config, world)[0]:
        use_exact_roots()
    randomness.configure_torch(
        deterministic=_is_deterministic(config, on_gpu=world.uses_gpu(config.run.device)),
        # only run.deterministic means the sums of NCCL: portable runs are on CPUs
        exact=config.run.exact or not config.run.deterministic,
        precision=config.train.precision,
        threads=divide_resources(config, world).threads,
    )
    if world.size > 1 and launch_id() is None:
        waiting = f"rank {world.rank} of {world.size} waits for the other processes"
        make_terminal(is_main=True).log(f"{waiting}: {groups.join_advice()}")
    return groups.start(config, world, choose_device(config, world))


def _is_deterministic(config: Config, *, on_gpu: bool) -> bool:
    return config.is_deterministic_on_gpus if on_gpu else config.is_deterministic


def _check_same_request(config: Config, group: Group) -> None:
    """Raise RequestError, in all processes, if one of them would train something else than rank 0.

    A run of an earlier version that rank 0 restores from a mirror is one whose defaults no other
    machine knows.
    """
    mine = {key: str(value) for key, value in training_keys(config).items()}
    stated = json.loads(group.broadcast_bytes(json.dumps(mine).encode() if group.is_main else None))
    other = " ".join(f"{key}={value}" for key, value in stated.items() if mine.get(key) != value)
    problem = f"rank {group.rank} was started with another configuration than rank 0, which has {shorten(other, 200)}"
    group.raise_together(RequestError(problem, "give all processes the same keys") if other else None)


def _broadcast_source(config: Config, group: Group, source: Source | None) -> Source:
    """Return a source with rank 0's index, in every process: file systems may list differently."""
    if config.data.source == "synthetic":
        return source or open_source(config)
    data = group.broadcast_bytes(source.index.to_bytes() if source and source.index else None)
    return source or sent_source(config, Index.from_bytes(data))


def _agree_on_plan(config: Config, group: Group, source: Source) -> Plan:
    """Return the plan. If the machine of one process is too small for it, all processes raise."""
    plan, error = None, None
    try:
        plan = make_plan(config, group.world, source.size)
    except RunError as found:
        error = found
    group.raise_together(error)
    assert plan is not None
    (is_compiler_missing,) = group.any_rank(not plan.compiles)
    if is_compiler_missing and plan.compiles:
        plan = replace(plan, compiles=False, compile_reason="another machine of the job cannot compile")
    reasons = group.all_gather("" if plan.is_portable else plan.portable_reason)
    rank = next((rank for rank, reason in enumerate(reasons) if reason), None)
    if plan.is_portable and rank is not None:
        plan = replace(plan, is_portable=False, portable_reason=f"on rank {rank}: {reasons[rank]}")
    return plan


def build_state(
    job: Job, process: Process, weights: dict[str, Tensor] | None, *, is_resumed: bool
) -> tuple[Job, TrainState]:
    """Build the model, its strategy and its state, and warm up.

    Return also the job, with passes that fit the memory.

    First weights are a function of the seed, or rank 0's `weights`.
    """
    config, plan = job.config, job.plan
    group, log, watchdog = process.group, process.terminal.log, process.watchdog
    if _is_deterministic(config, on_gpu=group.device.type == "cuda"):
        log("deterministic: bit-identical every time; kernels are slower and the number of threads is fixed")
    log(f"creating {config.model.arch} for {plan.num_classes} classes on {group.device} ...")
    randomness.seed_network(config.run.seed, "weights")
    model = build(config.model, plan.num_classes).to(group.device)
    if config.model.init and not is_resumed:
        load_pretrained(model, weights, config.model, group, log)
    if config.model.freeze:
        log(freeze(model, config.model.freeze))
    if group.device.type == "cuda" and config.parallel == "ddp":
        watchdog.beat()
        plan = fit_passes(config, plan, group, make_try_pass(model, config, plan, group.device), log)
    if plan.compiles:
        log("compiling at the first step, which takes a minute or so ...")
    strategy = choose_strategy(config, plan, model, group)
    if strategy.notice:
        log(strategy.notice)
    if group.size > 1:
        strategy.on_gradients_computed(partial(process.timer.switch_to, "communication"))
    state = TrainState.build(strategy, make_loss_guard(strategy, process.timer, config.start_again), config)
    watchdog.beat()
    if strategy.warms_up:
        first_weights = copy_to_host(model.state_dict())  # the warm-up pass changes the running statistics
        with watchdog.allow_compilation(group) if plan.compiles else nullcontext():
            _warm_up(config, plan, strategy, process)
        load_weights(model, first_weights)
    return replace(job, plan=plan), state


def _warm_up(config: Config, plan: Plan, strategy: Strategy, process: Process) -> None:
    """Run the discarded pass, in which a model is compiled.

    Raises RequestError if it cannot be compiled, TemporaryError if a signal ended the compiler.
    """
    normalise = Normalise(strategy.group.device, channels_last=config.model.channels_last)
    if not plan.compiles:
        return warm_up(strategy, normalise, process.timer, plan)
    from torch._dynamo.exc import TorchDynamoException  # takes a second to import

    try:
        warm_up(strategy, normalise, process.timer, plan)
    except TorchDynamoException as error:
        process.stop.check()
        raise RequestError(
            f"{config.model.arch} cannot be compiled", f"train with train.compile=off ({one_line(error)})"
        ) from error


def _end(trainer: Trainer, status: str, line: str) -> End:
    """Return the end of this run. status: FINISHED, FAILED or KILLED."""
    state = trainer.state
    return End(state.step, status, line, state.best, state.evaluation, trainer.process.stop.seconds_left)


def _record_end(trainer: Trainer, end: End) -> None:
    """Record the end, once a checkpoint that is being written is complete."""
    if trainer.records.checkpoints:
        trainer.records.checkpoints.wait()
    for listener in trainer.records.listeners:
        listener.ended(end)


def _leave(trainer: Trainer, error: RunError) -> None:
    """Tell the launcher, the tracker and the mirror why there is no result."""
    if error.code == errors.CRASH:
        report_to_agent(str(error), is_secondary=not trainer.process.group.is_main)
    end = _end(trainer, _status(error), str(error))
    _record_end(trainer, end)
    for listener in trainer.records.listeners:
        listener.closed(end)


def _update_mirror(mirror: Mirror | None, stop: StopRequest) -> None:
    """Send what an earlier start of a finished run could not send."""
    if mirror:
        mirror.start()
        mirror.close(stop.seconds_left)


def _record_hang(trainer: Trainer, error: RunError) -> None:
    """Tell the launcher and the journal that this process exits. A peer may have failed first."""
    report_to_agent(str(error), is_secondary=True)
    kill_stopped_peers(trainer.process.group.local_peer_pids)
    _record_end(trainer, _end(trainer, _status(error), str(error)))


def _status(error: RunError) -> str:
    return "KILLED" if isinstance(error, TemporaryError) else "FAILED"


def _crash(trainer: Trainer, error: Exception, *, is_secondary: bool = False) -> NoReturn:
    """Exit at once: the other processes cannot continue either, and must not be waited for.

    is_secondary: another process failed first.
    """
    trainer.process.watchdog.stop()
    group, step = trainer.process.group, trainer.state.step
    ids = [sample for batch in trainer.step.used for sample in batch.ids.tolist()]
    is_known = isinstance(error, RunError)
    reason = str(error) if is_known else summary("".join(traceback.format_exception_only(error)))
    line = f"rank {group.rank} failed at step {step + 1} ({format_sample_ids(ids)}): {reason}"
    report_to_agent(line, is_secondary=is_secondary)
    kill_stopped_peers(group.local_peer_pids)
    _record_end(trainer, _end(trainer, "FAILED", "crashed"))  # before anything is printed
    details = str(error) if is_known else "".join(traceback.format_exception(error))
    print(f"{details}\npipeline: {line}", file=sys.stderr, flush=True)
    code = error.code if isinstance(error, RunError) else errors.CRASH
    if code in errors.PERMANENT:
        stop_restarts()
    if trainer.records.mirror:  # the disk may be gone after this process
        last = time.monotonic() + _CRASH_MIRROR_S
        trainer.records.mirror.close(lambda: last - time.monotonic())
    os._exit(code)


def _done_line(epoch: int, evaluation: Evaluation, weights: str) -> str:
    return (
        f"done step={evaluation.step} epoch={epoch} top1={evaluation.top1:.4f} top5={evaluation.top5:.4f}"
        f" images={evaluation.images}/{evaluation.total} weights=sha256:{weights}"
    )
