"""The parts of a run other than its metrics and status: description, links, inputs and files.

Promise: each may be sent any number of times, and is there once.
"""

import json
import socket
import time
from pathlib import Path
from typing import Any

from pipeline.config.credentials import without_password
from pipeline.config.load import from_yaml
from pipeline.config.schema import Config
from pipeline.files import parse_json
from pipeline.record.description import describe_run
from pipeline.record.folder import RunFolder
from pipeline.record.journal import read, run_id
from pipeline.record.mlflow import connection
from pipeline.record.mlflow.run import MlflowRun, find_run
from pipeline.record.page import FILE_NAME, render_page
from pipeline.record.receipt import Receipt
from pipeline.record.sender import tracking_uri, uri_in_environment

_DESCRIPTION = "mlflow.note.content"


def send_description(run: MlflowRun, folder: RunFolder, config: Config) -> None:
    """Send the description that the UI shows above the run."""
    run.client.set_tag(run.run_id, _DESCRIPTION, describe_run(folder, config))


def send_links(run: MlflowRun, folder: RunFolder) -> None:
    """Name the run that this one continues, and this one there, if both are on the server."""
    tags = (row["tags"] for row, _ in read(folder.journal) if row.get("event") == "started")
    origin = next((start["continues"] for start in tags if "continues" in start), None)
    before = find_run(run.client, origin) if origin else None
    if before:
        ours = run.client.get_run(run.run_id)
        run.client.set_tag(run.run_id, "continues", _name(before))
        run.client.set_tag(before.info.run_id, "continued by", _name(ours))


def _name(run: Any) -> str:
    return f"{run.info.run_name} (run {run.info.run_id} of experiment {run.info.experiment_id})"


def send_inputs(run: MlflowRun, folder: RunFolder, config: Config) -> None:
    """Send the data as an input of the run."""
    from mlflow.entities import Dataset, DatasetInput, InputTag
    from mlflow.exceptions import MlflowException

    digest = json.loads(Receipt(folder).text())["data"]
    options = config.data
    source = json.dumps({"source": options.source, "root": options.root})
    plan = parse_json(folder.plan.read_text())
    profile = json.dumps({key: plan[key] for key in ("train_images", "val_images", "num_classes")})
    name = Path(options.root or options.source).name or options.source
    dataset = Dataset(name, digest[:36], options.source, source, profile=profile)  # MLflow takes 36 characters
    inputs = [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])]
    try:
        run.client.log_inputs(run.run_id, inputs)
    except MlflowException:  # another run may have added the same data at the same moment
        run.client.log_inputs(run.run_id, inputs)


def send_files(run: MlflowRun, folder: RunFolder) -> None:
    """Send configuration, plan, journal and receipt, and the report."""
    for path in (folder.config, folder.plan, folder.journal):
        if path.exists():
            run.client.log_artifact(run.run_id, str(path))
    for path in sorted(folder.report.glob("*.png")):
        run.client.log_artifact(run.run_id, str(path), folder.report.name)
    # made here: rank 0 may not have written these files yet, or may never do so
    run.client.log_text(run.run_id, Receipt(folder).text(), folder.receipt.name)
    if folder.report.exists():
        run.client.log_text(run.run_id, render_page(folder), f"{folder.report.name}/{FILE_NAME}")


def note_verification(folder: RunFolder, result: str) -> str:
    """Add the result of `pipeline verify` to the run as a tag, and return a line for the user."""
    try:
        config = from_yaml(folder.config.read_text(), str(folder.config))
        uri = uri_in_environment() or tracking_uri(config, folder)
        if uri is None:
            return "not noted in MLflow: track.uri=none"
        address = connection.configure(uri, connection.FILE_TIMEOUT_S)

        from mlflow import MlflowClient

        client = MlflowClient(address)
        run = find_run(client, run_id(folder.journal) or "")
        if run is None:
            return f"not noted in MLflow: the run is not at {without_password(uri)}"
        client.set_tag(run.info.run_id, "verified", f"{time.strftime('%F %T')} on {socket.gethostname()}: {result}")
    except Exception as error:  # the result is worth more than its note
        return f"not noted in MLflow: {connection.root_cause(error)}"
    return f"noted in MLflow at {without_password(uri)} as the run's tag `verified`"
