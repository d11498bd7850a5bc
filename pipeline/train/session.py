"""One process's part in a run, from start to end: join, build, train, end.

The `main` of a rank. `cli.run` has set the signal handlers; `operate.launch` has read the request
and, on rank 0, taken the folder's lock; then it calls `run_training`. Rank 0 first finds what to
resume from (`Prepared`).
The promise is the order: parts are complete before the state is loaded; all processes end together
once rank 0 has saved, and the journal says how. Only a crash leaves at once: others may be gone.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from torch import Tensor

from pipeline import errors
from pipeline import group as groups
from pipeline.config.schema import Config
from pipeline.data.batch import format_sample_ids
from pipeline.data.loader import LoaderError, TrainBatches, batches
from pipeline.data.sources import Source
from pipeline.data.transfer import to_device
from pipeline.device import make_timer
from pipeline.errors import RunError, TemporaryError
from pipeline.guards.signals import StopRequest
from pipeline.guards.watchdog import COMPILATION_S, Watchdog
from pipeline.lazy import part
from pipeline.planning import request_digest
from pipeline.record.failure import save_failure
from pipeline.record.folder import RunFolder
from pipeline.record.journal import final_status
from pipeline.record.terminal import make_terminal
from pipeline.supervision import kill_frozen_peers, report_to_agent, stop_restarts
from pipeline.train.evaluation import Evaluation
from pipeline.train.job import Job, Process
from pipeline.train.listener import End, Mirror
from pipeline.train.loop import Trainer, train
from pipeline.train.records import Records, open_records
from pipeline.train.resume import VerifiedCheckpoint, broadcast_contents, resume
from pipeline.train.setup import agree_on_plan, broadcast_source, build_state, check_same_request, join
from pipeline.train.state import TrainState
from pipeline.world import World

# A hang is reported by the first of three that sees it: a collective on the host (run.timeout), the
# watchdog (+ _MARGIN_S), and NCCL's own, which ends the process without a line of ours.
_MARGIN_S = 10
_GPU_MARGIN_S = 120  # the watchdog's margin and the part of a step between a collective and its last progress
_FIRST_STEPS = 3  # of a start, after which a step needs no more memory than those before it
_CRASH_MIRROR_S = 10  # for which a process that crashes may upload to the mirror


@dataclass(frozen=True)
class Prepared:
    """The findings of rank 0 before the group forms (`operate.launch`). Others have none."""

    source: Source | None = None
    table: str = ""  # the plan, as text
    found: VerifiedCheckpoint | None = None  # to resume from
    weights: dict[str, Tensor] | None = None  # the first ones, if model.init names some and `found` is None
    mirror: Mirror | None = None  # holds the lease of `checkpoint.mirror`
    resume: str = "auto"  # `run.resume`, or its replacement at a restart


def run_training(
    config: Config, world: World, folder: RunFolder, prepare: Callable[[], Prepared] | None, stop: StopRequest
) -> str:
    """Train as one process of `world`; return the result line. Raises a RunError without one.

    prepare: on rank 0, which holds the folder's lock; None in the other processes.
    """
    session = Session(config, world, folder, stop)
    session.watchdog.start()
    try:
        # nothing here refers to what is prepared, so that training keeps no checkpoint in memory
        trainer = session.set_up(session.prepare(prepare) if prepare else Prepared())
        return session.finish(trainer, session.train(trainer))
    finally:
        session.watchdog.stop()


class Session:
    """The steps of a process's part in a run."""

    def __init__(self, config: Config, world: World, folder: RunFolder, stop: StopRequest) -> None:
        self._config, self._world, self._folder, self._stop = config, world, folder, stop
        self._terminal = make_terminal(is_main=world.is_main)
        self._request = request_digest(config, world)
        # longer than a collective may take, so that a collective that fails reports its own error
        timeout_s = config.run.timeout + _MARGIN_S
        stacks = folder.path / f"hang-rank-{world.rank}.txt"
        self.watchdog = Watchdog(timeout_s, stacks, world.rank, stop, folder.check_ours)

    def prepare(self, prepare: Callable[[], Prepared]) -> Prepared:
        """Return rank 0's findings, and show the plan.

        Raises EarlyStopError at a signal: nothing is changed before.
        """
        with self._stop.raise_on_signal():
            prepared = prepare()  # if it raises, the launcher ends the others, which wait in `join`
        # the request has passed all checks: from here on things change
        if prepared.resume == "never":
            aside = self._folder.set_aside()
            moved = f"moved the contents of {self._folder.path} to {aside}"
            self._terminal.show(moved if aside else "a fresh start")
        self._terminal.show(f"{self._config.recipe} in {self._folder.path}\n{prepared.table}")
        return prepared

    def set_up(self, prepared: Prepared) -> Trainer:
        """Join the group, build all parts, load the state and open the records."""
        config, folder, stop = self._config, self._folder, self._stop
        resumed_from = prepared.found.path if prepared.found else None
        # waiting for peers is native code, in which no exception can be raised: exit
        leaving = stop.exit_on_signal() if self._world.size > 1 else stop.raise_on_signal()
        with self._saving_failure(), leaving, self.watchdog.allow_pause(groups.RESTORE_S):
            group = join(config, self._world)
        if not group.is_main:
            folder.lock.join_holder()  # rank 0, which has the lock by now
        group.set_device_timeout(config.run.timeout + COMPILATION_S + _GPU_MARGIN_S)
        process = Process(group, self._terminal, make_timer(group.device), self.watchdog, stop)
        with self._saving_failure():
            # before any weight exists, all agree on the request, the data and the plan
            check_same_request(config, group)
            source = broadcast_source(config, group, prepared.source)
            job = Job(config, agree_on_plan(config, group, source), source, folder)
            # rank 0 alone has read the checkpoint; the others get its bytes
            contents = broadcast_contents(prepared.found, group)
            job, state = build_state(job, process, prepared.weights, is_resumed=contents is not None)
            self.watchdog.beat()
            if contents:
                resume(state, contents, resumed_from, config, self._terminal.log)
        if self._is_finished(job, state):
            group.run_long_task(partial(self._update_mirror, prepared.mirror))
            return Trainer(job, process, state, Records())
        # rank 0 tidies the folder, opens the journal and starts the sender; then all agree
        return Trainer(job, process, state, open_records(job, process, state, resumed_from, prepared.mirror))

    def train(self, trainer: Trainer) -> Evaluation:
        """Train to the last step; return the evaluation of its model. Record why if that fails."""
        config, folder = self._config, self._folder
        process, state, plan = trainer.process, trainer.state, trainer.job.plan
        group, watchdog, first_step = process.group, self.watchdog, state.step
        try:
            data = TrainBatches(trainer.job.source.train, config, plan, group.rank)
            # the loader knows no epochs: it makes the batches from this step's to the last
            positions = range(state.step * plan.accumulate, max(state.step, plan.last_step) * plan.accumulate)
            watchdog.begin_training(partial(_record_hang, trainer), config.same_command)
            resident = None
            if not plan.not_resident:  # workers then send only what they drew; the device makes the pixels
                load = part("resident images")
                resident = load(data, config, group.device, self._terminal.log, process.asked_to_stop)
            maker = resident.draws if resident else data
            with closing(batches(maker, positions, plan, pin=group.device.type == "cuda")) as loaded:
                arrived = to_device(loaded, group.device)
                return train(trainer, resident.augment(arrived) if resident else arrived)
        except LoaderError as error:  # known to this process only: the others cannot be told
            folder.check_ours()
            save_failure(folder.path, error, self._request)
            _crash(trainer, error)
        except RunError as error:  # raised in all processes together, after an exchange of `Group`
            watchdog.stop()
            # the modules that raise it do not know the configuration
            error.remedy = error.remedy.replace("the same command", config.same_command)
            with self._saving_failure():
                # `_saving_failure` does it again; here it comes first, so that the mirror gets it
                save_failure(folder.path, error, self._request)
                group.run_long_task(partial(_leave, trainer, error))
                group.shutdown()
                raise
        except Exception as error:  # a fault of ours, or of a peer: nothing collective is possible
            is_start = state.step < first_step + _FIRST_STEPS
            shortage = part("explain shortage")(error, config, plan) if is_start else None
            if shortage:
                folder.check_ours()
                save_failure(folder.path, shortage, self._request)
            is_secondary = not shortage and groups.is_peer_failure(error)
            _crash(trainer, shortage or error, is_secondary=is_secondary)

    def finish(self, trainer: Trainer, evaluation: Evaluation) -> str:
        """Record the end and let the other processes go. Return the result line."""
        job, state, group = trainer.job, trainer.state, trainer.process.group
        line = evaluation.done_line(job.plan.epoch_at(state.step), state.receipt_row()["weights"])
        self.watchdog.stop()
        end = _end(trainer, "FINISHED", line)
        try:
            group.run_long_task(partial(_record_end, trainer, end))
            group.shutdown()  # after the first exit a launcher kills the rest
        except RuntimeError as error:
            # rank 0 has recorded the end by now, whichever rank is lost meanwhile
            is_recorded = group.is_main and final_status(self._folder.journal) == "FINISHED"
            if not (is_recorded and groups.is_peer_failure(error)):
                raise
            self._terminal.log(
                "another process was lost after the last step: the run is finished all the same"
            )
        for listener in trainer.records.listeners:  # the other ranks leave meanwhile, and free their GPUs
            listener.closed(end)
        return line

    def _is_finished(self, job: Job, state: TrainState) -> bool:
        """Return True, in all processes, if an earlier start finished this run and recorded it."""
        group, folder = state.strategy.group, self._folder
        (is_unrecorded,) = group.any_rank(group.is_main and final_status(folder.journal) != "FINISHED")
        if state.step < job.plan.last_step or not state.is_evaluated or is_unrecorded:
            return False
        self._terminal.log(
            f"already finished: {folder.path} is at step {state.step:,} of {job.plan.last_step:,}"
        )
        if group.is_main:  # the earlier start may have been killed before it wrote the receipt
            part("receipt")(folder, self._terminal.log).write()
        return True

    def _update_mirror(self, mirror: Mirror | None) -> None:
        """Send what an earlier start of a finished run could not send."""
        if mirror:
            mirror.start()
            mirror.close(self._stop.seconds_left)

    @contextmanager
    def _saving_failure(self) -> Iterator[None]:
        """Save a permanent failure for the next start of this request, and log what to do then."""
        try:
            yield
        except RunError as error:
            self._folder.check_ours()
            if save_failure(self._folder.path, error, self._request):
                advice = self._folder.advice_after_failure(self._config)
                self._terminal.log(f"with run.resume=auto this request now fails at once: {advice}")
            raise


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
    """Tell the launcher and the journal that this process exits. A peer may have failed first."""
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
    if code in errors.PERMANENT:
        stop_restarts()
    if trainer.records.mirror:  # the disk may be gone after this process
        last = time.monotonic() + _CRASH_MIRROR_S
        trainer.records.mirror.close(lambda: last - time.monotonic())
    os._exit(code)
