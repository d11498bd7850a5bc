"""The parts of a run other than its metrics, status and model.

Promise: each may be sent any number of times, and is there once.
"""

import io
import json
import socket
import time
from pathlib import Path
from typing import Any

from pipeline.addons.mlflow import connection
from pipeline.addons.mlflow.run import MlflowRun, file_sizes, find_run
from pipeline.addons.mlflow.uri import sqlite_file, tracking_uri, uri_in_environment
from pipeline.addons.ops.credentials import without_password
from pipeline.addons.ops.fixed_keys import flatten
from pipeline.addons.report.evaluations import saved_evaluations, step_of_evaluation
from pipeline.addons.report.figures import EVALUATION_FIGURES, draw_evaluation
from pipeline.addons.report.page import FILE_NAME, render_page
from pipeline.addons.report.summary import describe_run
from pipeline.addons.run.receipt import Receipt
from pipeline.config.load import from_yaml
from pipeline.errors import RequestError
from pipeline.record.folder import RunFolder
from pipeline.record.journal import events, run_id

_CONTINUED = "continued by"
_PARENT, _PARENT_TAG = "mlflow.parentRunId", "pipeline.parent"


def send_parameters(run: MlflowRun) -> None:
    """Send each key as a parameter, and as a tag of the same name if its value has changed since.

    MLflow's parameters are immutable: they keep the values of the first start.
    """
    from mlflow.entities import Param, RunTag

    data = run.client.get_run(run.run_id).data
    values = {key: str(value) for key, value in flatten(run.config).items()}
    missing = [Param(key, value) for key, value in values.items() if key not in data.params]
    known = values | data.params | {key: data.tags[key] for key in values if key in data.tags}
    changed = [RunTag(key, value) for key, value in values.items() if known[key] != value]
    run.client.log_batch(run.run_id, params=missing, tags=changed)


def send_tags(run: MlflowRun) -> None:
    """Send the tags of the starts; where they differ, those of the last."""
    from mlflow.entities import RunTag

    tags: dict[str, Any] = {}
    for start in events(run.folder.journal, "started"):
        tags |= start["tags"]
    run.client.log_batch(run.run_id, tags=[RunTag(key, str(tag)) for key, tag in tags.items()])


def send_parent(run: MlflowRun) -> None:
    """Put the run below the one that groups the runs with the same `track.parent`."""
    name = run.config.track.parent
    if not name or _PARENT in run.client.get_run(run.run_id).data.tags:
        return

    def oldest() -> Any | None:
        query, order = f"tags.`{_PARENT_TAG}` = '{name}'", ["attributes.start_time"]
        return next(iter(run.client.search_runs([run.experiment_id], query, order_by=order)), None)

    parent = oldest()
    if parent is None:
        created = run.client.create_run(run.experiment_id, tags={_PARENT_TAG: name}, run_name=name)
        run.client.set_terminated(created.info.run_id)
        parent = oldest() or created
        if parent.info.run_id != created.info.run_id:  # another child has created it at the same moment
            run.client.delete_run(created.info.run_id)
    run.client.set_tag(run.run_id, _PARENT, parent.info.run_id)


def send_description(run: MlflowRun) -> None:
    """Send the description that the UI shows above the run."""
    run.client.set_tag(run.run_id, "mlflow.note.content", describe_run(run.folder, run.config))


def send_links(run: MlflowRun) -> None:
    """Name the run that this one continues, and this one there, if the server has it."""
    starts = events(run.folder.journal, "started")
    origin = next((start["tags"]["continues"] for start in starts if "continues" in start["tags"]), None)
    before = find_run(run.client, origin) if origin else None
    if before is None:
        return
    run.client.set_tag(run.run_id, "continues", _name(before))
    ours, others = _name(run.client.get_run(run.run_id)), before.data.tags.get(_CONTINUED, "")
    if ours not in others:
        run.client.set_tag(before.info.run_id, _CONTINUED, f"{others}, {ours}".removeprefix(", "))


def _name(run: Any) -> str:
    return f"{run.info.run_name} (run {run.info.run_id} of experiment {run.info.experiment_id})"


def send_inputs(run: MlflowRun) -> None:
    """Send the data as an input of the run."""
    from mlflow.entities import Dataset, DatasetInput, InputTag
    from mlflow.exceptions import MlflowException

    receipt, options = Receipt(run.folder).contents(), run.config.data
    source = json.dumps({"source": options.source, "root": options.root})
    sizes = ("train_images", "val_images", "num_classes")
    profile = json.dumps({key: receipt["plan"][key] for key in sizes})
    name = Path(options.root or options.source).name or options.source
    digest = receipt["data"][:36]  # MLflow takes 36 characters
    dataset = Dataset(name, digest, options.source, source, profile=profile)
    inputs = [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])]
    try:
        run.client.log_inputs(run.run_id, inputs)
    except MlflowException:  # another run may have added the same data at the same moment
        run.client.log_inputs(run.run_id, inputs)


def send_files(run: MlflowRun) -> None:
    """Send configuration, plan, journal and receipt, and the report."""
    for path in (run.folder.config, run.folder.plan, run.folder.journal):
        if path.exists():
            run.client.log_artifact(run.run_id, str(path))
    for path in sorted(run.folder.report.glob("[!.]*.png")):  # not those being written
        run.client.log_artifact(run.run_id, str(path), run.folder.report.name)
    # made here: rank 0 may not have written these files yet, or may never do so
    run.client.log_text(run.run_id, Receipt(run.folder).text(), run.folder.receipt.name)
    if run.folder.report.exists():
        run.client.log_text(run.run_id, render_page(run.folder), f"{run.folder.report.name}/{FILE_NAME}")


def send_figures(run: MlflowRun) -> None:
    """Draw and send the figures of the run's evaluations, unless the server has them."""
    from PIL import Image

    sent = file_sizes(run.artifact_uri, "images")
    for evaluation in saved_evaluations(run.folder.report):
        step, evaluated_at = step_of_evaluation(evaluation), int(1000 * evaluation.stat().st_mtime)
        for name in EVALUATION_FIGURES:
            if any(image.startswith(f"{name}+step+{step}+") for image in sent):
                continue
            try:
                if not (png := draw_evaluation(name, evaluation)):
                    continue
                image = Image.open(io.BytesIO(png)).convert("RGB")
            except Exception as error:
                connection.log(f"{name} of step {step} is not shown: {connection.root_cause(error)}")
            else:
                run.client.log_image(run.run_id, image, key=name, step=step, timestamp=evaluated_at)


def note_verification(folder: RunFolder, result: str) -> str:
    """Add the result of `pipeline verify` to the run as a tag, and return a line for the user."""
    try:
        config = from_yaml(folder.config.read_text(encoding="utf-8"), str(folder.config))
        named = uri_in_environment()
        uri = named or tracking_uri(config, folder)
        if uri is None:
            raise RequestError("track.uri=none")
        shown, database = without_password(uri), sqlite_file(uri)
        if not (Path(database).exists() if database else named):
            # others may have written the run's files, so a server must be named here
            raise RequestError(f"set MLFLOW_TRACKING_URI={shown} if the run is there and it may be contacted")
        address = connection.configure(uri, connection.REQUEST_TIMEOUT_S)

        from mlflow import MlflowClient  # reads the variables

        client = MlflowClient(address)
        run = find_run(client, run_id(folder.journal) or "")
        if run is None:
            raise RequestError(f"the run is not at {shown}")
        text = f"{time.strftime('%F %T')} on {socket.gethostname()}: {result}"
        client.set_tag(run.info.run_id, "verified", text)
    except Exception as error:  # the result is worth more than its note
        return f"not noted in MLflow: {connection.root_cause(error)}"
    return f"noted in MLflow at {shown} as the run's tag `verified`"
