"""The sender's leash: starts `pipeline sync --follow` beside a run and lets it go.

The sender is a process of its own: it shares no interpreter lock with training, live and late delivery are one piece of
code, and when rank 0 is killed somebody is left to write FAILED. Its standard input is a pipe that rank 0 holds: the end
of that pipe means that training is over, however it ended. `NoSender` is for a run that keeps to its journal.
"""

import os
import select
import subprocess
import sys
import time

from pipeline.config import Config
from pipeline.record.folder import RunFolder
from pipeline.verdict import RequestError

READY = b"ready\n"
_WAIT_READY_S = 60
_WAIT_FINISH_S = 120  # a model may be on its way to a server that answers; one that does not is given up in seconds


class NoSender:
    def wait_ready(self) -> None:
        """Return when the tracker is reached; RequestError if it cannot be."""

    def finish(self) -> bool:
        """Let it deliver the rest; whether everything arrived."""
        return True


class Sender(NoSender):
    def __init__(self, folder: RunFolder, uri: str) -> None:
        self._uri = uri
        self._folder = folder
        environment = {**os.environ, "PIPELINE_TRACK_URI": uri, "CUDA_VISIBLE_DEVICES": ""}  # not argv: ps shows that
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            environment.pop(name, None)
        with open(folder.sync_log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipeline", "sync", str(folder.path), "--follow"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,  # out of reach of a launcher's signals to the group: it leaves by its pipe
            )

    def wait_ready(self) -> None:
        assert self._process.stdout is not None
        end = time.monotonic() + _WAIT_READY_S
        while time.monotonic() < end:
            if select.select([self._process.stdout], [], [], 1)[0]:
                if os.read(self._process.stdout.fileno(), len(READY)) == READY:
                    return
                break
        self.finish()
        raise RequestError(
            f"track.required=true and MLflow at {self._uri.split('@')[-1]} cannot be reached ({last_line(self._folder)}):"
            " start it, correct track.uri, or train without with track.required=false"
        )

    def finish(self) -> bool:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            return self._process.wait(_WAIT_FINISH_S) == 0
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False


def last_line(folder: RunFolder) -> str:
    """What the sender said last."""
    try:
        lines = folder.sync_log.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else "it said nothing"


def tracking_uri(config: Config) -> str | None:
    """Where the run is sent: None for the journal alone."""
    if config.track.uri == "none":
        return None
    if config.track.uri != "auto":
        return config.track.uri
    default = f"sqlite:///{config.run_dir.absolute().parent / 'mlflow.db'}"
    return os.environ.get("MLFLOW_TRACKING_URI") or default


def start(config: Config, folder: RunFolder) -> NoSender:
    uri = tracking_uri(config)
    return Sender(folder, uri) if uri else NoSender()
