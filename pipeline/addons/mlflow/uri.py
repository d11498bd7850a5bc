"""The MLflow server of a run: named by a key, by a variable, or a database beside the run."""

import os

from pipeline.config.load import check_tracking_uri, mlflow_changes
from pipeline.config.schema import Config, expand_home
from pipeline.data.access import printable_name
from pipeline.errors import RequestError
from pipeline.record.folder import RunFolder


def tracking_uri(config: Config, folder: RunFolder) -> str | None:
    """Return the URI of the MLflow server that gets the run, or None for the journal only.

    Raises RequestError if MLflow cannot open it, or a database beside the folder.
    """
    if config.track.uri == "none":
        return None
    if config.track.uri != "auto":
        check_tracking_uri("track.uri", config.track.uri)
        return config.track.uri
    if uri := uri_in_environment():
        return uri
    database = str(folder.path.absolute().parent / "mlflow.db")
    if mlflow_changes(database):
        raise RequestError(
            f"MLflow cannot open {printable_name(database)}, because of a ? or % in the path, or because it is not"
            " UTF-8",
            "give another run.dir, name a server with track.uri, or set track.uri=none",
        )
    return f"sqlite:///{database}"


def uri_in_environment() -> str | None:
    """Return MLFLOW_TRACKING_URI, or None. Raises RequestError if MLflow cannot open it."""
    uri = expand_home(os.environ.get("MLFLOW_TRACKING_URI", ""))
    if uri:
        check_tracking_uri("MLFLOW_TRACKING_URI", uri)
    return uri or None


def ignored_variables() -> str:
    """Return "" or, for the end of a line, which variables of MLflow a training does not use."""
    names = [name for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID") if os.environ.get(name)]
    if not names:
        return ""
    return f"; {' and '.join(names)} not used: a training is a run of its own, in the experiment track.experiment"
