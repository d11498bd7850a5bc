"""The sender: the process `pipeline sync --follow`, which feeds MLflow while rank 0 trains.

It is a process of its own, so it does not share an interpreter lock with training, live and late
delivery are the same code, and when rank 0 is killed a process is left to write FAILED. Two pipes
connect them. On its standard input, a word from rank 0 means that training is over and rank 0
waits; the end of the pipe without that word means that rank 0 is dead. On its standard output the
sender writes one line: whether it reached the server.
"""

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable

from pipeline import world
from pipeline.config.credentials import without_password
from pipeline.config.load import check_tracking_uri, mlflow_changes
from pipeline.config.schema import Config, expand_home
from pipeline.data.access import printable_name
from pipeline.errors import RequestError
from pipeline.record.folder import RunFolder
from pipeline.supervision import cpu_seconds

READY = "ready"
# not just the end of the pipe: a loader worker, forked from rank 0, may still hold the pipe open
TRAINING_DONE = b"over\n"
_READY_TIMEOUT_S = 60
# for sending a model; the sender itself gives up on a server that does not answer within seconds
_FINISH_TIMEOUT_S = 120


class Sender:
    """Starts and stops the sender process."""

    def __init__(self, folder: RunFolder, uri: str) -> None:
        self._folder, self._uri = folder, uri
        # the URI is not an argument, since ps shows those
        environment = {**os.environ, "PIPELINE_TRACK_URI": uri, "CUDA_VISIBLE_DEVICES": ""}
        for name in world.VARIABLES:
            environment.pop(name, None)
        with open(folder.sync_log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipeline", "sync", str(folder.path), "--follow"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment,
                start_new_session=True,  # a launcher's signals to the process group do not reach it: the pipe ends it
            )  # fmt: skip

    def wait_until_ready(self) -> None:
        """Return when the server was reached. Raises RequestError if the first attempt failed."""
        assert self._process.stdout is not None
        answer = ""
        if select.select([self._process.stdout], [], [], _READY_TIMEOUT_S)[0]:
            answer = self._process.stdout.readline().decode(errors="replace").strip()
        if answer == READY:
            return
        self._process.kill()  # nothing was recorded yet, and a first attempt may take minutes
        self._process.wait()
        raise RequestError(
            f"track.required=true and MLflow at {without_password(self._uri)} cannot be reached"
            f" ({answer or f'no answer, see {self._folder.sync_log}'})",
            "start it, correct track.uri, or train without it, with track.required=false",
        )

    def cpu_seconds(self) -> float:
        """Return the CPU time that the process has used."""
        return cpu_seconds(self._process.pid)

    def close(self, log: Callable[[str], None], seconds_left: Callable[[], float | None] = lambda: None) -> bool:
        """Let the process deliver the rest and end; return True if everything was delivered.

        seconds_left: the time until this process must end, or None.
        """
        log("sending what the tracking server does not have yet ...")  # a model's export takes seconds
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already: its exit code says how
            os.write(self._process.stdin.fileno(), TRAINING_DONE)
        end = time.monotonic() + _FINISH_TIMEOUT_S
        left: float | None = 1
        while time.monotonic() < end and (left is None or left > 0):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(0.2) == 0
            left = seconds_left()
        if left is None:
            self._process.kill()
            self._process.wait()
        return False  # its process may outlive this one and deliver the rest


def tracking_uri(config: Config, folder: RunFolder) -> str | None:
    """Return the URI of the MLflow server that gets the run, or None for the journal only.

    Raises RequestError if MLflow cannot open it, or a database beside the folder.
    """
    if config.track.uri == "none":
        return None
    if config.track.uri != "auto":
        check_tracking_uri("track.uri", config.track.uri)
        return config.track.uri
    if uri := uri_in_environment():
        return uri
    database = str(folder.path.absolute().parent / "mlflow.db")
    if mlflow_changes(database):
        raise RequestError(
            f"MLflow cannot open {printable_name(database)}, because of a ? or % in the path, or because it is not"
            " UTF-8",
            "give another run.dir, name a server with track.uri, or set track.uri=none",
        )
    return f"sqlite:///{database}"


def last_failure(folder: RunFolder) -> str:
    """Return the line with which the last sender failed, or ""."""
    with contextlib.suppress(OSError):
        *_, last = folder.sync_log.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
        if last.startswith("pipeline: "):
            return last.removeprefix("pipeline: ")
    return ""


def ignored_variables() -> str:
    """Return "" or, for the end of a line, which variables of MLflow a training does not use."""
    names = [name for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID") if os.environ.get(name)]
    if not names:
        return ""
    return f"; {' and '.join(names)} not used: a training is a run of its own, in the experiment track.experiment"


def uri_in_environment() -> str | None:
    """Return MLFLOW_TRACKING_URI, or None. Raises RequestError if MLflow cannot open it."""
    uri = expand_home(os.environ.get("MLFLOW_TRACKING_URI", ""))
    if uri:
        check_tracking_uri("MLFLOW_TRACKING_URI", uri)
    return uri or None


def start(config: Config, folder: RunFolder) -> Sender | None:
    """Start the sender of a run, if it has a tracker. Raises OSError if that fails."""
    uri = tracking_uri(config, folder)
    return Sender(folder, uri) if uri else None
