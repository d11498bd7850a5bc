"""Checks that the MLflow server answers and stores files.

Each check returns a line for the user, or raises TemporaryError; RequestError if a SQLite database
cannot be written, or if mlflow is not installed.
"""

import re
import tempfile
import uuid
from pathlib import Path

from pipeline.addons.mlflow.connection import not_installed, request, root_cause
from pipeline.addons.mlflow.uri import ignored_variables, tracking_uri
from pipeline.config.credentials import without_password
from pipeline.config.schema import Config
from pipeline.errors import RequestError, TemporaryError
from pipeline.files import parse_json
from pipeline.record.folder import RunFolder

_CAUSES = "docs/operations.md, 'MLflow', lists causes"


def check_server_answers(config: Config, folder: RunFolder) -> str:
    """Check that the server, if there is one, answers a call that a run makes.

    Its /health would not do: it answers even if the server refuses every other call.
    """
    uri = tracking_uri(config, folder)
    if uri is None or not uri.startswith(("http://", "https://")):
        check_database_is_writable(uri)
        return (
            f"no server: {'track.uri=none' if uri is None else without_password(uri) + ignored_variables()}"
        )
    shown = without_password(uri)
    try:
        answer = request(uri, "api/2.0/mlflow/experiments/search?max_results=1")
        if answer.ok and not answer.is_redirect:
            parse_json(answer.content)
            return f"{shown} answers{ignored_variables()}"
    except ModuleNotFoundError as error:
        raise not_installed(error) from None
    except Exception as error:
        raise TemporaryError(f"no MLflow server answers at {shown} ({root_cause(error)})", _CAUSES) from None
    target = f" and redirects to {without_password(answer.headers['Location'])}" if answer.is_redirect else ""
    raise TemporaryError(f"MLflow at {shown} answers {answer.status_code}{target}", _CAUSES)


def check_database_is_writable(uri: str | None) -> None:
    """Raise RequestError if `uri` names a SQLite file that cannot be written. Creates nothing."""
    match = re.fullmatch(r"sqlite(?:\+\w+)?:///(.+)", uri or "")
    if not match:
        return
    database = Path(match[1])
    try:
        if database.exists():
            with open(database, "r+b"):
                return
        folder = next(parent for parent in database.absolute().parents if parent.exists())
        with tempfile.TemporaryFile(dir=folder):  # root may write anywhere, except on some file systems
            return
    except OSError as error:
        problem = f"MLflow's database {database} cannot be written ({error.strerror})"
        raise RequestError(problem, "name another file with track.uri=sqlite:///FILE") from None


def check_server_stores_files(config: Config, folder: RunFolder) -> str:
    """Check that the server stores a file and returns the same bytes."""
    uri = tracking_uri(config, folder)
    if uri is None or not uri.startswith("http"):
        return "no server"
    content = uuid.uuid4().bytes
    path = f"api/2.0/mlflow-artifacts/artifacts/doctor/{content.hex()}"
    for method, body in (("PUT", content), ("GET", None), ("DELETE", None)):
        try:
            answer = request(uri, path, method, body)
        except Exception as error:
            raise TemporaryError(f"an upload to MLflow failed ({root_cause(error)})", _CAUSES) from None
        if method == "PUT" and answer.status_code in (404, 503):
            return "the server does not store files (--no-serve-artifacts): the run writes to the artifact store itself"
        if not answer.ok:
            raise TemporaryError(f"MLflow answers {answer.status_code} to the {method} of a file", _CAUSES)
        if method == "GET" and answer.content != content:
            raise TemporaryError("MLflow returned other bytes than the file it was sent", _CAUSES)
    return "the server stores a file and returns it"
