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
from pipeline.addons.ops.credentials import without_password
from pipeline.config.schema import Config
from pipeline.errors import RequestError, RunError
from pipeline.files import parse_json
from pipeline.record.folder import RunFolder
from pipeline.train.listener import End, Listener, Start

_READY_TIMEOUT_S = 60
# for sending a model; the sender itself gives up on a server that does not answer within seconds
_FINISH_TIMEOUT_S = 120


def send_due(
    config: Config, folder: RunFolder, log: Callable[[str], None], seconds_left: Callable[[], float | None]
) -> None:
    """Send what the start that finished a run could not send, in two minutes at most."""
    if config.track.uri == "none" or not folder.journal.exists():
        return
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
        size, servers = folder.journal.stat().st_size, parse_json(folder.delivered.read_bytes()).values()
        if servers and all(server["offset"] == size and not server["due"] for server in servers):
            return
    sender = ToMLflow(config, folder, log)
    sender.start_process()
    sender.deliver_rest(seconds_left)


class ToMLflow(Listener):
    """Starts the process that sends the journal's rows to MLflow, and waits for it at the end."""

    def __init__(self, config: Config, folder: RunFolder, log: Callable[[str], None]) -> None:
        self._config, self._folder, self._log = config, folder, log
        self._process: subprocess.Popen[bytes] | None = None
        self._uri = ""

    def started(self, start: Start) -> None:
        if ignored := ignored_variables():
            self._log(f"MLflow{ignored}")
        self.start_process()

    def start_process(self) -> None:
        self._uri = tracking_uri(self._config, self._folder) or ""
        environment = {name: value for name, value in os.environ.items() if name not in world.VARIABLES}
        # the URI is not an argument, since ps shows those
        environment |= {"PIPELINE_TRACK_URI": self._uri, "CUDA_VISIBLE_DEVICES": ""}
        try:
            with open(self._folder.sync_log, "ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "pipeline", "sync", str(self._folder.path), "--follow"],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment,
                    # a launcher's signals to the process group do not reach it: the pipe ends it
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:  # `pipeline sync` sends the journal later
            self._log(f"MLflow's sender could not be started: {error.strerror}")

    def error(self) -> RunError | None:
        """Return None once MLflow is reached, or the error if it is not at the first attempt."""
        if not self._process:
            return None
        assert self._process.stdout
        answer = ""
        if select.select([self._process.stdout], [], [], _READY_TIMEOUT_S)[0]:
            answer = self._process.stdout.readline().decode(errors="replace").strip()
        if answer == READY:
            return None
        self._process.kill()  # nothing was recorded yet, and a first attempt may take minutes
        self._process.wait()
        problem = f"track.required=true and MLflow at {without_password(self._uri)} cannot be reached"
        reason = answer or f"no answer, see {self._folder.sync_log}"
        remedy = "start it, correct track.uri, or train without it, with track.required=false"
        return RequestError(f"{problem} ({reason})", remedy)

    def closed(self, end: End) -> None:
        self.deliver_rest(end.seconds_left)

    def deliver_rest(self, seconds_left: Callable[[], float | None]) -> None:
        """Let the sender deliver the rest. It may outlive this process and deliver it then."""
        if not self._process:
            return
        self._log("sending what the tracking server does not have yet ...")  # a model's export takes seconds
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has ended already: its exit code says how
            os.write(self._process.stdin.fileno(), TRAINING_DONE)
        give_up = time.monotonic() + _FINISH_TIMEOUT_S
        left: float | None = 1
        while self._process.poll() is None and time.monotonic() < give_up and (left is None or left > 0):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.2)
            left = seconds_left()
        if self._process.poll() is None and left is None:
            self._process.kill()
            self._process.wait()
        if self._process.returncode != 0:
            remedy = f"the journal keeps it, 'pipeline sync {shlex.quote(str(self._folder.path))}' sends it"
            self._log(f"MLflow did not take everything ({self._reason()}): {remedy}")

    def _reason(self) -> str:
        """Return the line with which the sender has failed, or where to look."""
        with contextlib.suppress(OSError):
            *_, last = ["", *self._folder.sync_log.read_text(encoding="utf-8", errors="replace").splitlines()]
            if last.startswith("pipeline: "):
                return last.removeprefix("pipeline: ")
        return f"see {self._folder.sync_log}"
