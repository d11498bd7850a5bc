"""A logged model, read from MLflow.

Promise: nothing in it runs. So mlflow's own loaders are not used: they unpickle and import what a
model contains. The configuration and the classes come from the MLmodel file, and the weights from
the exported program as plain bytes.
"""

import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from pipeline.addons.mlflow import connection
from pipeline.addons.mlflow.run import file_sizes
from pipeline.addons.mlflow.uri import uri_in_environment
from pipeline.addons.ops.credentials import without_password
from pipeline.config.load import NoAliases, from_yaml
from pipeline.errors import RequestError, RunError, StorageError, TemporaryError

_MAX_MLMODEL_BYTES = 4 << 20
_MAX_BYTES = 4 << 30
"""More than torchvision's largest model needs: 645 million weights of 4 bytes, and the program."""
_SERVER_ERRORS = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "IO_ERROR")


def fetch_model(uri: str) -> dict[str, Any]:
    """Return a logged model as a checkpoint holds one: config, classes, model (its weights).

    uri: models:/NAME@ALIAS, models:/NAME/VERSION or models:/m-… . Raises RequestError if it is not
    there or was not logged by this pipeline, StorageError if it is damaged, TemporaryError if the
    server cannot be reached.
    """
    database = Path("runs/mlflow.db")
    named = uri_in_environment()
    if not named and not database.exists():
        raise RequestError(f"{uri} is in MLflow, and there is no {database} here: set MLFLOW_TRACKING_URI")
    tracking_uri = connection.configure(named or f"sqlite:///{database}", connection.FILE_TIMEOUT_S)
    try:
        import mlflow
        from mlflow.store.artifact.models_artifact_repo import ModelsArtifactRepository

        mlflow.set_tracking_uri(tracking_uri)
        artifacts = ModelsArtifactRepository.get_underlying_uri(uri)
        if not artifacts:
            raise ValueError("it answers, but not as MLflow does")
        schemes = connection.SCHEMES if named else connection.LOCAL_SCHEMES
        if urlsplit(artifacts).scheme not in schemes:
            shown = without_password(artifacts)
            allowed = "this machine or a store" if named else f"this machine, as {database} is"
            raise RequestError(f"{uri} is at {shown}: models are read only from {allowed}")
        connection.check_artifact_host(artifacts, tracking_uri)
        with tempfile.TemporaryDirectory() as scratch:
            return _read_model(uri, artifacts, Path(scratch))
    except RunError:
        raise
    except Exception as error:  # mlflow passes on errors of the network, of a database, of a file system
        kind: type[RunError] = TemporaryError if tracking_uri.startswith("http") else StorageError
        if getattr(error, "error_code", "INTERNAL_ERROR") not in _SERVER_ERRORS:
            kind = RequestError
        server = without_password(tracking_uri)
        raise kind(f"{uri} cannot be read from {server}: {connection.root_cause(error)}") from None


class _Loader(NoAliases, yaml.SafeLoader):
    """The loader of an MLmodel file, in which mlflow writes no aliases."""


def _read_model(uri: str, artifacts: str, scratch: Path) -> dict[str, Any]:
    """Return the configuration and the classes that its MLmodel states, and the weights of that."""
    from pipeline.addons.mlflow.exported_program import read_weights
    from pipeline.addons.models.functions import meta_model

    text = _download(artifacts, "MLmodel", _MAX_MLMODEL_BYTES, scratch).read_text(encoding="utf-8")
    try:
        mlmodel = yaml.load(text, _Loader)
        has_code = any(flavor.get("code") for flavor in mlmodel["flavors"].values())
        config, classes = mlmodel["metadata"]["config"], mlmodel["metadata"]["classes"]
        several_labels = mlmodel["metadata"].get("several_labels") is True
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in [config, *classes]):
            raise TypeError
    except (yaml.YAMLError, RecursionError, ValueError, KeyError, TypeError, AttributeError):
        problem = f"{uri} is not a model that this pipeline logged"
        raise RequestError(f"{problem}: its MLmodel is damaged") from None
    if has_code:
        raise RequestError(f"{uri} brings code of its own, which is never run: log the model without code")
    expected = meta_model(from_yaml(config, uri).model, len(classes)).state_dict()
    program = _download(artifacts, "data/model.pt2", _MAX_BYTES, scratch)
    weights = read_weights(program, "model.", expected)  # `ExportedModel` names its model `model`
    parts = {"config": config, "classes": classes, "model": weights, "average": None}
    return parts | {"several_labels": several_labels}


def _download(artifacts: str, name: str, limit: int, scratch: Path) -> Path:
    """Return a local copy of a model's file of at most `limit` bytes."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    folder, _, file = f"{artifacts.rstrip('/')}/{name}".rpartition("/")
    if file_sizes(folder, None).get(file, limit + 1) > limit:
        problem = f"the model at {without_password(artifacts)} has no {name} that this pipeline wrote"
        raise RequestError(problem, "give its run's folder, or a checkpoint, instead")
    # this file alone: mlflow's download_artifacts would write whatever a server lists
    get_artifact_repository(folder)._download_file(file, str(scratch / file))
    return scratch / file
