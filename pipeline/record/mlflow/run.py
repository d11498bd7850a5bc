"""One run on an MLflow server: found by a tag, or created.

Promise: one MLflow run per training, across restarts and servers. The tag `pipeline.run` holds the
id in the first row of the journal, and a run with that tag is searched for before one is created.

MLflow creates the tables of a new database one by one, in seconds, and cannot open a database whose
creation was killed. So a local database is created under a temporary name.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.credentials import without_password
from pipeline.config.load import flatten
from pipeline.config.schema import Config
from pipeline.errors import RequestError, TemporaryError
from pipeline.record.folder import RunFolder
from pipeline.record.journal import read
from pipeline.record.mlflow.connection import check_artifact_host, log, root_cause

if TYPE_CHECKING:
    from mlflow import MlflowClient

_RUN_TAG = "pipeline.run"
_PARENT, _PARENT_TAG = "mlflow.parentRunId", "pipeline.parent"
# the UI then opens the experiment on its view of training runs, not of traces
_EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}


@dataclass(frozen=True)
class MlflowRun:
    """A run on a server, and the client that reaches it."""

    client: "MlflowClient"
    run_id: str
    experiment_id: str
    artifact_uri: str
    last_steps: dict[str, int]
    """The last step of each metric that the server has."""
    has_logged_models: bool
    """The server keeps models by themselves. Those of MLflow 2 keep them as files of a run."""


def open_run(folder: RunFolder, config: Config, uri: str) -> MlflowRun:
    """Find the run on the server, or create it, and send its configuration.

    uri: without a password. Raises RequestError if the folder has no journal or a password would be
    sent elsewhere, TemporaryError if the server does not answer as MLflow does, and whatever mlflow
    raises.
    """
    from mlflow import MlflowClient

    created = next((row for row, _ in read(folder.journal) if "run" in row), None)
    if created is None:
        raise RequestError(f"{folder.path} has no journal.jsonl: there is nothing to send")
    database = Path(uri.removeprefix("sqlite:///")).absolute() if uri.startswith("sqlite:///") else None
    if database and not database.exists():
        _create_database(database, created["run"])
    client = MlflowClient(uri)
    # beside a local database; a server has a location of its own
    artifacts = (database.parent / "mlartifacts").as_uri() if database else None
    experiment_id = _experiment_id(client, config.track.experiment or config.recipe, artifacts)
    found = client.search_runs([experiment_id], f"tags.`{_RUN_TAG}` = '{created['run']}'", max_results=1)
    tags, name = {_RUN_TAG: created["run"]}, folder.path.absolute().name
    run = found[0] if found else client.create_run(experiment_id, created["time"], tags, name)
    if not run.info.run_id:
        raise TemporaryError(f"{without_password(uri)} answers, but not as MLflow does")
    check_artifact_host(run.info.artifact_uri, uri)
    _send_config(client, run, config)
    if config.track.parent and _PARENT not in run.data.tags:
        client.set_tag(run.info.run_id, _PARENT, _parent_id(client, experiment_id, config.track.parent))
    last_steps = {metric.key: metric.step for metric in run.data.to_proto().metrics}
    return MlflowRun(
        client, run.info.run_id, experiment_id, run.info.artifact_uri, last_steps,
        _has_logged_models(client, experiment_id),
    )  # fmt: skip


def find_run(client: "MlflowClient", name: str) -> Any | None:
    """Return the run whose journal has the id `name`, in any experiment, or None."""
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return next(iter(client.search_runs(experiments, f"tags.`{_RUN_TAG}` = '{name}'", max_results=1)), None)


def file_sizes(artifact_uri: str, folder: str | None) -> dict[str, int]:
    """Return the sizes of the files in a folder of an artifact store, by name.

    `MlflowClient.list_artifacts` also asks for logged models, which a server of MLflow 2 lacks.
    """
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    found = get_artifact_repository(artifact_uri).list_artifacts(folder)
    return {Path(file.path).name: file.file_size or 0 for file in found if not file.is_dir}


def _has_logged_models(client: "MlflowClient", experiment_id: str) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        client.search_logged_models([experiment_id], max_results=1)
    except MlflowException as error:
        if error.error_code != "ENDPOINT_NOT_FOUND":
            raise
        log("this server has no logged models, which MLflow 3.0 added: the model is sent as files of the run")
        return False
    return True


def _experiment_id(client: "MlflowClient", name: str, artifacts: str | None) -> str:
    from mlflow.exceptions import MlflowException

    failure: Exception = TemporaryError("no answer")
    for _ in range(2):
        experiment = client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        try:
            return str(client.create_experiment(name, artifacts, _EXPERIMENT_TAGS))
        except MlflowException as error:  # another run may just have created it, so look again
            failure = error
    raise TemporaryError(f"experiment {name} can be neither found nor created: {root_cause(failure)}")


def _parent_id(client: "MlflowClient", experiment_id: str, name: str) -> str:
    """Return the id of the run that groups others under `name`: the oldest, or a new one."""

    def oldest() -> Any | None:
        query = f"tags.`{_PARENT_TAG}` = '{name}'"
        return next(iter(client.search_runs([experiment_id], query, order_by=["attributes.start_time"])), None)

    found = oldest()
    if found is None:
        created = client.create_run(experiment_id, tags={_PARENT_TAG: name}, run_name=name)
        client.set_terminated(created.info.run_id)
        found = oldest() or created
        if found.info.run_id != created.info.run_id:  # another child has created it at the same moment
            client.delete_run(created.info.run_id)
    return str(found.info.run_id)


def _send_config(client: "MlflowClient", run: Any, config: Config) -> None:
    """Send each key as a parameter, and as a tag of the same name if its value has changed since.

    MLflow's parameters are immutable: they keep the values of the first start.
    """
    from mlflow.entities import Param, RunTag

    values = {key: str(value) for key, value in flatten(config).items()}
    missing = [Param(key, value) for key, value in values.items() if key not in run.data.params]
    known = values | run.data.params | {key: run.data.tags[key] for key in values if key in run.data.tags}
    changed = [RunTag(key, value) for key, value in values.items() if known[key] != value]
    client.log_batch(run.info.run_id, params=missing, tags=changed)


def _create_database(path: Path, run: str) -> None:
    """Have MLflow create its tables in a temporary file, and link it to `path` if that is free."""
    from mlflow import MlflowClient

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{run}.part")  # a run has one sender, so nobody else writes this file
    part.unlink(missing_ok=True)
    MlflowClient(f"sqlite:///{part}")
    with contextlib.suppress(FileExistsError):
        os.link(part, path)
    part.unlink()
