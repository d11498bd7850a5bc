"""A logged model, read from MLflow.

Promise: nothing in it runs. So mlflow's own loaders are not used: they unpickle and import what a
model contains. The configuration and the classes come from the MLmodel file, and the weights from
the exported program as plain bytes.
"""

import os
import stat
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from pipeline.config.credentials import without_password
from pipeline.config.load import from_yaml
from pipeline.errors import RequestError, RunError, StorageError, TemporaryError
from pipeline.record.mlflow import connection
from pipeline.record.sender import uri_in_environment

_SCHEMES = (*connection.LOCAL_SCHEMES, "mlflow-artifacts", "s3", "gs", "wasbs", "abfss")
"""Places of a model's files that are allowed.

With other schemes mlflow connects to hosts that the registry names, or uses other keys.
"""
_MAX_MLMODEL_BYTES = 4 << 20
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
        raise RequestError(f"{uri} names a model in MLflow, and there is no {database} here: set MLFLOW_TRACKING_URI")
    tracking_uri, credentials = connection.split_uri(named or f"sqlite:///{database}")
    os.environ |= credentials | {"MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false"}
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # mlflow's default of 7 takes minutes
    os.environ.setdefault(connection.TIMEOUT_VARIABLE, str(connection.FILE_TIMEOUT_S))
    try:
        import mlflow
        from mlflow.store.artifact.models_artifact_repo import ModelsArtifactRepository

        mlflow.set_tracking_uri(tracking_uri)
        artifacts = ModelsArtifactRepository.get_underlying_uri(uri)
        if not artifacts:
            raise ValueError("it answers, but not as MLflow does")
        connection.check_artifact_host(artifacts, tracking_uri)
        if urlsplit(artifacts).scheme not in (_SCHEMES if named else connection.LOCAL_SCHEMES):
            allowed = ", ".join(filter(None, _SCHEMES)) if named else f"files on this machine (with {database})"
            raise RequestError(f"{uri} is at {without_password(artifacts)}: models are read only from {allowed}")
        with tempfile.TemporaryDirectory() as scratch:
            mlmodel = _fetch_file(artifacts, "MLmodel", _MAX_MLMODEL_BYTES, Path(scratch))
            contents = _parse_mlmodel(uri, mlmodel.read_text())
            return contents | _read_weights(uri, contents, artifacts, Path(scratch))
    except RunError:
        raise
    except ModuleNotFoundError as error:
        raise connection.not_installed(error) from None
    except Exception as error:  # mlflow passes on errors of the network, of a database, of a file system
        kind: type[RunError] = TemporaryError if tracking_uri.startswith("http") else StorageError
        if getattr(error, "error_code", "INTERNAL_ERROR") not in _SERVER_ERRORS:
            kind = RequestError
        server = without_password(tracking_uri)
        raise kind(f"{uri} cannot be read from {server}: {connection.root_cause(error)}") from None


def _fetch_file(artifacts: str, name: str, limit: int, scratch: Path) -> Path:
    """Return the path of a model's file of at most `limit` bytes; a remote one is downloaded."""
    import mlflow
    from mlflow.utils.file_utils import local_file_uri_to_path

    missing = RequestError(
        f"the model at {without_password(artifacts)} has no {name} that this pipeline wrote (a file of at most"
        f" {limit:,} bytes): log it again with 'pipeline sync RUN_DIR'"
    )
    if urlsplit(artifacts).scheme in connection.LOCAL_SCHEMES:
        path = Path(local_file_uri_to_path(artifacts)) / name
    else:
        folder, _, filename = f"{artifacts.rstrip('/')}/{name}".rpartition("/")
        entries = mlflow.artifacts.list_artifacts(artifact_uri=folder)
        sizes = {Path(entry.path).name: entry.file_size for entry in entries if not entry.is_dir}
        if filename not in sizes or (sizes[filename] or 0) > limit:
            raise missing
        path = Path(mlflow.artifacts.download_artifacts(artifact_uri=f"{folder}/{filename}", dst_path=str(scratch)))
    try:
        status = path.lstat()
    except OSError:
        raise missing from None
    if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
        raise missing
    return path


def _parse_mlmodel(uri: str, text: str) -> dict[str, Any]:
    """Return the configuration and the classes that an MLmodel file states."""
    try:
        mlmodel = yaml.safe_load(text)
        flavors, metadata = mlmodel["flavors"], mlmodel["metadata"]
        code = ", ".join(name for name, flavor in flavors.items() if flavor.get("code"))
        config, classes = metadata["config"], metadata["classes"]
        is_valid = isinstance(config, str) and isinstance(classes, list)
        if not is_valid or not all(isinstance(name, str) for name in classes):
            raise TypeError("no configuration, or no classes")
    except (yaml.YAMLError, RecursionError, ValueError, KeyError, TypeError, AttributeError):
        raise RequestError(f"{uri} is not a model that this pipeline logged: its MLmodel names no classes") from None
    if code:
        raise RequestError(f"{uri} brings code of its own ({code}), which is never run: log the model without code")
    return {"config": config, "classes": classes}


def _read_weights(uri: str, contents: dict[str, Any], artifacts: str, scratch: Path) -> dict[str, Any]:
    """Return the weights of the model that the configuration names, and no others."""
    from pipeline.model.architectures import meta_model
    from pipeline.record.mlflow.exported_program import MAX_BYTES, read_weights

    options = from_yaml(contents["config"], uri).model
    if not options.arch.isidentifier():
        raise RequestError(f"{uri} has model.arch={options.arch}: models from MLflow must be torchvision models")
    expected = meta_model(options, len(contents["classes"])).state_dict()
    program = _fetch_file(artifacts, "data/model.pt2", MAX_BYTES, scratch)
    return {
        "model": read_weights(program, "model.", expected),
        "average": None,
    }  # `ExportedModel` names its model `model`
