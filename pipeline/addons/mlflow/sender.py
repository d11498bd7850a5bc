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
import shlex
import subprocess
import sys
import time
from collections.abc import Callable

from pipeline import world
from pipeline.addons.mlflow import READY, TRAINING_DONE
from pipeline.addons.mlflow.uri import ignored_variables, tracking_uri
from pipeline.config.credentials import without_password
from pipeline.config.schema import Config
from pipeline.errors import RequestError, RunError
from pipeline.record.folder import RunFolder
from pipeline.supervision import cpu_seconds
from pipeline.train.job import Job
from pipeline.train.listener import End, Listener, Start

_READY_TIMEOUT_S = 60
# for sending a model; the sender itself gives up on a server that does not answer within seconds
_FINISH_TIMEOUT_S = 120


class ToMLflow(Listener):
    """Starts the process that sends the journal's rows to MLflow, and waits for it at the end."""

    def __init__(self, job: Job, log: Callable[[str], None]) -> None:
        self._config, self._folder, self._log = job.config, job.folder, log
        self._sender: Sender | None = None

    def started(self, start: Start) -> None:
        if ignored := ignored_variables():
            self._log(f"MLflow{ignored}")
        try:
            self._sender = start_sender(self._config, self._folder)
        except OSError as error:  # `pipeline sync` sends the journal later
            self._log(f"MLflow's sender could not be started: {error.strerror}")

    def error(self) -> RunError | None:
        """Return None once MLflow is reached, or the error if it is not at the first attempt."""
        try:
            if self._sender:
                self._sender.wait_until_ready()
        except RunError as error:
            return error
        return None

    def closed(self, end: End) -> None:
        if self._sender and not self._sender.close(self._log, end.seconds_left):
            command = f"pipeline sync {shlex.quote(str(self._folder.path))}"
            reason = self._sender.last_failure() or f"see {self._folder.sync_log}"
            self._log(
                f"MLflow did not take everything ({reason}): the journal keeps it, '{command}' sends it"
            )


class Sender:
    """Starts and stops the sender process."""

    def __init__(self, folder: RunFolder, uri: str) -> None:
        self._folder, self._uri = folder, uri
        environment = {name: value for name, value in os.environ.items() if name not in world.VARIABLES}
        # the URI is not an argument, since ps shows those
        environment |= {"PIPELINE_TRACK_URI": uri, "CUDA_VISIBLE_DEVICES": ""}
        with open(folder.sync_log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipeline", "sync", str(folder.path), "--follow"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment,
                # a launcher's signals to the process group do not reach it: the pipe ends it
                start_new_session=True,
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

    def close(
        self, log: Callable[[str], None], seconds_left: Callable[[], float | None] = lambda: None
    ) -> bool:
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

    def last_failure(self) -> str:
        """Return the line with which the process has failed, or ""."""
        with contextlib.suppress(OSError):
            *_, last = ["", *self._folder.sync_log.read_text(encoding="utf-8", errors="replace").splitlines()]
            if last.startswith("pipeline: "):
                return last.removeprefix("pipeline: ")
        return ""


def start_sender(config: Config, folder: RunFolder) -> Sender | None:
    """Start the sender of a run, if it has a tracker. Raises OSError if that fails."""
    uri = tracking_uri(config, folder)
    return Sender(folder, uri) if uri else None
