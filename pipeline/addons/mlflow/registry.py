"""A logged model, read from MLflow.

Promise: nothing in it runs. So mlflow's own loaders are not used: they unpickle and import what a
model contains. The configuration and the classes come from the MLmodel file, and the weights from
the exported program as plain bytes.
"""

import errno
import os
import resource
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from pipeline.addons.mlflow import connection
from pipeline.addons.mlflow.run import file_sizes
from pipeline.addons.mlflow.uri import uri_in_environment
from pipeline.config.credentials import without_password
from pipeline.config.load import NoAliases, from_yaml
from pipeline.errors import RequestError, RunError, StorageError, TemporaryError

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
        raise RequestError(
            f"{uri} names a model in MLflow, and there is no {database} here: set MLFLOW_TRACKING_URI"
        )
    tracking_uri, credentials = connection.split_uri(named or f"sqlite:///{database}")
    connection.protect_credentials()
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
        schemes = connection.SCHEMES if named else connection.LOCAL_SCHEMES
        if urlsplit(artifacts).scheme not in schemes:
            allowed = (
                ", ".join(filter(None, schemes)) if named else f"files on this machine (with {database})"
            )
            raise RequestError(
                f"{uri} is at {without_password(artifacts)}: models are read only from {allowed}"
            )
        connection.check_artifact_host(artifacts, tracking_uri)
        with tempfile.TemporaryDirectory() as scratch:
            mlmodel = _fetch_file(artifacts, "MLmodel", _MAX_MLMODEL_BYTES, Path(scratch))
            contents = _parse_mlmodel(uri, mlmodel.read_text(encoding="utf-8"))
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
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
    from mlflow.utils.file_utils import local_file_uri_to_path

    path = scratch / Path(name).name
    try:
        if urlsplit(artifacts).scheme in connection.LOCAL_SCHEMES:
            path = Path(local_file_uri_to_path(artifacts)) / name
        else:
            folder = f"{artifacts.rstrip('/')}/{name}".rpartition("/")[0]
            if file_sizes(folder, None).get(path.name, limit + 1) <= limit:
                # a server may send more than it lists
                with _file_size_limit(limit + 1):
                    get_artifact_repository(folder)._download_file(path.name, str(path))
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_size <= limit:
            return path
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EFBIG):
            raise
    raise RequestError(
        f"the model at {without_password(artifacts)} has no {name} that this pipeline wrote (a file of at most"
        f" {limit:,} bytes)",
        "give its run's folder, or a checkpoint, instead",
    )


class _Loader(NoAliases, yaml.SafeLoader):
    """The loader of an MLmodel file, in which mlflow writes no aliases."""


def _parse_mlmodel(uri: str, text: str) -> dict[str, Any]:
    """Return the configuration and the classes that an MLmodel file states."""
    try:
        mlmodel = yaml.load(text, _Loader)
        flavors, metadata = mlmodel["flavors"], mlmodel["metadata"]
        code = ", ".join(name for name, flavor in flavors.items() if flavor.get("code"))
        config, classes = metadata["config"], metadata["classes"]
        is_valid = isinstance(config, str) and isinstance(classes, list)
        if not is_valid or not all(isinstance(name, str) for name in classes):
            raise TypeError("no configuration, or no classes")
    except (yaml.YAMLError, RecursionError, ValueError, KeyError, TypeError, AttributeError):
        raise RequestError(
            f"{uri} is not a model that this pipeline logged: its MLmodel is damaged or names no classes"
        ) from None
    if code:
        raise RequestError(
            f"{uri} brings code of its own ({code}), which is never run: log the model without code"
        )
    return {"config": config, "classes": classes}


def _read_weights(uri: str, contents: dict[str, Any], artifacts: str, scratch: Path) -> dict[str, Any]:
    """Return the weights of the model that the configuration names, and no others."""
    from pipeline.addons.mlflow.exported_program import MAX_BYTES, read_weights
    from pipeline.model.architectures import meta_model

    options = from_yaml(contents["config"], uri).model
    expected = meta_model(options, len(contents["classes"])).state_dict()
    program = _fetch_file(artifacts, "data/model.pt2", MAX_BYTES, scratch)
    weights = read_weights(program, "model.", expected)  # `ExportedModel` names its model `model`
    return {"model": weights, "average": None}


@contextmanager
def _file_size_limit(limit: int) -> Iterator[None]:
    """Lower the limit on the size of files that this process writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (limit if soft == resource.RLIM_INFINITY else min(soft, limit), hard)
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
