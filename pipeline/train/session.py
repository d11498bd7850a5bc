"""The training of one process, from a settled request to its end: build, train, end.

`operate.start` has joined the group and settled what to train, from which state.
The promise is the order: parts are complete before the state is loaded; all processes end together
once rank 0 has saved, and the journal says how. Only a crash leaves at once: others may be gone.
"""

import os
import sys
import time
import traceback
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from torch import Tensor

from pipeline import errors, randomness
from pipeline.data.batch import format_sample_ids
from pipeline.data.loader import LoaderError, TrainBatches, batches
from pipeline.data.transfer import to_device
from pipeline.errors import RunError, TemporaryError
from pipeline.group import is_peer_failure
from pipeline.guards.nonfinite import make_loss_guard
from pipeline.lazy import addon
from pipeline.model.architectures import build
from pipeline.model.weights import load_weights
from pipeline.parallel import choose_strategy
from pipeline.parallel.strategy import Strategy
from pipeline.record.checkpoint import copy_to_host
from pipeline.record.failure import save_failure, saving_failure
from pipeline.supervision import kill_frozen_peers, report_to_agent, stop_restarts
from pipeline.train.evaluation import Evaluation
from pipeline.train.job import Job, Process, Settled
from pipeline.train.listener import End
from pipeline.train.loop import Trainer, train
from pipeline.train.records import Records, open_records
from pipeline.train.resume import load_checkpoint
from pipeline.train.state import TrainState
from pipeline.train.step import warm_up

_CRASH_MIRROR_S = 10  # for which a process that crashes may upload to the mirror


def set_up(settled: Settled) -> Trainer:
    """Build all parts, load the state and open the records."""
    job, process, contents = settled.job, settled.process, settled.contents
    group, log = process.group, process.terminal.log
    with saving_failure(job.config, job.folder, job.request, log):
        job, state = build_state(job, process, settled.weights, is_resumed=contents is not None)
        process.watchdog.beat()
        if contents:
            load_checkpoint(state, contents, settled.checkpoint, job.config, log)
    if _is_finished(job, process, state):
        group.run_long_task(partial(_send_due, settled.mirror, job, process))
        return Trainer(job, process, state, Records())
    # rank 0 sets newer checkpoints aside, writes configuration and plan, opens the journal
    records = open_records(job, process, state, settled.checkpoint, settled.mirror)
    return Trainer(job, process, state, records)


def build_state(
    job: Job, process: Process, weights: dict[str, Tensor] | None, *, is_resumed: bool
) -> tuple[Job, TrainState]:
    """Build the model, its strategy and its state, and warm up.

    Return also the job, with passes that fit the memory. First weights are a function of the seed,
    or rank 0's `weights`.
    """
    config, plan = job.config, job.plan
    group, log, watchdog = process.group, process.terminal.log, process.watchdog
    if config.is_deterministic_on(group.device.type):
        log("deterministic: bit-identical every time; kernels are slower and the number of threads is fixed")
    log(f"creating {config.model.arch} for {plan.num_classes} classes on {group.device} ...")
    randomness.seed_network(config.run.seed, "weights")
    model = build(config.model, plan.num_classes).to(group.device)
    if config.model.init and not is_resumed:
        addon("models.pretrained").load_pretrained(model, weights, config.model, group, log)
    if config.model.freeze and not plan.unfreeze_step:
        log(addon("models.pretrained").freeze(model, config.model.freeze))
    teacher = None
    if config.model.teacher:  # before the memory for passes is measured
        teacher = addon("models.teacher").Teacher(config, job.source.classes, plan.image_sizes, group)
    if group.device.type == "cuda" and config.parallel == "ddp":
        watchdog.beat()
        plan = addon("models.memory").fit_passes(config, plan, group, model, log)
    if plan.compiles and config.train.compile == "auto":
        eager = Strategy(config, replace(plan, compiles=False), model, group)
        run_pass = partial(warm_up, eager, process.timer, plan)
        plan = addon("models.compilation").compile_if_it_repays(plan, group, model, run_pass, log)
    strategy = choose_strategy(config, plan, model, group)
    strategy.teacher = teacher
    strategy.class_weights = addon("models.class_weights").tensor(config, job.source, group.device)
    if group.size > 1 and strategy.is_replicated:
        strategy.on_gradients_computed(partial(process.timer.switch_to, "communication"))
    state = TrainState.build(strategy, make_loss_guard(strategy, process.timer, config.start_again), config)
    watchdog.beat()
    if strategy.warms_up:
        before = copy_to_host(model.state_dict())  # the warm-up pass changes the running statistics
        with watchdog.allow_compilation(group) if plan.compiles else nullcontext():
            if plan.compiles:
                log("compiling, which takes a minute or so ...")
                # a process that cannot compile would leave the others waiting for its gradients
                run_pass = partial(warm_up, strategy, process.timer, plan, is_synced=False)
                compile_model = addon("models.compilation").compile_model
                group.raise_together(compile_model(config.model.arch, run_pass, process.stop))
            warm_up(strategy, process.timer, plan)
        load_weights(model, before)
    return replace(job, plan=plan), state


def train_to_end(trainer: Trainer) -> Evaluation:
    """Train to the last step; return the evaluation of its model. Record why if that fails."""
    job, process, state = trainer.job, trainer.process, trainer.state
    config, plan, group, log = job.config, job.plan, process.group, process.terminal.log
    first_step = state.step
    try:
        with saving_failure(config, job.folder, job.request, log):
            data = TrainBatches(job.source.train, config, plan, group.rank)
            # the loader knows no epochs: it makes the batches from this step's to the last
            positions = range(state.step * plan.accumulate, max(state.step, plan.last_step) * plan.accumulate)
            process.watchdog.begin_training(partial(_record_hang, trainer), config.same_command)
            resident = None
            if not plan.not_resident:  # workers then send only what they drew; the device makes the pixels
                load = addon("datasets.resident_images").load_images
                resident = load(data, config, group.device, log, process.asked_to_stop)
            maker = resident.draws if resident else data
            with closing(batches(maker, positions, plan, pin=group.device.type == "cuda")) as loaded:
                arrived = to_device(loaded, group.device)
                passes = resident.augment(arrived) if resident else arrived
                with_targets = addon("models.several_labels").with_targets
                return train(trainer, with_targets(passes, job.source, group.device))
    except LoaderError as error:  # known to this process only: the others cannot be told
        _crash(trainer, error)
    except RunError as error:  # raised in all processes together, after an exchange of `Group`
        process.watchdog.stop()
        # the modules that raise it do not know the configuration
        error.remedy = error.remedy.replace("the same command", config.same_command)
        group.run_long_task(partial(_leave, trainer, error))
        group.shutdown()
        raise
    except Exception as error:  # a fault of ours, or of a peer: nothing collective is possible
        known = addon("run.device_errors").explain(error, job, group, first_step, state.step)
        if known:
            save_failure(job.folder, known, job.request)  # if it is permanent
        _crash(trainer, known or error, is_secondary=not known and is_peer_failure(error))


def finish(trainer: Trainer, evaluation: Evaluation) -> str:
    """Record the end and let the other processes go. Return the result line."""
    job, state, group, terminal = trainer.job, trainer.state, trainer.process.group, trainer.process.terminal
    weights = addon("run.receipt").receipt_row(state)["weights"]
    line = evaluation.done_line(job.plan.epoch_at(state.step), weights)
    trainer.process.watchdog.stop()
    end = _end(trainer, "FINISHED", line)
    try:
        group.run_long_task(partial(_record_end, trainer, end))
        group.shutdown()  # after the first exit a launcher kills the rest
    except RuntimeError as error:
        # rank 0 has recorded the end by now, whichever rank is lost meanwhile
        is_recorded = group.is_main and addon("run.journal").is_finished(job.folder)
        if not (is_recorded and is_peer_failure(error)):
            raise
        terminal.log("another process was lost after the last step: the run is finished all the same")
    for listener in trainer.records.listeners:  # the other ranks leave meanwhile, and free their GPUs
        listener.closed(end)
    return line


def _is_finished(job: Job, process: Process, state: TrainState) -> bool:
    """Return True, in all processes, if an earlier start finished this run and recorded it."""
    group, folder, log = process.group, job.folder, process.terminal.log
    (is_unrecorded,) = group.any_rank(group.is_main and not addon("run.journal").is_finished(folder))
    if not state.is_over(job.plan) or not state.is_evaluated or is_unrecorded:
        return False
    log(f"already finished: {folder.path} is at step {state.step:,} of {job.plan.last_step:,}")
    if group.is_main:  # the earlier start may have been killed before it wrote the receipt
        addon("run.receipt").ToReceipt(folder, log).write()
    return True


def _send_due(mirror: Any, job: Job, process: Process) -> None:
    """Send to the mirror and to MLflow what an earlier start of a finished run could not send."""
    if mirror:
        mirror.start()
        mirror.close(process.stop.seconds_left)
    if process.group.is_main:
        send_due = addon("mlflow.sender").send_due
        send_due(job.config, job.folder, process.terminal.log, process.stop.seconds_left)


def _end(trainer: Trainer, status: str, line: str) -> End:
    return End(trainer.state.step, status, line, trainer.state.best, trainer.process.stop.seconds_left)


def _record_end(trainer: Trainer, end: End) -> None:
    """Record the end, once a checkpoint that is being written is complete."""
    if trainer.records.checkpoints:
        trainer.records.checkpoints.wait()
    for listener in trainer.records.listeners:
        listener.ended(end)


def _record_failure(trainer: Trainer, error: RunError) -> End:
    end = _end(trainer, "KILLED" if isinstance(error, TemporaryError) else "FAILED", str(error))
    _record_end(trainer, end)
    return end


def _leave(trainer: Trainer, error: RunError) -> None:
    """Tell the launcher, the tracker and the mirror why there is no result."""
    if error.code == errors.CRASH:
        report_to_agent(str(error), is_secondary=not trainer.process.group.is_main)
    end = _record_failure(trainer, error)
    for listener in trainer.records.listeners:
        listener.closed(end)


def _record_hang(trainer: Trainer, error: RunError) -> None:
    report_to_agent(str(error), is_secondary=True)
    kill_frozen_peers(trainer.process.group.local_peer_pids)
    _record_failure(trainer, error)


def _crash(trainer: Trainer, error: Exception, *, is_secondary: bool = False) -> NoReturn:
    """Exit at once: the other processes cannot continue either, and must not be waited for.

    is_secondary: another process failed first.
    """
    trainer.process.watchdog.stop()
    group, step = trainer.process.group, trainer.state.step
    ids = [sample for batch in trainer.step.used for sample in batch.ids.tolist()]
    if isinstance(error, RunError):
        reason = details = str(error)
    else:
        reason = errors.summary("".join(traceback.format_exception_only(error)))
        details = "".join(traceback.format_exception(error))
    line = f"rank {group.rank} failed at step {step + 1} ({format_sample_ids(ids)}): {reason}"
    report_to_agent(line, is_secondary=is_secondary)
    kill_frozen_peers(group.local_peer_pids)
    _record_end(trainer, _end(trainer, "FAILED", "crashed"))  # before anything is printed
    print(f"{details}\npipeline: {line}", file=sys.stderr, flush=True)
    code = error.code if isinstance(error, RunError) else errors.CRASH
    if code != errors.CRASH:  # restarted ranks would fail again: by the request, the data or this GPU
        stop_restarts()
    if trainer.records.mirror:  # the disk may be gone after this process
        last = time.monotonic() + _CRASH_MIRROR_S
        trainer.records.mirror.close(lambda: last - time.monotonic())
    os._exit(code)
