"""Delivery of one run's journal to one MLflow server.

Promise: every metric arrives exactly once. A metric is sent as its journal row states it, time
stamp included, and MLflow's SQL stores drop a metric that is equal in key, step, value and time
stamp. So whatever is sent twice, after a crash between sending it and noting that it was sent,
arrives once. `mlflow.json` notes for each server how much of the journal it has. A run that was
restored from a mirror has no such note, and trains some steps again whose metrics the server has:
it is asked for the last step of each metric, and gets only later ones.
"""

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.config.credentials import without_password
from pipeline.config.schema import Config
from pipeline.files import atomic_write
from pipeline.record.description import describe_run
from pipeline.record.folder import RunFolder
from pipeline.record.journal import read
from pipeline.record.mlflow import connection
from pipeline.record.mlflow.figures import send_figures
from pipeline.record.mlflow.model import register_model, send_model
from pipeline.record.mlflow.run import MlflowRun, open_run
from pipeline.record.page import FILE_NAME, render_page
from pipeline.record.receipt import Receipt

_MAX_METRICS = 1000  # MLflow's limit for one request
_DESCRIPTION = "mlflow.note.content"


class Delivery:
    """Sends what the journal holds and the server lacks."""

    def __init__(self, folder: RunFolder, config: Config, uri: str, timeout_s: int) -> None:
        self._folder, self._config = folder, config
        self._uri, credentials = connection.split_uri(uri)
        self._server = without_password(self._uri)  # the URI of a database still has its password
        self._run: MlflowRun | None = None
        self._offset = 0
        self._before: dict[str, int] = {}
        """The last step of each metric that the server had before this folder sent anything."""
        self.is_reachable = not uri.startswith("http")  # a local database is, even while its slow creation runs
        """The server accepted the last request."""
        self.imported = threading.Event()
        """Set once mlflow is imported, which takes seconds."""
        os.environ |= credentials | {
            connection.TIMEOUT_VARIABLE: str(timeout_s),
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # our own loop retries; mlflow's would block for minutes
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
            "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        }

    def import_mlflow(self) -> None:
        """Import mlflow, which takes seconds. Raises RequestError if it is not installed."""
        try:
            import mlflow
        except ModuleNotFoundError as error:
            raise connection.not_installed(error) from None

        mlflow.set_tracking_uri(self._uri)
        self.imported.set()

    def deliver(self) -> None:
        """Send what the journal holds and the server lacks. Raises whatever mlflow raises."""
        self.check_ours()
        try:
            if self._run is None:
                self._run = open_run(self._folder, self._config, self._uri)
                saved = self._progress().get(self._server, {})
                is_noted = saved.get("run_id") == self._run.run_id
                self._offset = saved["offset"] if is_noted else 0
                self._before = saved.get("before", {}) if is_noted else self._run.last_steps
            self.is_reachable = True
            for metrics, event, end in _split_journal(self._folder.journal, self._offset, self._before):
                self.check_ours()
                self._run.client.log_batch(self._run.run_id, metrics=metrics)
                if event:
                    self._send_event(self._run, event)
                self._offset = end
                self._save_progress(self._run)
        except Exception:
            self.is_reachable = False
            self._run = None  # searched for again: the server may come back without the run
            raise

    def check_ours(self) -> None:
        """End this process with exit code 75 if another one sends the run now."""
        self._folder.check_ours()
        self._folder.sender_lock.check()

    def mark_failed(self) -> None:
        """Set the run's status to FAILED: training was killed. Its last journal row says when."""
        assert self._run is not None
        self.check_ours()
        if self._run.client.get_run(self._run.run_id).info.status != "RUNNING":  # another start has ended it
            return
        last = max((row["time"] for row, _ in read(self._folder.journal)), default=None)
        self._run.client.set_terminated(self._run.run_id, "FAILED", last)

    def _progress(self) -> dict[str, dict[str, Any]]:
        """Return the contents of `mlflow.json`: for each server its run, and the bytes it has."""
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(self._folder.delivered.read_text()))
        return {}

    def _save_progress(self, run: MlflowRun) -> None:
        entry = {"run_id": run.run_id, "experiment_id": run.experiment_id, "offset": self._offset}
        if self._before:
            entry["before"] = self._before
        progress = json.dumps({**self._progress(), self._server: entry}, indent=1)
        atomic_write(self._folder.delivered, progress.encode(), check=self.check_ours)

    def _send_event(self, run: MlflowRun, event: dict[str, Any]) -> None:
        from mlflow.entities import RunTag

        match event["event"]:
            case "started":
                run.client.update_run(run.run_id, status="RUNNING")
                tags = event["tags"] | {_DESCRIPTION: describe_run(self._folder, self._config)}
                run.client.log_batch(run.run_id, tags=[RunTag(key, str(value)) for key, value in tags.items()])
                self._send_dataset(run, event["tags"]["data"])
                with _postponed_if_it_fails():
                    self._send_files(run)
            case "evaluated":
                with _postponed_if_it_fails():
                    send_figures(run, self._folder.report)
            case "ended":
                run.client.set_terminated(run.run_id, event["status"], event["time"])
                run.client.set_tag(run.run_id, _DESCRIPTION, describe_run(self._folder, self._config))
                with connection.request_timeout(connection.FILE_TIMEOUT_S):
                    self._send_files(run)
                    if event["status"] == "FINISHED" and (best := event["best"]):
                        file, name = self._folder.checkpoints / best["file"], self._config.track.register_
                        model_id = send_model(run, self._folder, self._config, file, best["step"])
                        if model_id and name:
                            register_model(run, name, model_id)
                    send_figures(run, self._folder.report)

    def _send_dataset(self, run: MlflowRun, digest: str) -> None:
        """Log the data as an input of the run."""
        from mlflow.entities import Dataset, DatasetInput, InputTag
        from mlflow.exceptions import MlflowException

        options = self._config.data
        source = json.dumps({"source": options.source, "root": options.root})
        plan = json.loads(self._folder.plan.read_text())
        profile = json.dumps({key: plan[key] for key in ("train_images", "val_images", "num_classes")})
        name = Path(options.root or options.source).name or options.source
        dataset = Dataset(name, digest[:36], options.source, source, profile=profile)  # MLflow takes 36 characters
        inputs = [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])]
        try:
            run.client.log_inputs(run.run_id, inputs)
        except MlflowException:  # another run may have added the same data at the same moment
            run.client.log_inputs(run.run_id, inputs)

    def _send_files(self, run: MlflowRun) -> None:
        for path in (self._folder.config, self._folder.plan, self._folder.journal):
            if path.exists():
                run.client.log_artifact(run.run_id, str(path))
        for path in sorted(self._folder.report.glob("*.png")):
            run.client.log_artifact(run.run_id, str(path), self._folder.report.name)
        # made here: rank 0 may not have written these files yet, or may never do so
        run.client.log_text(run.run_id, Receipt(self._folder).text(), self._folder.receipt.name)
        if self._folder.report.exists():
            run.client.log_text(run.run_id, render_page(self._folder), f"{self._folder.report.name}/{FILE_NAME}")


@contextlib.contextmanager
def _postponed_if_it_fails() -> Iterator[None]:
    """Log an error instead of raising it: files that fail now must not hold back the metrics."""
    try:
        yield
    except Exception as error:
        connection.log(f"files will be sent when the run has ended: {connection.root_cause(error)}")


def _split_journal(
    journal: Path, start: int, before: dict[str, int]
) -> Iterator[tuple[list[Any], dict[str, Any] | None, int]]:
    """Yield (metrics, event after them or None, offset after both), from byte `start` on.

    before: step of each metric up to which it is left out.
    """
    from mlflow.entities import Metric

    metrics: list[Any] = []
    end = start
    for row, after in read(journal, start):
        new = [
            Metric(key, value, row["time"], row["step"])
            for key, value in row.get("metrics", {}).items()
            if row["step"] > before.get(key, -1)
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
