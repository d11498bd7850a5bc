"""Delivery of one run's journal to one MLflow server.

Promise: every metric arrives exactly once. A metric is sent as its journal row states it, time
stamp included, and MLflow's SQL stores drop a metric that is equal in key, step, value and time
stamp. So whatever is sent twice, after a crash between sending it and noting that it was sent,
arrives once. `mlflow.json` notes for each server how much of the journal it has. A run that was
restored from a mirror has no such note, and trains some steps again whose metrics the server has:
it is asked for these, and gets only what it lacks. Of a figure that has changed when its step was
trained again, the server keeps both values, and shows the later one.
"""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipeline.addons.mlflow import connection, parts
from pipeline.addons.mlflow.figures import send_figures
from pipeline.addons.mlflow.model import send_model
from pipeline.addons.mlflow.run import MlflowRun, open_run
from pipeline.config.credentials import without_password
from pipeline.config.schema import Config
from pipeline.errors import RequestError, TemporaryError
from pipeline.files import parse_json
from pipeline.record.folder import RunFolder
from pipeline.record.journal import MEASURED, final_status, read

_MAX_METRICS = 1000  # MLflow's limit for one request
_SENDERS: dict[str, Callable[[MlflowRun], object]] = {
    "parameters": parts.send_parameters,
    "tags": parts.send_tags,
    "parent": parts.send_parent,
    "description": parts.send_description,
    "links": parts.send_links,
    "inputs": parts.send_inputs,
    "files": parts.send_files,
    "figures": send_figures,
    "model": send_model,
    "registration": send_model,  # a part of its own in version 0.2
}
_DUE = {
    "started": ("parameters", "tags", "parent", "description", "links", "inputs", "files"),
    "evaluated": ("figures",),
    "ended": ("description", "files", "figures"),
}
"""The parts that are due after an event, in the order in which they are sent.

After the end of a finished run, also its model.
"""


class Delivery:
    """Sends what the journal holds and the server lacks: rows at once, and parts one by one."""

    def __init__(self, folder: RunFolder, config: Config, uri: str, timeout_s: int) -> None:
        self._folder, self._config = folder, config
        self._uri = connection.configure(uri, timeout_s)
        self._server = without_password(self._uri)  # the URI of a database still has its password
        self._run: MlflowRun | None = None
        self._offset = 0
        """The server has this many bytes of the journal."""
        self._due: list[str] = []
        """The parts that the server lacks."""
        self._held: dict[str, Exception | None] = {}
        """The due parts that wait for the next event: refused with an error, or None: not ready."""
        self._before: dict[str, int] = {}
        """The last step of each metric that the server had before this folder sent anything."""
        self._history: dict[str, dict[int, float]] = {}
        """The last value of these metrics at each step, as far as they were asked for."""
        self.is_reachable = not uri.startswith(
            "http"
        )  # a local database is, even while its slow creation runs
        """The server accepted the last request."""
        self.imported = threading.Event()
        """Set once mlflow is imported, which takes seconds."""

    def import_mlflow(self) -> None:
        """Import mlflow, which takes seconds. Raises RequestError if it is not installed."""
        try:
            import mlflow
        except ModuleNotFoundError as error:
            raise connection.not_installed(error) from None

        mlflow.set_tracking_uri(self._uri)
        self.imported.set()

    def send_rows(self) -> None:
        """Send the metrics and the status that the server lacks. Raises whatever mlflow raises."""
        self.check_ours()
        try:
            run = self._run = self._run or self._open()
            self.is_reachable = True
            for metrics, event, end in _split_journal(self._folder.journal, self._offset, self._is_sent):
                self.check_ours()
                run.client.log_batch(run.run_id, metrics=metrics)
                if event:
                    self._send_event(run, event)
                self._offset = end
                self._save_progress(run)
        except Exception:
            self._lose_server()
            raise

    def send_part(self) -> bool:
        """Send the next part that is due, and return True; return False if there is none.

        A part that is refused holds back nothing else. It stays due, and its reason is logged.
        Raises whatever mlflow raises if the server answers no other request either.
        """
        run = self._run
        name = next((name for name in self._due if name not in self._held), None)
        if run is None or name is None:
            return False
        self.check_ours()
        try:
            if _SENDERS[name](run) is False:
                self._held[name] = None
            else:
                self._due.remove(name)
                self._save_progress(run)
        except Exception as error:
            connection.log(f"{name} not sent, and tried again later: {connection.root_cause(error)}")
            self._held[name] = error
            try:
                run.client.get_run(run.run_id)
            except Exception:
                self._lose_server()
                raise
        return True

    def retry_parts(self, *more: str) -> None:
        """Have `send_part` send all parts that are due, also those that failed, and `more`."""
        self._held.clear()
        self._due += [name for name in more if name not in self._due]

    def check_complete(self) -> None:
        """Raise RequestError or TemporaryError if a part could not be sent."""
        failed = {name: error for name, error in self._held.items() if error}
        if refused := next((error for error in failed.values() if isinstance(error, RequestError)), None):
            raise refused
        if failed:
            reasons = "; ".join(f"{name}: {connection.root_cause(error)}" for name, error in failed.items())
            raise TemporaryError(f"MLflow at {self._server} did not take everything: {reasons}")

    def check_ours(self) -> None:
        """End this process with exit code 75 if another one sends the run now."""
        self._folder.check_ours()
        self._folder.sender_lock.check()

    def mark_failed(self) -> None:
        """Set the status to FAILED if training was killed. The last row of the journal says when.

        Does nothing if the journal has the end of the run, or while the server is away.
        """
        run = self._run
        if run is None or final_status(self._folder.journal):
            return
        self.check_ours()
        if run.client.get_run(run.run_id).info.status == "RUNNING":  # else another start has ended it
            last = max((row["time"] for row, _ in read(self._folder.journal)), default=None)
            run.client.set_terminated(run.run_id, "FAILED", last)

    def _open(self) -> MlflowRun:
        """Find or create the run, and read how much of the journal it has."""
        run = open_run(self._folder, self._config, self._uri)
        saved = self._progress().get(self._server, {})
        # a journal that lost its last rows with the power may be shorter than what was sent of it
        if saved.get("run_id") != run.run_id or not _is_row_start(self._folder.journal, saved["offset"]):
            saved = {"before": run.last_steps}
        self._offset, self._due = saved.get("offset", 0), saved.get("due", [])
        self._before = saved.get("before", {})
        return run

    def _lose_server(self) -> None:
        self.is_reachable = False
        self._run = None  # searched for again: the server may come back without the run

    def _is_sent(self, key: str, step: int, value: float) -> bool:
        """Return True if the server had this point before this folder sent anything."""
        if step > self._before.get(key, -1) or key.startswith(MEASURED):
            return step <= self._before.get(key, -1)
        if key not in self._history:
            assert self._run is not None
            points = self._run.client.get_metric_history(self._run.run_id, key)
            points.sort(key=lambda point: point.timestamp)
            self._history[key] = {point.step: point.value for point in points}
        return self._history[key].get(step) == value

    def _progress(self) -> dict[str, dict[str, Any]]:
        """Return the contents of `mlflow.json`: for each server its run, and what it has."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return dict(parse_json(self._folder.delivered.read_text(encoding="utf-8")))
        return {}

    def _save_progress(self, run: MlflowRun) -> None:
        more = {name: value for name, value in (("before", self._before), ("due", self._due)) if value}
        entry = {"run_id": run.run_id, "experiment_id": run.experiment_id, "offset": self._offset, **more}
        progress = json.dumps({**self._progress(), self._server: entry}, indent=1)
        self.check_ours()
        self._folder.write(self._folder.delivered, progress.encode())

    def _send_event(self, run: MlflowRun, event: dict[str, Any]) -> None:
        """Send the status that an event brings, and note the parts that are due after it."""
        due = _DUE.get(event["event"], ())
        if event["event"] == "started":
            run.client.update_run(run.run_id, status="RUNNING")
            # what ended the training before is no longer its result
            self._due = [name for name in self._due if _SENDERS[name] is not send_model]
        if event["event"] == "ended":
            run.client.set_terminated(run.run_id, event["status"], event["time"])
            if event["status"] == "FINISHED" and event["best"]:
                due += ("model",)
        if due:
            self.retry_parts(*due)


def _is_row_start(path: Path, offset: int) -> bool:
    """Return True if a row starts at this byte of the journal, or the last row ends there."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, offset - 1))
        return offset == 0 or file.read(1) == b"\n"
    return False


def _split_journal(
    journal: Path, start: int, is_sent: Callable[[str, int, float], bool]
) -> Iterator[tuple[list[Any], dict[str, Any] | None, int]]:
    """Yield (metrics, event after them or None, offset after both), from byte `start` on.

    is_sent: says of each metric, by its key, step and value, if it is left out.
    """
    from mlflow.entities import Metric

    metrics: list[Any] = []
    end = start
    for row, after in read(journal, start):
        new = [
            Metric(key, value, row["time"], row["step"])
            for key, value in row.get("metrics", {}).items()
            if not is_sent(key, row["step"], value)
        ]
        if len(metrics) + len(new) > _MAX_METRICS:
            yield metrics, None, end
            metrics = []
        metrics += new
        end = after
        if "event" in row:
            yield metrics, row, end
            metrics = []
    if metrics:
        yield metrics, None, end
