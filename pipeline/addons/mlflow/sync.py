"""`pipeline sync`: sends a run to MLflow, from its journal alone.

With --follow it is the sender process beside a training run.

A request that fails costs seconds and nothing else. It is retried while training runs, and once
more at its end; `pipeline sync RUN_DIR` delivers whatever is left.
"""

import contextlib
import os
import threading
import time
from pathlib import Path

from pipeline.addons.mlflow import READY, TRAINING_DONE
from pipeline.addons.mlflow.connection import FILE_TIMEOUT_S, REQUEST_TIMEOUT_S, log, root_cause
from pipeline.addons.mlflow.delivery import Delivery
from pipeline.addons.mlflow.uri import tracking_uri, uri_in_environment
from pipeline.addons.ops.credentials import without_password
from pipeline.config.load import from_yaml
from pipeline.errors import RequestError, RunError, TemporaryError
from pipeline.record.folder import RunFolder

_POLL_S = 0.5
_MAX_PAUSE_S = 30
_PATIENCE_S = REQUEST_TIMEOUT_S + 2  # after the training: a request that hangs is given up by then


def sync(path: Path, *, follow: bool) -> None:
    """Send the run in the folder `path` to the server in the environment, otherwise to its own.

    follow: send until standard input says that training is over and the last row is sent. Raises
    RequestError if `path` is not a run's folder, TemporaryError if the server does not accept
    everything.
    """
    folder = RunFolder(path)
    try:
        config = from_yaml(folder.config.read_text(encoding="utf-8", errors="replace"), str(folder.config))
    except OSError as error:
        problem = f"{path} is not the folder of a run that has started ({error.strerror})"
        raise RequestError(problem, "give a run's folder, such as runs/digits") from None
    uri = os.environ.get("PIPELINE_TRACK_URI") or uri_in_environment() or tracking_uri(config, folder)
    if uri is None:
        raise RequestError(f"the run in {path} has track.uri=none", "name a server with MLFLOW_TRACKING_URI")
    delivery = Delivery(folder, config, uri, REQUEST_TIMEOUT_S if follow else FILE_TIMEOUT_S)
    try:
        if follow:
            _send_beside_training(delivery, folder)
        else:
            _lock_sending(folder)
            delivery.send_rows()
            if not folder.lock.is_held():
                delivery.mark_failed()
            delivery.send_all_parts()
    except RunError:
        raise
    except Exception as error:
        shown = without_password(uri)
        raise TemporaryError(f"MLflow at {shown} did not take everything: {root_cause(error)}") from error


def _send_beside_training(delivery: Delivery, folder: RunFolder) -> None:
    """Deliver until training is over, and tell rank 0 how the first attempt went.

    Raises the error of the last attempt.
    """
    folder.lock.join_holder()
    training_over = _watch_rank_0(delivery)
    answer = os.dup(1)
    os.dup2(2, 1)  # once rank 0 is dead, whatever mlflow prints to the pipe would end this process
    _lock_sending(folder)
    os.nice(10)  # training has priority
    failure: Exception | None = None
    pause = _POLL_S
    try:
        delivery.send_rows()
    except Exception as error:  # no failure of a tracker may reach training
        failure = error
        log(f"MLflow does not accept requests: {root_cause(error)}")
    line = root_cause(failure) if failure else READY
    with contextlib.suppress(OSError):  # rank 0 may be gone
        os.write(answer, f"{line}\n".encode(errors="backslashreplace"))
    if failure and training_over.is_set():  # there is no time for another attempt
        raise failure
    while True:
        is_last = training_over.wait(pause)  # whatever was written until then is delivered now
        try:
            delivery.send_rows()
            if is_last:
                delivery.mark_failed()
                return delivery.send_all_parts()
            pause = 0 if delivery.send_part() else _POLL_S
            failure = None
        except Exception as error:
            if is_last:
                raise
            if failure is None:
                log(f"MLflow does not accept requests: {root_cause(error)}")
            failure, pause = error, min(_MAX_PAUSE_S, 2 * max(pause, _POLL_S))


def _watch_rank_0(delivery: Delivery) -> threading.Event:
    """Return an event that is set when rank 0 is done or dead; end this process soon after.

    A killed rank 0 leaves no process behind for longer than a few seconds, and a rank 0 that
    waits for this process does not wait for a server that does not answer. The limit is enforced
    with `os._exit` in a thread, since the main thread may hang in a request. The thread starts
    before mlflow is imported, which takes seconds.
    """
    training_over = threading.Event()

    def watch() -> None:
        word = os.read(0, len(TRAINING_DONE))
        training_over.set()
        time.sleep(_PATIENCE_S)
        if word == TRAINING_DONE:
            while delivery.is_reachable:
                time.sleep(_POLL_S)
        else:
            with contextlib.suppress(Exception):
                delivery.mark_failed()  # the main thread may still draw figures
        log("gave up: the journal keeps what was not delivered")
        os._exit(TemporaryError.code)

    threading.Thread(target=watch, daemon=True).start()
    return training_over


def _lock_sending(folder: RunFolder) -> None:
    """Take the lock that a run's only sender holds. Raises TemporaryError if it stays held."""
    try:
        folder.sender_lock.take(2 * _PATIENCE_S)  # longer than a sender lives after rank 0 was killed
    except OSError as error:
        raise folder.write_error(error) from None
