"""The best model of a finished run: exported from its checkpoint, logged and registered."""

import tempfile
from pathlib import Path
from typing import Any

from pipeline.config.schema import Config
from pipeline.record.folder import RunFolder
from pipeline.record.journal import read
from pipeline.record.mlflow.connection import log, root_cause
from pipeline.record.mlflow.run import MlflowRun

_STEP_TAG = "pipeline.step"


def send_model(run: MlflowRun, folder: RunFolder, config: Config, checkpoint: Path, step: int) -> str | None:
    """Send the model of a checkpoint, unless the server has it, and return its id.

    Returns None and logs the reason if it cannot be exported: the run is complete without it.
    """
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus, Metric

    client = run.client
    for model in client.search_logged_models([run.experiment_id], f"source_run_id = '{run.run_id}'"):
        if model.status != LoggedModelStatus.READY:  # a killed sender left it incomplete
            client.delete_logged_model(model.model_id)
        elif model.tags.get(_STEP_TAG) == str(step):
            return str(model.model_id)
    with tempfile.TemporaryDirectory() as scratch:
        exported = Path(scratch) / "model"
        try:
            description = export_model(checkpoint, config, exported)
        except Exception as error:
            log(f"{checkpoint.name} is not logged as a model: {root_cause(error)}")
            return None
        model = client.create_logged_model(run.experiment_id, "model", run.run_id, {_STEP_TAG: str(step)})
        description.model_id, description.run_id = model.model_id, run.run_id
        description.artifact_path = model.artifact_location
        description.save(exported / "MLmodel")
        client.log_model_artifacts(model.model_id, str(exported))
    metrics = [
        Metric(key, value, row["time"], step, model_id=model.model_id)
        for row, _ in read(folder.journal)
        if row.get("step") == step
        for key, value in row.get("metrics", {}).items()
        if key.startswith("val/")
    ]
    client.log_batch(run.run_id, metrics=metrics)  # the run has them already: these name the model
    client.log_outputs(run.run_id, [LoggedModelOutput(model.model_id, step)])
    client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
    return str(model.model_id)


def export_model(checkpoint: Path, config: Config, destination: Path) -> Any:
    """Export a checkpoint's model to the folder `destination`, and return its MLmodel.

    The exported model takes pixels, [B, 3, H, W] float32 of 0..255, and returns probabilities, [B,
    classes].
    """
    import mlflow.pytorch
    import numpy as np
    import torch
    from mlflow.models import Model, infer_signature

    from pipeline.data.augment import evaluation_geometry
    from pipeline.model.architectures import ExportedModel
    from pipeline.record.checkpoint import decode, eval_model
    from pipeline.record.checkpoint_files import read_verified

    contents = decode(read_verified(checkpoint), checkpoint)
    # in train mode the export would keep dropout and update batch norm's statistics
    served = ExportedModel(eval_model(contents, config.model)).eval()
    size, _ = evaluation_geometry(config.evaluate, config.augment)
    example = np.zeros((2, 3, size, size), np.float32)  # a batch of one would fix the batch size
    with torch.inference_mode():
        probabilities = served(torch.from_numpy(example)).numpy()
    # the configuration says how to preprocess images as validation does
    description = Model(metadata={"config": contents["config"], "classes": contents["classes"]})
    mlflow.pytorch.save_model(
        served, str(destination), mlflow_model=description,
        signature=infer_signature(example, probabilities), input_example=example,
        serialization_format="pt2",  # never a pickle, whatever the server's default is
        pip_requirements=[f"torch=={torch.__version__.split('+')[0]}", "numpy"],
    )  # fmt: skip
    return description


def register_model(run: MlflowRun, target: str, model_id: str) -> None:
    """Register a logged model, unless it is, and set its alias. target: NAME or NAME@ALIAS."""
    from mlflow.exceptions import MlflowException

    name, _, alias = target.partition("@")
    try:
        run.client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    source = f"models:/{model_id}"
    versions = run.client.search_model_versions(f"name = '{name}'")
    version = next((version for version in versions if version.source == source), None)
    version = version or run.client.create_model_version(name, source, run.run_id, model_id=model_id)
    if alias:
        run.client.set_registered_model_alias(name, alias, version.version)
