"""The ways in which a run ends, and how its end is recorded."""

import os
import sys
import time
import traceback
from typing import NoReturn

from pipeline import errors
from pipeline.data.batch import format_sample_ids
from pipeline.errors import RunError, TemporaryError, summary
from pipeline.supervision import kill_stopped_peers, report_to_agent, stop_restarts
from pipeline.train.evaluation import Evaluation
from pipeline.train.listener import End
from pipeline.train.trainer import Trainer

_CRASH_MIRROR_S = 10
"""Seconds that a process that crashes may upload to the mirror."""


def done_line(epoch: int, evaluation: Evaluation, weights: str) -> str:
    """Return the result line of a training or an evaluation."""
    return (
        f"done step={evaluation.step} epoch={epoch} top1={evaluation.top1:.4f} top5={evaluation.top5:.4f}"
        f" images={evaluation.images}/{evaluation.total} weights=sha256:{weights}"
    )


def end_of(trainer: Trainer, status: str, line: str) -> End:
    """Return the end of this run. status: FINISHED, FAILED or KILLED."""
    state = trainer.state
    return End(state.step, status, line, state.best, state.evaluation, trainer.process.stop.seconds_left)


def record_end(trainer: Trainer, end: End) -> None:
    """Record the end, once a checkpoint that is being written is complete."""
    if trainer.records.checkpoints:
        trainer.records.checkpoints.wait()
    for listener in trainer.records.listeners:
        listener.ended(end)


def leave(trainer: Trainer, error: RunError) -> None:
    """Tell the launcher, the tracker and the mirror why there is no result."""
    if error.code == errors.CRASH:
        report_to_agent(str(error), is_secondary=not trainer.process.group.is_main)
    end = end_of(trainer, _status(error), str(error))
    record_end(trainer, end)
    for listener in trainer.records.listeners:
        listener.closed(end)


def record_hang(trainer: Trainer, error: RunError) -> None:
    """Tell the launcher and the journal that this process exits. A peer may have failed first."""
    report_to_agent(str(error), is_secondary=True)
    kill_stopped_peers(trainer.process.group.local_peer_pids)
    record_end(trainer, end_of(trainer, _status(error), str(error)))


def _status(error: RunError) -> str:
    return "KILLED" if isinstance(error, TemporaryError) else "FAILED"


def crash(trainer: Trainer, error: Exception, *, is_secondary: bool = False) -> NoReturn:
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
    record_end(trainer, end_of(trainer, "FAILED", "crashed"))  # before anything is printed
    details = str(error) if is_known else "".join(traceback.format_exception(error))
    print(f"{details}\npipeline: {line}", file=sys.stderr, flush=True)
    code = error.code if isinstance(error, RunError) else errors.CRASH
    if code in errors.PERMANENT:
        stop_restarts()
    if trainer.records.mirror:  # the disk may be gone after this process
        last = time.monotonic() + _CRASH_MIRROR_S
        trainer.records.mirror.close(lambda: last - time.monotonic())
    os._exit(code)
