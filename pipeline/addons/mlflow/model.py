"""The best model of a finished run: exported from its checkpoint, logged and registered."""

import contextlib
import tempfile
from pathlib import Path
from typing import Any

from pipeline.addons.mlflow import connection
from pipeline.addons.mlflow.run import MlflowRun
from pipeline.addons.models.trust import check_is_trusted
from pipeline.config.schema import Config
from pipeline.record.journal import last_event, read

_SLOWEST_BYTES_PER_S = 1 << 20  # the time limit of an upload grows with its size: a second for each MiB
_STEP_TAG = "pipeline.step"


def send_model(run: MlflowRun) -> None:
    """Send the model of a finished run's result, and register it, unless the server has both.

    If it cannot be exported, the reason is logged: the run is complete without it. Raises
    RequestError if its function is not trusted.
    """
    from mlflow.entities import LoggedModelStatus
    from mlflow.exceptions import MlflowException

    end = last_event(run.folder.journal)
    best, model_id = end.get("best"), None
    if end.get("status") != "FINISHED" or not best:  # also if a start has continued the run since
        return
    for model in run.client.search_logged_models([run.experiment_id], f"source_run_id = '{run.run_id}'"):
        if _STEP_TAG in model.tags and model.status != LoggedModelStatus.READY:
            with contextlib.suppress(MlflowException):  # who may edit models may not delete them
                run.client.delete_logged_model(model.model_id)  # its sender was killed
        elif model.tags.get(_STEP_TAG) == str(best["step"]):
            model_id = model.model_id
    if model_id is None:
        check_is_trusted(run.config.model.arch)
        model_id = _upload(run, run.folder.checkpoints / best["file"], best["step"])
    if model_id and run.config.track.register_:
        _register(run, run.config.track.register_, model_id)


def _upload(run: MlflowRun, checkpoint: Path, step: int) -> str | None:
    """Return the id of the model once the server has it, or None if it cannot be exported."""
    import mlflow
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus, Metric
    from pipeline.record.checkpoint_contents import decode
    from pipeline.record.checkpoint_files import read_verified

    contents = decode(read_verified(checkpoint), checkpoint)
    with tempfile.TemporaryDirectory() as scratch:
        exported = Path(scratch) / "model"
        try:
            description = export_model(contents, run.config, exported)
        except (OSError, MemoryError):
            raise  # what is full now may have room later
        except Exception as error:
            connection.log(f"{checkpoint.name} is not logged as a model: {connection.root_cause(error)}")
            return None
        tags = {_STEP_TAG: str(step)}
        model = run.client.create_logged_model(run.experiment_id, "model", run.run_id, tags)
        connection.check_artifact_host(model.artifact_location, mlflow.get_tracking_uri())
        description.run_id, description.model_id = run.run_id, model.model_id
        description.artifact_path = model.artifact_location
        description.save(exported / "MLmodel")
        size = sum(path.stat().st_size for path in exported.rglob("*"))
        connection.set_timeout(connection.FILE_TIMEOUT_S + size // _SLOWEST_BYTES_PER_S)
        run.client.log_model_artifacts(model.model_id, str(exported))
    metrics = {
        key: Metric(key, value, row["time"], step, model_id=model.model_id)
        for row, _ in read(run.folder.journal)
        if row.get("step") == step
        for key, value in row.get("metrics", {}).items()
        if key.startswith("val/")
    }
    # the run has these metrics already: they are given to the model
    run.client.log_batch(run.run_id, metrics=[*metrics.values()])
    run.client.log_outputs(run.run_id, [LoggedModelOutput(model.model_id, step)])
    run.client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
    return str(model.model_id)


def export_model(contents: dict[str, Any], config: Config, destination: Path) -> Any:
    """Export a checkpoint's model to the folder `destination`, and return its MLmodel.

    The exported model takes decoded pictures of one size, any size, [B, H, W, 3] uint8 in RGB, and
    returns probabilities, [B, classes].
    """
    import numpy as np
    import torch

    import mlflow.pytorch
    from mlflow.models import Model, ModelSignature
    from mlflow.types import Schema, TensorSpec
    from pipeline.addons.models.eval_batches import evaluation_geometry
    from pipeline.addons.models.picture import PictureModel
    from pipeline.addons.models.trained import eval_model

    # in train mode the export would keep dropout and update batch norm's statistics
    geometry = evaluation_geometry(config.evaluate, config.augment)
    several = {"several_labels": True} if contents.get("several_labels") else {}
    served = PictureModel(eval_model(contents, config.model), geometry, config.model, bool(several)).eval()
    example = np.zeros((2, 4, 6, 3), np.uint8)  # a batch of one would fix the batch size
    inputs = TensorSpec(example.dtype, (-1, -1, -1, 3))
    outputs = TensorSpec(np.dtype(np.float32), (-1, len(contents["classes"])))
    # the configuration says how to preprocess images as validation does
    description = Model(metadata={"config": contents["config"], "classes": contents["classes"], **several})
    mlflow.pytorch.save_model(
        served, str(destination), mlflow_model=description,
        signature=ModelSignature(Schema([inputs]), Schema([outputs])), input_example=example,
        serialization_format="pt2",  # never a pickle, whatever the server's default is
        pip_requirements=[f"torch=={torch.__version__.split('+')[0]}", "numpy"],
    )  # fmt: skip
    return description


def _register(run: MlflowRun, target: str, model_id: str) -> None:
    """Register a model, unless it is, and set its alias. target: NAME or NAME@ALIAS."""
    from mlflow.exceptions import MlflowException

    source = f"models:/{model_id}"
    name, _, alias = target.partition("@")
    try:
        run.client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    versions = run.client.search_model_versions(f"name = '{name}' and run_id = '{run.run_id}'")
    version = next((version for version in versions if version.source == source), None)
    version = version or run.client.create_model_version(name, source, run.run_id, model_id=model_id)
    if alias:
        run.client.set_registered_model_alias(name, alias, version.version)
