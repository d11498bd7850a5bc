"""One process's whole part in a run: join, build, load, train, take leave.

The `main` of a rank. It wires what the other modules do and holds no arithmetic and no decision of its own; what it
promises is the order. Parts are built whole before the state is loaded; rank 0 holds the folder before anything is
written to it; and however the run ends, the journal says so, the sender gets a moment, and nobody leaves before rank 0
has saved.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from pipeline import errors, parallel, randomness
from pipeline import group as groups
from pipeline.config.credentials import without_password
from pipeline.config.schema import Config
from pipeline.data.batch import format_sample_ids
from pipeline.data.loader import LoaderError, TrainBatches, batches
from pipeline.data.manifest import Index
from pipeline.data.sources import Source, data_root, of_index, open_source
from pipeline.data.transfer import to_device
from pipeline.device import choose_device
from pipeline.errors import RequestError, RunError, TemporaryError
from pipeline.files import atomic_write
from pipeline.group import Group
from pipeline.guards.memory import fit_passes, one_pass
from pipeline.guards.nonfinite import watch_losses
from pipeline.guards.signals import StopRequest
from pipeline.guards.stragglers import start_pace, start_watch
from pipeline.guards.watchdog import Watchdog
from pipeline.model.architectures import build
from pipeline.plan import Plan, make_plan, request_digest, share_resources
from pipeline.record import sender
from pipeline.record.checkpoint import Checkpoints, copy_to_host, eval_model, eval_weights, weights_digest
from pipeline.record.folder import RunFolder
from pipeline.record.journal import Journal, final_status
from pipeline.record.provenance import provenance
from pipeline.record.receipt import Receipt
from pipeline.record.sender import NullSender
from pipeline.record.terminal import Terminal, make_terminal
from pipeline.record.trace import Trace
from pipeline.supervision import kill_stopped, launch_id, report_to_agent, stop_restarts
from pipeline.telemetry.mfu import measure_efficiency
from pipeline.telemetry.profiler import start_profile
from pipeline.telemetry.timing import start_clock
from pipeline.train.evaluate import Evaluator
from pipeline.train.loop import Training, train
from pipeline.train.pretrained import freeze, load_pretrained
from pipeline.train.resume import Found, prepare_folder, resume, share
from pipeline.train.samples import Samples
from pipeline.train.state import Evaluation, TrainState
from pipeline.train.step import Step
from pipeline.world import World

_MARGIN_S = 10


@dataclass(frozen=True)
class Prepared:
    """What rank 0 finds and checks before the group forms."""

    source: Source
    found: Found | None
    """The checkpoint to resume from."""
    weights: dict[str, Tensor] | None
    """First weights, where model.init names some and no checkpoint overwrites them."""


def run_training(
    config: Config, world: World, folder: RunFolder, prepare: Callable[[], Prepared] | None, stop: StopRequest
) -> str:
    """Train as one process of `world`; the line that says the result. Raises a Verdict where there is none.

    prepare: of rank 0, which holds the folder.
    """
    terminal = make_terminal(is_main=world.is_main)
    request = request_digest(config, world)
    # longer than an exchange may take, so that where one fails its own error is what is said
    new_watchdog = partial(
        Watchdog, config.run.timeout + _MARGIN_S, folder.path / f"hang-rank-{world.rank}.txt", world.rank
    )
    run, source, used = _set_up(config, world, folder, prepare, stop, new_watchdog, terminal)
    plan, group, watchdog = run.plan, run.group, run.watchdog
    # a run that was killed before its last word has it to say, and goes on to that
    (unsaid,) = group.any_rank(group.is_main and final_status(folder.journal) != "FINISHED")
    if run.state.step >= plan.last_step and run.state.is_evaluated and not unsaid:
        terminal.log(f"finished before: {folder.path} stands at step {run.state.step:,} of {plan.last_step:,}")
        if group.is_main:
            Receipt(folder).write(terminal.log)  # a kill may have come before its last word
        assert run.state.evaluation is not None
        line = _done_line(plan.epoch(run.state.step), run.state.evaluation, run.state.weights_digest())
        group.finish()
        return line
    tracker = _open_records(run, folder, source, used)
    data = TrainBatches(source.train, config, plan, group.rank)
    positions = range(run.state.step * plan.accumulate, max(run.state.step, plan.last_step) * plan.accumulate)
    watchdog.beat()
    run.profile.updated(run.state.step)
    try:
        evaluation = train(
            run, to_device(batches(data, positions, plan, pin=group.device.type == "cuda"), group.device)
        )
    except LoaderError as ending:
        errors.save_failure(folder.path, ending, request)
        _crash(run, str(ending), ending.code)
    except RunError as ending:
        watchdog.stop()
        with _failures_left(folder, request, terminal):
            group.run_long_task(partial(_break_off, run, tracker, ending))
            group.finish()
            raise
    except Exception as error:
        _crash(run, traceback.format_exc(), errors.CRASH, is_echo=groups.is_peer_failure(error))
    watchdog.stop()
    line = _done_line(plan.epoch(run.state.step), evaluation, run.state.weights_digest())
    group.run_long_task(partial(_conclude, run, folder, tracker, line))
    group.finish()
    return line


def _set_up(
    config: Config,
    world: World,
    folder: RunFolder,
    prepare: Callable[[], Prepared] | None,
    stop: StopRequest,
    new_watchdog: Callable[[], Watchdog],
    terminal: Terminal,
) -> tuple[Training, Source, Path | None]:
    """Join the group, build all parts and load the state. Returns also, on rank 0, which checkpoint that is of.

    The checkpoint's bytes and contents are local here, so that training does not keep them in memory.
    """
    prepared = None
    if prepare:
        watchdog = new_watchdog()
        watchdog.start()
        with stop.raised():
            prepared = prepare()
        watchdog.stop()
    with _failures_left(folder, request_digest(config, world), terminal):
        with stop.obeyed_at_once():
            group = _join(config, world)
        watchdog = new_watchdog()
        watchdog.start()
        source = _share_source(config, group, prepared.source if prepared else None)
        plan = _agree_on_plan(config, group, source)
        found = prepared.found if prepared else None
        contents = share(found, group)
        weights = prepared.weights if prepared else None
        run = _build(config, plan, group, source, weights, terminal, stop, watchdog, is_resumed=contents is not None)
        watchdog.beat()
        run.profile = start_profile(config, folder.report, group, terminal.log)
        if contents:
            resume(run.state, contents, config, group, terminal.log)
        (run.is_moved,) = group.any_rank(
            found is not None and found.path.parent.resolve() != folder.checkpoints.resolve()
        )
    return run, source, found.path if found else None


@contextmanager
def _failures_left(folder: RunFolder, request: str, terminal: Terminal) -> Iterator[None]:
    """Save a failure that ends every start of this request for the next one, and say what to do then."""
    try:
        yield
    except RunError as ending:
        errors.save_failure(folder.path, ending, request)
        if ending.code in errors.PERMANENT:
            terminal.log(f"with run.resume=auto this request now fails at once: {folder.way_on()}")
        raise


def run_evaluation(config: Config, world: World, contents: dict[str, Any], source: Source | None) -> str:
    """Validate a checkpoint's contents as one process of `world`; the line that says the result."""
    terminal = make_terminal(is_main=world.is_main)
    group = _join(config, world)
    source = _share_source(config, group, source)
    model = eval_model(contents, config.model).to(group.device)
    evaluator = Evaluator(model, source.val, config, share_resources(config, world), group)
    result = evaluator.evaluate(contents["step"], lambda: False)
    assert result is not None
    terminal.log_defects(source.val, result.defects)
    if result.evaluation.warning:
        terminal.log(result.evaluation.warning)
    group.finish()
    return _done_line(contents["epoch"], result.evaluation, weights_digest(eval_weights(contents)))


def _join(config: Config, world: World) -> Group:
    """Set torch's switches, take the device, find the others."""
    randomness.configure_torch(
        deterministic=config.is_deterministic,
        precision=config.train.precision,
        threads=share_resources(config, world).threads,
    )
    device = choose_device(config, world)
    return groups.start(config, world, device)


def _share_source(config: Config, group: Group, source: Source | None) -> Source:
    """Rank 0's index, at every process: file systems may list differently."""
    if config.data.source == "synthetic":
        return source or open_source(config)
    data = group.broadcast_bytes(source.index.to_bytes() if source and source.index else None)
    return source or of_index(data_root(config), Index.from_bytes(data))


def _agree_on_plan(config: Config, group: Group, source: Source) -> Plan:
    """The plan; if one process finds its machine too small for it, all say so."""
    plan, problem = None, None
    try:
        plan = make_plan(config, group.world, source.size)
    except RunError as found:
        problem = found
    group.raise_together(problem)
    assert plan is not None
    (lacking,) = group.any_rank(not plan.compiles)
    if lacking and plan.compiles:
        plan = replace(plan, compiles=False, why_compiled="another machine of the job cannot")
    return plan


def _build(
    config: Config,
    plan: Plan,
    group: Group,
    source: Source,
    weights: dict[str, Tensor] | None,
    terminal: Terminal,
    stop: StopRequest,
    watchdog: Watchdog,
    *,
    is_resumed: bool,
) -> Training:
    """Build all parts and warm them up. First weights are a function of the seed, or rank 0's `weights`."""
    if config.is_deterministic:
        terminal.log(
            "deterministic: same bits each time, at the price of slower kernels and one fixed number of threads"
        )
    terminal.log(f"creating {config.model.arch} for {plan.num_classes} classes on {group.device} ...")
    randomness.seed_network(config.run.seed, "weights")
    model = build(config.model, plan.num_classes).to(group.device)
    if config.model.init and not is_resumed:
        load_pretrained(model, weights, config.model, group, terminal.log)
    if config.model.freeze:
        terminal.log(freeze(model, config.model.freeze))
    if group.device.type == "cuda" and config.parallel == "ddp":
        plan = fit_passes(config, plan, group, one_pass(model, config, plan, group.device), terminal.log)
    if plan.compiles:
        terminal.log("compiling at the first step, which takes a minute or so ...")
    strategy = parallel.choose(config, plan, model, group)
    if strategy.note:
        terminal.log(strategy.note)
    state = TrainState.build(strategy, config)
    clock = start_clock(group.device)
    step = Step(state, strategy, config, plan, clock)
    first = copy_to_host(model.state_dict())
    if plan.compiles:
        watchdog.wait_for_compilation()
    _settle(step, config, plan)
    model.load_state_dict(first)
    identity = {"config": config.to_yaml(), "data": source.digest, "classes": list(source.classes), "world": plan.world}
    evaluator = Evaluator(state.eval_model, source.val, config, plan, group, strategy.predictor(state.eval_model))
    return Training(
        config, plan, group, strategy, state, step, watch_losses(strategy), source.train, evaluator, identity, terminal,
        stop, watchdog, start_watch(strategy, plan), start_pace(strategy, clock, terminal.log),
        measure_efficiency(config, plan.num_classes, plan.world, group.device), clock,
    )  # fmt: skip


def _settle(step: Step, config: Config, plan: Plan) -> None:
    """The discarded pass, in which a model is compiled. RequestError if it cannot be."""
    if not plan.compiles:
        return step.settle()
    from torch._dynamo.exc import TorchDynamoException  # a second to import

    try:
        step.settle()
    except TorchDynamoException as error:
        reason = " ".join(str(error).split())[:200]
        raise RequestError(
            f"{config.model.arch} cannot be compiled: train.compile=off trains without ({reason})"
        ) from error


def _open_records(run: Training, folder: RunFolder, source: Source, used: Path | None) -> NullSender:
    """Rank 0 opens what it writes, and starts the sender. All raise the Verdict of a folder that cannot be written, or of a
    tracker that is required and not there."""
    tracker, problem = NullSender(), None
    # a checkpoint is synced and the journal is not: a machine may have lost this row
    account = run.state.account() if run.state.is_evaluated else None
    if run.group.is_main:
        try:
            best = run.state.best
            prepare_folder(used, best.step if best else None, folder, run.terminal.log)
            _open_files(run, folder, source, account, used)
            tracker = _start_sender(run, folder)
        except OSError as error:
            problem = folder.unwritable(error)
    run.group.raise_together(problem)
    if run.config.track.required:
        run.group.raise_together(run.group.run_long_task(partial(_why_not_ready, tracker)))
    return tracker


def _open_files(
    run: Training, folder: RunFolder, source: Source, account: dict[str, Any] | None, used: Path | None
) -> None:
    """What rank 0 writes beside the checkpoints. OSError where it cannot."""
    log = run.terminal.log
    errors.clear_failure(folder.path)
    atomic_write(folder.config, run.config.to_yaml().encode())
    atomic_write(folder.plan, json.dumps(run.plan.to_dict(), indent=1).encode())
    run.journal = Journal(folder.journal, log)
    run.checkpoints = Checkpoints(folder.checkpoints, run.config.checkpoint.keep, log)
    if run.config.run.trace:
        run.trace = Trace(folder.trace, run.state.step)
    facts = {
        "recipe": run.config.recipe,
        "world": run.plan.world,
        "processes_a_node": run.plan.local_world,
        "threads": run.plan.threads,
        "epochs": run.config.train.epochs,
        "data": run.identity["data"],
        **provenance(run.config.recipe, run.group.device),
    }
    checkpoint = used.name if used else None
    run.journal.event(
        "started",
        step=run.state.step,
        resumed=used is not None,
        checkpoint=checkpoint,
        launch=launch_id(),
        tags=facts,
    )
    if account:
        run.journal.event("evaluated", **account)
    run.receipt = Receipt(folder)
    run.receipt.write(log)
    if run.config.track.report:
        run.samples = Samples(folder.report, source, run.config, run.state.step, log)
        run.samples.augmented(run.plan)


def _start_sender(run: Training, folder: RunFolder) -> NullSender:
    try:
        return sender.start(run.config, folder)
    except OSError as error:
        run.terminal.log(
            f"MLflow's sender could not be started: {error.strerror}; 'pipeline sync' sends the journal later"
        )
        return NullSender()


def _why_not_ready(tracker: NullSender) -> RunError | None:
    try:
        tracker.wait_ready()
    except RunError as found:
        return found
    return None


def _conclude(run: Training, folder: RunFolder, tracker: NullSender, line: str) -> None:
    """Have the pictures drawn before the journal's last word, upon which they are sent; then say what there is."""
    run.samples.draw(folder)
    _close_records(run, tracker, "FINISHED", line)
    run.terminal.summarise(_summary(run, folder))


def _break_off(run: Training, tracker: NullSender, ending: RunError) -> None:
    """Tell the launcher and the tracker why there is no result."""
    if ending.code == errors.CRASH:
        report_to_agent(str(ending), is_echo=not run.group.is_main)
    _close_records(run, tracker, "KILLED" if isinstance(ending, TemporaryError) else "FAILED", str(ending))


def _close_records(run: Training, tracker: NullSender, status: str, line: str) -> None:
    """The journal's last word, and the sender's moment to deliver it."""
    if run.checkpoints:
        run.checkpoints.wait()
    if run.journal:
        run.journal.event("ended", status=status, step=run.state.step, line=line, best=_best_file(run))
        if run.receipt:
            run.receipt.write(run.terminal.log)
        if not tracker.finish(run.terminal.log):
            run.terminal.log(
                "MLflow did not take everything: the journal keeps it, 'pipeline sync' with this run's folder sends it"
            )


def _summary(run: Training, folder: RunFolder) -> dict[str, str]:
    """What there is now, and where."""
    best, file = run.state.best, _best_file(run)
    rows = {}
    if best is None:
        rows["best"] = "none: no validation had finite logits, so no model is sent or registered"
    if best and file:
        rows["best"] = f"top-1 {best.top1:.4f} at step {best.step:,}: {folder.checkpoints / file['file']}"
    if run.config.track.report:
        rows["report"] = str(folder.report)
    rows["tracker"] = without_password(sender.tracking_uri(run.config, folder) or "none: the journal alone")
    rows["use it"] = f"pipeline predict {folder.path} IMAGE ..."
    return rows


def _best_file(run: Training) -> dict[str, Any] | None:
    best = run.state.best
    path = run.checkpoints.of_step(best.step) if best and run.checkpoints else None
    return {"step": best.step, "file": path.name} if best and path else None


def _crash(run: Training, account: str, code: int, *, is_echo: bool = False) -> NoReturn:
    """One process has broken, so the others cannot go on: leave at once, without the farewells that wait for them."""
    run.watchdog.stop()
    place = f"rank {run.group.rank} failed at step {run.state.step + 1} ({format_sample_ids(run.step.sample_ids)})"
    line = f"{place}: {account.splitlines()[-1]}"
    print(f"{account}\npipeline: {line}", file=sys.stderr, flush=True)
    report_to_agent(line, is_echo=is_echo)
    kill_stopped(run.group.pids_here)
    if run.checkpoints:
        run.checkpoints.wait()
    if run.journal:
        run.journal.event("ended", status="FAILED", step=run.state.step, line="crashed")
    if code in errors.PERMANENT:
        stop_restarts()
    os._exit(code)


def _done_line(epoch: int, evaluation: Evaluation, weights: str) -> str:
    return (
        f"done step={evaluation.step} epoch={epoch} top1={evaluation.top1:.4f} top5={evaluation.top5:.4f}"
        f" images={evaluation.images}/{evaluation.total} weights=sha256:{weights}"
    )
