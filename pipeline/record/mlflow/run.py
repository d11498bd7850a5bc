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
from pipeline.record.mlflow.connection import check_artifact_host

if TYPE_CHECKING:
    from mlflow import MlflowClient

_RUN_TAG = "pipeline.run"
# the UI then opens the experiment on its view of training runs, not of traces
_EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}


@dataclass(frozen=True)
class MlflowRun:
    """A run on a server, and the client that reaches it."""

    client: "MlflowClient"
    run_id: str
    experiment_id: str
    last_steps: dict[str, int]
    """The last step of each metric that the server has."""


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
    last_steps = {metric.key: metric.step for metric in run.data.to_proto().metrics}
    return MlflowRun(client, run.info.run_id, experiment_id, last_steps)


def _experiment_id(client: "MlflowClient", name: str, artifacts: str | None) -> str:
    from mlflow.exceptions import MlflowException

    failure: Exception | None = None
    for _ in range(2):
        experiment = client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        try:
            return str(client.create_experiment(name, artifacts, _EXPERIMENT_TAGS))
        except MlflowException as error:  # another run may just have created it, so look again
            failure = error
    raise TemporaryError(f"experiment {name} can be neither found nor created: {failure}")


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
