"""Checks that the MLflow server answers and stores files.

Each check returns a line for the user, or raises TemporaryError; RequestError if a SQLite database
cannot be written.
"""

import tempfile
import uuid
from pathlib import Path
from typing import Any

from pipeline.addons.mlflow.connection import protect_credentials, root_cause, split_uri
from pipeline.addons.mlflow.uri import ignored_variables, sqlite_file, tracking_uri
from pipeline.addons.ops.credentials import without_password
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
    if uri is None:
        return "no server: track.uri=none"
    shown = without_password(uri)
    if not uri.startswith("http"):
        check_database_is_writable(uri)
        return f"no server: {shown}{ignored_variables()}"
    answer = _ask(uri, "GET", "/api/2.0/mlflow/experiments/search?max_results=1")
    if not answer.ok or answer.is_redirect:
        target = without_password(answer.headers.get("Location", ""))
        more = f" and redirects to {target}" if target else ""
        raise TemporaryError(f"MLflow at {shown} answers {answer.status_code}{more}", _CAUSES)
    try:
        parse_json(answer.content)
    except ValueError as error:
        raise TemporaryError(f"no MLflow server answers at {shown} ({error})", _CAUSES) from None
    return f"{shown} answers{ignored_variables()}"


def check_database_is_writable(uri: str | None) -> None:
    """Raise RequestError if `uri` names a SQLite file that cannot be written. Creates nothing."""
    path = sqlite_file(uri)
    if path is None:
        return
    database = Path(path)
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
    path = f"/api/2.0/mlflow-artifacts/artifacts/doctor/{content.hex()}"
    for method, body in (("PUT", content), ("GET", None), ("DELETE", None)):
        answer = _ask(uri, method, path, body)
        if method == "PUT" and answer.status_code in (404, 503):
            return "the server stores no files (--no-serve-artifacts): the run writes to their store itself"
        if not answer.ok or (method == "GET" and answer.content != content):
            problem = f"MLflow answers {answer.status_code} to the {method} of a file, or with other bytes"
            raise TemporaryError(problem, _CAUSES)
    return "the server stores a file and returns it"


def _ask(uri: str, method: str, endpoint: str, body: bytes | None = None) -> Any:
    """Return the answer to a request with mlflow's credentials and TLS. Raises TemporaryError."""
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    address, credentials = split_uri(uri)
    protect_credentials()
    server = get_default_host_creds(address)
    if credentials:
        server.username, server.password = credentials.values()
    try:
        settings = {"max_retries": 0, "timeout": 10, "raise_on_status": False}
        return http_request(server, endpoint, method, data=body, **settings)
    except Exception as error:
        problem = f"no MLflow server answers at {without_password(uri)} ({root_cause(error)})"
        raise TemporaryError(problem, _CAUSES) from None
