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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.addons.mlflow import connection, parts
from pipeline.addons.mlflow.model import send_model
from pipeline.addons.mlflow.run import MlflowRun, open_run
from pipeline.addons.ops.credentials import without_password
from pipeline.config.schema import Config
from pipeline.errors import RequestError, TemporaryError
from pipeline.files import parse_json
from pipeline.record.folder import RunFolder
from pipeline.record.journal import MEASURED, final_status, read

_BATCH = 500  # metrics; MLflow takes 1,000 in a request, and a row of the journal has up to 200
_PARTS: dict[str, Callable[[MlflowRun], None]] = {
    "parameters": parts.send_parameters,
    "tags": parts.send_tags,
    "parent": parts.send_parent,
    "description": parts.send_description,
    "links": parts.send_links,
    "inputs": parts.send_inputs,
    "files": parts.send_files,
    "figures": parts.send_figures,
    "model": send_model,
}
_DUE = {
    "started": ("parameters", "tags", "parent", "description", "links", "inputs", "files"),
    "evaluated": ("figures",),
    "ended": ("description", "links", "files", "figures", "model"),
}
"""The parts that are due after an event, in the order in which they are sent."""


class Delivery:
    """Sends what the journal holds and the server lacks: rows at once, and parts one by one."""

    def __init__(self, folder: RunFolder, config: Config, uri: str, timeout_s: int) -> None:
        self._folder, self._config = folder, config
        self._uri = connection.configure(uri, timeout_s)
        self._server = without_password(self._uri)  # the URI of a database still has its password
        self._run: MlflowRun | None = None
        self._offset = 0  # the server has this many bytes of the journal
        # the parts that the server lacks. One that failed has its error and waits for an event.
        self._due: dict[str, Exception | None] = {}
        # the last value at each step of the metrics that the server was asked for
        self._history: dict[str, dict[int, float]] = {}
        self.is_reachable = True  # the server did not fail yet, or accepted the last request

    def send_rows(self) -> None:
        """Send the metrics and the status that the server lacks. Raises whatever mlflow raises."""
        self._check_ours()
        try:
            from mlflow.entities import Metric

            run = self._run = self._run or self._open()
            self.is_reachable = True
            metrics: list[Any] = []
            for row, end in read(self._folder.journal, self._offset):
                for key, value in row.get("metrics", {}).items():
                    if not self._is_sent(run, key, row["step"], value):
                        metrics.append(Metric(key, value, row["time"], row["step"]))
                if "event" in row or len(metrics) > _BATCH:
                    self._send(run, metrics, row, end)
                    metrics = []
            if metrics:
                self._send(run, metrics, row, end)
        except Exception:
            self._lose_server()
            raise

    def send_part(self) -> bool:
        """Send the next part that is due, and return True; return False if there is none.

        A part that is refused holds back nothing else. It stays due, and its reason is logged.
        Raises whatever mlflow raises if the server answers no other request either.
        """
        run, name = self._run, next((name for name, error in self._due.items() if error is None), None)
        if run is None or name is None:
            return False
        self._check_ours()
        try:
            _PARTS[name](run)
            del self._due[name]
            self._save_progress(run)
        except Exception as error:
            connection.log(f"{name} not sent, and tried again later: {connection.root_cause(error)}")
            self._due[name] = error
            try:
                run.client.get_run(run.run_id)
            except Exception:
                self._lose_server()
                raise
        return True

    def send_all_parts(self) -> None:
        """Send all parts that are due, also those that failed, and links and files once more.

        Raises the first RequestError of a part, or TemporaryError if one could not be sent.
        """
        self._add_due("links", "files")  # the report is drawn, and another run may be there, after the end
        connection.set_timeout(connection.FILE_TIMEOUT_S)
        while self.send_part():
            pass
        failed = {name: error for name, error in self._due.items() if error}
        for error in failed.values():
            if isinstance(error, RequestError):
                raise error
        if failed:
            reasons = "; ".join(f"{name}: {connection.root_cause(error)}" for name, error in failed.items())
            raise TemporaryError(f"MLflow at {self._server} did not take everything: {reasons}")

    def mark_failed(self) -> None:
        """Set the status to FAILED if training was killed. The last row of the journal says when.

        Does nothing if the journal has the end of the run, or while the server is away.
        """
        run = self._run
        if run is None or final_status(self._folder.journal):
            return
        self._check_ours()
        if run.client.get_run(run.run_id).info.status == "RUNNING":  # else another start has ended it
            last = max((row["time"] for row, _ in read(self._folder.journal)), default=None)
            run.client.set_terminated(run.run_id, "FAILED", last)

    def _check_ours(self) -> None:
        """End this process with exit code 75 if another one sends the run now."""
        self._folder.check_ours()
        self._folder.sender_lock.check()

    def _open(self) -> MlflowRun:
        """Find or create the run, and read how much of the journal it has."""
        import mlflow

        mlflow.set_tracking_uri(self._uri)
        run = open_run(self._folder, self._config, self._uri)
        saved = self._progress().get(self._server, {})
        # a journal that lost its last rows with the power may be shorter than what was sent of it
        if saved.get("run_id") != run.run_id or not _is_row_start(self._folder.journal, saved["offset"]):
            saved = {}
        self._offset = saved.get("offset", 0)
        # a part that failed stays behind the others: it may have been what took the server away
        self._due = {name: self._due.get(name) for name in saved.get("due", []) if name in _PARTS}
        self._history.clear()
        return run

    def _lose_server(self) -> None:
        self.is_reachable = False
        self._run = None  # searched for again: the server may come back without the run

    def _is_sent(self, run: MlflowRun, key: str, step: int, value: float) -> bool:
        """Return True if the server had this point when the run was opened."""
        if step > run.last_steps.get(key, -1):
            return False
        if key not in self._history:
            points = run.client.get_metric_history(run.run_id, key)
            points.sort(key=lambda point: point.timestamp)
            self._history[key] = {point.step: point.value for point in points}
        known = self._history[key]
        return step in known if key.startswith(MEASURED) else known.get(step) == value

    def _send(self, run: MlflowRun, metrics: list[Any], row: dict[str, Any], end: int) -> None:
        """Send metrics, and the event in `row` if it is one. The journal has them up to `end`."""
        self._check_ours()
        run.client.log_batch(run.run_id, metrics=metrics)
        event = row.get("event", "")
        if event == "started":
            run.client.update_run(run.run_id, status="RUNNING")
        if event == "ended":
            run.client.set_terminated(run.run_id, row["status"], row["time"])
        if event in _DUE:
            self._add_due(*_DUE[event])
        self._offset = end
        self._save_progress(run)

    def _add_due(self, *names: str) -> None:
        self._due = dict.fromkeys((*self._due, *names))

    def _progress(self) -> dict[str, dict[str, Any]]:
        """Return the contents of `mlflow.json`: for each server its run, and what it has."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return dict(parse_json(self._folder.delivered.read_text(encoding="utf-8")))
        return {}

    def _save_progress(self, run: MlflowRun) -> None:
        entry: dict[str, Any] = {"run_id": run.run_id, "experiment_id": run.experiment_id}
        entry |= {"offset": self._offset, "due": list(self._due)}
        progress = json.dumps({**self._progress(), self._server: entry}, indent=1)
        self._check_ours()
        self._folder.write(self._folder.delivered, progress.encode())


def _is_row_start(path: Path, offset: int) -> bool:
    """Return True if a row starts at this byte of the journal, or the last row ends there."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, offset - 1))
        return offset == 0 or file.read(1) == b"\n"
    return False
