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

from torch import Tensor

from pipeline import errors
from pipeline import group as groups
from pipeline.config.schema import Config
from pipeline.data.loader import LoaderError, TrainBatches, batches
from pipeline.data.sources import Source
from pipeline.data.transfer import to_device
from pipeline.device import make_timer
from pipeline.errors import RunError
from pipeline.guards.signals import StopRequest
from pipeline.guards.watchdog import COMPILATION_S, Watchdog
from pipeline.lazy import part
from pipeline.planning import request_digest
from pipeline.record.failure import FAILURE, save_failure
from pipeline.record.folder import RunFolder
from pipeline.record.journal import final_status
from pipeline.record.terminal import make_terminal
from pipeline.train.build import build_state
from pipeline.train.ending import crash, done_line, end_of, leave, record_end, record_hang
from pipeline.train.evaluation import Evaluation
from pipeline.train.job import Job, Process
from pipeline.train.join import agree_on_plan, broadcast_source, check_same_request, join
from pipeline.train.listener import Mirror
from pipeline.train.loop import train
from pipeline.train.records import Records, describe_result, open_records
from pipeline.train.resume import VerifiedCheckpoint, broadcast_contents, resume
from pipeline.train.state import TrainState
from pipeline.train.trainer import Trainer
from pipeline.world import World

# A hang is reported by the first of three that sees it: a collective on the host (run.timeout), the
# watchdog (+ _MARGIN_S), and NCCL's own, which ends the process without a line of ours.
_MARGIN_S = 10
_GPU_MARGIN_S = 120  # the watchdog's margin and the part of a step between a collective and its last progress


@dataclass(frozen=True)
class Prepared:
    """The findings of rank 0 before the group forms.

    `operate.launch` makes them: the folder's lock, data, plan, checkpoint, first weights.
    """

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
    session = Session(config, world, folder, stop)
    # nothing here refers to what is prepared, so that training keeps no checkpoint in memory
    trainer, is_moved = session.set_up(session.prepare(prepare) if prepare else None)
    return session.finish(trainer, session.train(trainer, is_moved=is_moved))


class Session:
    """The steps of a process's part in a run."""

    def __init__(self, config: Config, world: World, folder: RunFolder, stop: StopRequest) -> None:
        self._config, self._world, self._folder, self._stop = config, world, folder, stop
        self._terminal = make_terminal(is_main=world.is_main)
        self._request = request_digest(config, world)

    def prepare(self, prepare: Callable[[], Prepared]) -> Prepared:
        """Return rank 0's findings, and show the plan.

        Raises EarlyStopError at a signal: nothing is changed before.
        """
        watchdog = self._new_watchdog()
        watchdog.start()
        try:
            with self._stop.raise_on_signal():
                prepared = prepare()
        finally:
            watchdog.stop()
        # the request has passed all checks: from here on things change
        if prepared.resume == "never":
            aside = self._folder.set_aside()
            moved = f"moved the contents of {self._folder.path} to {aside}"
            self._terminal.show(moved if aside else "a fresh start")
        self._terminal.show(f"{self._config.recipe} in {self._folder.path}\n{prepared.table}")
        return prepared

    def set_up(self, prepared: Prepared | None) -> tuple[Trainer, bool]:
        """Join the group, build all parts, load the state and open the records.

        Return the trainer, and True if its state comes from a checkpoint in another folder.

        The checkpoint's bytes and contents are local here, so that training does not keep them in
        memory.
        """
        config, folder, stop = self._config, self._folder, self._stop
        found = prepared.found if prepared else None
        mirror = prepared.mirror if prepared else None
        with ExitStack() as setting_up:
            with self._saving_failure():
                # Waiting for peers is native code, in which no exception can be raised: exit. One
                # process has none.
                with stop.exit_on_signal() if self._world.size > 1 else stop.raise_on_signal():
                    group = join(config, self._world)
                if not group.is_main:
                    folder.lock.join_holder()  # rank 0, which has the lock by now
                watchdog = self._new_watchdog()
                setting_up.callback(watchdog.stop)
                watchdog.start()
                group.set_device_timeout(config.run.timeout + COMPILATION_S + _GPU_MARGIN_S)
                process = Process(group, self._terminal, make_timer(group.device), watchdog, stop)
                # before any weight exists, all agree on the request, the data and the plan
                check_same_request(config, group)
                source = broadcast_source(config, group, prepared.source if prepared else None)
                job = Job(config, agree_on_plan(config, group, source), source, folder)
                # rank 0 alone has read the checkpoint; the others get its bytes
                contents = broadcast_contents(found, group)
                weights = prepared.weights if prepared else None
                job, state = build_state(job, process, weights, is_resumed=contents is not None)
                watchdog.beat()
                if contents:
                    resume(state, contents, config, group, self._terminal.log)
                resumed_from = found.path if found else None
                (is_moved,) = group.any_rank(resumed_from is not None and not folder.contains(resumed_from))
            if self._is_finished(job, state):
                records = Records()
                group.run_long_task(partial(self._update_mirror, mirror))
            else:
                records = open_records(job, process, state, resumed_from, mirror)
            trainer = Trainer(job, process, state, records)
            setting_up.pop_all()  # the watchdog also watches the training
        return trainer, is_moved

    def train(self, trainer: Trainer, *, is_moved: bool) -> Evaluation:
        """Train to the last step; return the evaluation of its model. Record why if that fails."""
        config, folder = self._config, self._folder
        process, state, plan = trainer.process, trainer.state, trainer.job.plan
        group, watchdog = process.group, process.watchdog
        try:
            data = TrainBatches(trainer.job.source.train, config, plan, group.rank)
            # the loader knows no epochs: it makes the batches from this step's to the last
            positions = range(state.step * plan.accumulate, max(state.step, plan.last_step) * plan.accumulate)
            watchdog.begin_training(partial(record_hang, trainer), config.same_command)
            with closing(batches(data, positions, plan, pin=group.device.type == "cuda")) as loaded:
                return train(trainer, to_device(loaded, group.device), is_moved=is_moved)
        except LoaderError as error:  # known to this process only: the others cannot be told
            folder.check_ours()
            save_failure(folder.path, error, self._request)
            crash(trainer, error)
        except RunError as error:  # raised in all processes together
            watchdog.stop()
            # the modules that raise it do not know the configuration
            error.remedy = error.remedy.replace("the same command", config.same_command)
            with self._saving_failure():
                # `_saving_failure` does it again; here it comes first, so that the mirror gets it
                save_failure(folder.path, error, self._request)
                group.run_long_task(partial(leave, trainer, error))
                group.shutdown()
                raise
        except Exception as error:  # a fault of ours, or of a peer: nothing collective is possible
            crash(trainer, error, is_secondary=groups.is_peer_failure(error))

    def finish(self, trainer: Trainer, evaluation: Evaluation) -> str:
        """Record the end and let the other processes go. Return the result line."""
        job, state, group = trainer.job, trainer.state, trainer.process.group
        line = done_line(job.plan.epoch_at(state.step), evaluation, state.weights_digest())
        trainer.process.watchdog.stop()
        end = end_of(trainer, "FINISHED", line)
        try:
            group.run_long_task(partial(record_end, trainer, end))
            group.shutdown()
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
        if trainer.records.listeners:
            self._terminal.log_summary(describe_result(job, end, trainer.records.mirror))
        return line

    def _new_watchdog(self) -> Watchdog:
        # longer than a collective may take, so that a collective that fails reports its own error
        timeout_s = self._config.run.timeout + _MARGIN_S
        stacks = self._folder.path / f"hang-rank-{self._world.rank}.txt"
        return Watchdog(timeout_s, stacks, self._world.rank, self._stop, self._folder.check_ours)

    def _is_finished(self, job: Job, state: TrainState) -> bool:
        """Return True, in all processes, if an earlier start finished this run and recorded it."""
        group, folder = state.strategy.group, self._folder
        (is_unrecorded,) = group.any_rank(group.is_main and final_status(folder.journal) != "FINISHED")
        if state.step < job.plan.last_step or not state.is_evaluated or is_unrecorded:
            return False
        self._terminal.log(
            f"already finished: {folder.path} is at step {state.step:,} of {job.plan.last_step:,}"
        )
        if group.is_main:
            part("receipt")(
                folder, self._terminal.log
            ).write()  # the earlier start may have been killed before it did
        return True

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
            elif error.code in errors.PERMANENT:
                self._terminal.log(f"{FAILURE} could not be written: {self._config.same_command} tries again")
            raise

    def _update_mirror(self, mirror: Mirror | None) -> None:
        """Send what an earlier start of a finished run could not send."""
        if mirror:
            mirror.start()
            mirror.close(self._stop.seconds_left)
