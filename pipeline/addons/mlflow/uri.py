"""The MLflow server of a run: named by a key, a variable, or a file beside it. Names of models."""

import os
import re
from urllib.parse import urlsplit

from pipeline.addons.datasets.names import printable_name
from pipeline.addons.ops.credentials import show, split_credentials
from pipeline.config.schema import Config
from pipeline.config.values import expand_home
from pipeline.errors import RequestError
from pipeline.record.folder import RunFolder

_HTTP = r"https?://([\w.-]+|\[[\da-fA-F:.]+\])(:\d{1,5})?([/?#]\S*)?"
_DATABASE = r"(postgresql|mysql|mssql|databricks)(\+\w+)?://\S*[^/\s]\S*|databricks"
_SQLITE = r"sqlite(?:\+\w+)?:///(.+)"


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
    if _mlflow_changes(database):
        problem = f"MLflow cannot open {printable_name(database)}"
        why = "because of a ? or % in the path, or because it is not UTF-8"
        remedy = "give another run.dir, name a server with track.uri, or set track.uri=none"
        raise RequestError(f"{problem}, {why}", remedy)
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
    return f"; {' and '.join(names)} not used: a training is a run of its own, in track.experiment"


def sqlite_file(uri: str | None) -> str | None:
    """Return the path of the SQLite database that a URI names, or None."""
    match = re.fullmatch(_SQLITE, uri or "", re.DOTALL)
    return match[1] if match else None


def check_tracking_uri(name: str, uri: str) -> None:
    """Raise RequestError if MLflow cannot open `uri`. name: the key or variable that has it."""
    given = f"{name}={show(uri)}"
    address = split_credentials(uri)[0]
    if database := sqlite_file(address):
        if _mlflow_changes(database) or os.path.isdir(database):
            raise RequestError(f"{given} names no file that MLflow opens", "name one without ? and %")
    elif (
        not re.fullmatch(f"{_HTTP}|{_DATABASE}", address, re.ASCII)
        or re.search(r"\s", uri)
        or not _has_port(address)
    ):
        places = "http://HOST:PORT, https://HOST, sqlite:///FILE, postgresql://… or mysql://…"
        form = "with %20 for a blank and a user and a password before the host"
        raise RequestError(f"{given} is not allowed", f"give {places}, {form}, or set track.uri=none")


def _has_port(address: str) -> bool:
    """Return False if the address has a port that does not exist."""
    try:
        return urlsplit(address).port != 0
    except ValueError:
        return not address.startswith("http")  # a database's address may have the name of a socket


def _mlflow_changes(path: str) -> bool:
    """Return True if MLflow opens another SQLite file or none."""
    # it decodes %41, a ? ends the path, and names must be UTF-8
    return re.search(r"\?|%[0-9a-fA-F]{2}|[\ud800-\udfff]", path) is not None


def check_model_name(name: str) -> str:
    """Return a name that MLflow takes for a model. Raises ValueError for any other."""
    if len(name) > 250 or re.search(r"@(latest|v\d+)$", name, re.IGNORECASE):
        raise ValueError("not a name for MLflow")
    return name
