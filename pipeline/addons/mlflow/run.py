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
from typing import Any

from pipeline.addons.datasets.names import printable_name
from pipeline.addons.mlflow.connection import check_artifact_host
from pipeline.addons.ops.credentials import without_password
from pipeline.config.schema import Config
from pipeline.errors import RequestError, TemporaryError
from pipeline.record.folder import RunFolder
from pipeline.record.journal import read

_RUN_TAG = "pipeline.run"
# the UI then opens the experiment on its view of training runs, not of traces
_EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}


@dataclass(frozen=True)
class MlflowRun:
    """A run on a server, the client that reaches it, and where it is here."""

    folder: RunFolder
    config: Config
    client: Any
    run_id: str
    experiment_id: str
    artifact_uri: str
    last_steps: dict[str, int]  # the last step of each metric that the server had when the run was opened


def open_run(folder: RunFolder, config: Config, uri: str) -> MlflowRun:
    """Find the run on the server, or create it.

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
    run = find_run(client, created["run"])
    if run is None:
        # beside a local database; a server has a location of its own
        artifacts = (database.parent / "mlartifacts").as_uri() if database else None
        experiment_id = _experiment_id(client, config.track.experiment or config.recipe, artifacts)
        tags, name = {_RUN_TAG: created["run"]}, printable_name(folder.path.absolute().name)
        run = client.create_run(experiment_id, created["time"], tags, name)
    info = run.info
    if not info.run_id:
        raise TemporaryError(f"{without_password(uri)} answers, but not as MLflow does")
    check_artifact_host(info.artifact_uri, uri)
    last_steps = {metric.key: metric.step for metric in run.data.to_proto().metrics}
    return MlflowRun(folder, config, client, info.run_id, info.experiment_id, info.artifact_uri, last_steps)


def find_run(client: Any, name: str) -> Any | None:
    """Return the run whose journal has the id `name`, in any experiment, or None."""
    token = None
    while True:
        page = client.search_experiments(page_token=token)
        experiments = [experiment.experiment_id for experiment in page]
        if found := client.search_runs(experiments, f"tags.`{_RUN_TAG}` = '{name}'", max_results=1):
            return found[0]
        token = page.token
        if not token:
            return None


def file_sizes(artifact_uri: str, folder: str | None) -> dict[str, int]:
    """Return the sizes of the files in a folder of an artifact store, by name."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    found = get_artifact_repository(artifact_uri).list_artifacts(folder)
    return {Path(file.path).name: file.file_size or 0 for file in found if not file.is_dir}


def _experiment_id(client: Any, name: str, artifacts: str | None) -> str:
    """Return the id of an experiment, which is created unless it exists."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return str(client.create_experiment(name, artifacts, _EXPERIMENT_TAGS))
        except MlflowException:
            experiment = client.get_experiment_by_name(name)  # another run may just have created it
            if experiment is None:
                raise
    if experiment.lifecycle_stage == "deleted":
        restore = f"mlflow experiments restore --experiment-id {experiment.experiment_id}"
        remedy = f"restore it with '{restore}', or set track.experiment=NAME"
        raise RequestError(f"the experiment {name} is deleted in MLflow", remedy)
    return str(experiment.experiment_id)


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
