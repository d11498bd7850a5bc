"""The best model of a finished run: exported from its checkpoint, logged and registered."""

import tempfile
from pathlib import Path
from typing import Any

from pipeline.addons.mlflow.connection import FILE_TIMEOUT_S, check_artifact_host, log, request_timeout, root_cause
from pipeline.addons.mlflow.run import MlflowRun, file_sizes
from pipeline.config.schema import Config
from pipeline.config.trust import check_is_trusted
from pipeline.errors import TemporaryError
from pipeline.record.folder import RunFolder
from pipeline.record.journal import read

_SLOWEST_BYTES_PER_S = 1 << 20
"""The time limit of a file grows with its size: a second for each MiB."""
_STEP_TAG = "pipeline.step"


def send_model(run: MlflowRun, folder: RunFolder, config: Config, checkpoint: Path, step: int) -> bool:
    """Send the model of a checkpoint, unless the server has it, and return True.

    Returns False and logs the reason if it cannot be exported: the run is complete without it.
    Raises RequestError if its function is not trusted. Files that the server has are not sent
    again, so that a break costs one file.
    """
    found = None
    for model in _models(run):
        if model.tags[_STEP_TAG] == str(step):
            found = model
        elif not _is_ready(model):
            run.client.delete_logged_model(model.model_id)
    if found and _is_ready(found):
        return True
    check_is_trusted(config.model.arch)

    from pipeline.record.checkpoint import decode
    from pipeline.record.checkpoint_files import read_verified

    contents = decode(read_verified(checkpoint), checkpoint)
    with tempfile.TemporaryDirectory() as scratch:
        exported = Path(scratch) / "model"
        try:
            description = export_model(contents, config, exported)
        except (OSError, MemoryError):
            raise  # what is full now may have room later
        except Exception as error:
            log(f"{checkpoint.name} is not logged as a model: {root_cause(error)}")
            return False
        description.run_id = run.run_id
        # one that was found is unfinished: a sender was killed while it sent it
        found = found or run.client.create_logged_model(run.experiment_id, "model", run.run_id, {_STEP_TAG: str(step)})
        description.model_id, description.artifact_path = found.model_id, found.artifact_location
        description.save(exported / "MLmodel")
        _upload(exported, found.artifact_location)
    _finish(run, folder, found.model_id, step)
    return True


def _models(run: MlflowRun) -> list[Any]:
    """Return the models that this pipeline has logged: another program may log some, too."""
    found = run.client.search_logged_models([run.experiment_id], f"source_run_id = '{run.run_id}'")
    return [model for model in found if _STEP_TAG in model.tags]


def _is_ready(model: Any) -> bool:
    from mlflow.entities import LoggedModelStatus

    return bool(model.status == LoggedModelStatus.READY)


def _upload(folder: Path, uri: str) -> None:
    """Send the files of a folder that the artifact store lacks; last, the one about all others."""
    import mlflow
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    check_artifact_host(uri, mlflow.get_tracking_uri())
    repository = get_artifact_repository(uri)
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: (path.name == "MLmodel", path)):
        parent = path.parent.relative_to(folder)
        place = None if parent == Path() else str(parent)
        size = path.stat().st_size
        if path.name == "MLmodel" or file_sizes(uri, place).get(path.name) != size:
            with request_timeout(FILE_TIMEOUT_S + size // _SLOWEST_BYTES_PER_S):
                repository.log_artifact(str(path), place)


def _finish(run: MlflowRun, folder: RunFolder, model_id: str, step: int) -> None:
    """Give a model its metrics, name it as the run's output, and mark it as complete."""
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus, Metric

    metrics = {
        key: Metric(key, value, row["time"], step, model_id=model_id)
        for row, _ in read(folder.journal)
        if row.get("step") == step
        for key, value in row.get("metrics", {}).items()
        if key.startswith("val/")
    }
    run.client.log_batch(run.run_id, metrics=[*metrics.values()])  # the run has them already: these name the model
    outputs = run.client.get_run(run.run_id).outputs
    if model_id not in [output.model_id for output in (outputs.model_outputs if outputs else [])]:
        run.client.log_outputs(run.run_id, [LoggedModelOutput(model_id, step)])
    run.client.finalize_logged_model(model_id, LoggedModelStatus.READY)


def export_model(contents: dict[str, Any], config: Config, destination: Path) -> Any:
    """Export a checkpoint's model to the folder `destination`, and return its MLmodel.

    The exported model takes pixels, [B, 3, H, W] float32 of 0..255, and returns probabilities, [B,
    classes].
    """
    import numpy as np
    import torch

    import mlflow.pytorch
    from mlflow.models import Model, infer_signature
    from pipeline.addons.models.exported_model import ExportedModel
    from pipeline.data.augment import evaluation_geometry
    from pipeline.record.checkpoint import eval_model

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


def register_model(run: MlflowRun, target: str, step: int) -> None:
    """Register the model of a step, unless it is, and set its alias. target: NAME or NAME@ALIAS.

    Raises TemporaryError if the server lacks the model.
    """
    from mlflow.exceptions import MlflowException

    model = next((model for model in _models(run) if _is_ready(model) and model.tags[_STEP_TAG] == str(step)), None)
    if model is None:
        raise TemporaryError(f"the server lacks the model of step {step}")
    source = f"models:/{model.model_id}"
    name, _, alias = target.partition("@")
    try:
        run.client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    versions = run.client.search_model_versions(f"name = '{name}' and run_id = '{run.run_id}'")
    version = next((version for version in versions if version.source == source), None)
    version = version or run.client.create_model_version(name, source, run.run_id, model_id=model.model_id)
    if alias:
        run.client.set_registered_model_alias(name, alias, version.version)
