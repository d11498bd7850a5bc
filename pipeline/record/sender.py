"""The sender's leash: starts `pipeline sync --follow` beside a run and lets it go.

The sender is a process of its own: it shares no interpreter lock with training, live and late delivery are one piece of
code, and when rank 0 is killed somebody is left to write FAILED. Two pipes bind them. Its standard input is held by
rank 0: a word there means that training is over and rank 0 waits, its end without that word that rank 0 is dead. Its
standard output answers once: whether the server was reached. `NoSender` is for a run that keeps to its journal.
"""

import contextlib
import os
import re
import select
import subprocess
import sys
from collections.abc import Callable

from pipeline.config.credentials import without_password
from pipeline.config.schema import Config
from pipeline.errors import RequestError
from pipeline.record.folder import RunFolder
from pipeline.supervision import process_stat

READY = "ready"
# said, because the end of the pipe alone would not come while a loader worker, forked from rank 0, still holds it
OVER = b"over\n"
_WAIT_READY_S = 60
_WAIT_FINISH_S = 120  # a model may be on its way to a server that answers; one that does not is given up in seconds


class NullSender:
    def wait_ready(self) -> None:
        """Return when the tracker is reached; RequestError if it is not at the first attempt."""

    def finish(self, log: Callable[[str], None]) -> bool:
        """Let it deliver the rest; whether everything arrived."""
        return True

    def cpu_seconds(self) -> float:
        """What it has taken of a CPU so far."""
        return 0


class Sender(NullSender):
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
        answer = b""
        if select.select([self._process.stdout], [], [], _WAIT_READY_S)[0]:
            answer = self._process.stdout.readline()
        said = answer.decode(errors="replace").strip()
        if said == READY:
            return
        self.finish(lambda line: None)
        raise RequestError(
            f"track.required=true and MLflow at {without_password(self._uri)} cannot be reached"
            f" ({said or f'no answer, see {self._folder.sync_log}'}): start it, correct track.uri, or train without"
            " with track.required=false"
        )

    def cpu_seconds(self) -> float:
        user, system = process_stat(self._process.pid)[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def finish(self, log: Callable[[str], None]) -> bool:
        log("sending what the tracker lacks ...")  # a model's export takes seconds
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has left before us: the code says how
            os.write(self._process.stdin.fileno(), OVER)
        try:
            return self._process.wait(_WAIT_FINISH_S) == 0
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False


def tracking_uri(config: Config, folder: RunFolder) -> str | None:
    """Where the run in `folder` is sent: None for the journal alone. RequestError for a place that MLflow cannot open."""
    if config.track.uri == "none":
        return None
    if config.track.uri != "auto":
        return config.track.uri
    if os.environ.get("MLFLOW_TRACKING_URI"):
        return os.environ["MLFLOW_TRACKING_URI"]
    database = str(folder.path.absolute().parent / "mlflow.db")
    if re.search(r"\?|%[0-9a-fA-F]{2}", database):  # MLflow decodes an address, and SQLAlchemy cuts it at the ?
        raise RequestError(
            f"MLflow cannot open {database}, because of a ? or % in the path: give another run.dir, name a server with"
            " track.uri, or set track.uri=none"
        )
    return f"sqlite:///{database}"


def start(config: Config, folder: RunFolder) -> NullSender:
    uri = tracking_uri(config, folder)
    return Sender(folder, uri) if uri else NullSender()
