"""The connection to an MLflow server: credentials, request timeouts, and errors as one line.

A password in the tracking URI reaches mlflow through the environment, never in the URI itself, so
that no message, file or tag of mlflow can contain it.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from pipeline.config.credentials import split_credentials, without_password
from pipeline.errors import RequestError

REQUEST_TIMEOUT_S = 5  # while training runs: the end of a run has time for two such requests
FILE_TIMEOUT_S = 60  # a server may pass a file on to slower storage before it answers
TIMEOUT_VARIABLE = "MLFLOW_HTTP_REQUEST_TIMEOUT"  # mlflow reads it at each request
LOCAL_SCHEMES = ("", "file")


def split_uri(uri: str) -> tuple[str, dict[str, str]]:
    """Return the URI without user and password, and the variables that give these to mlflow."""
    address, user, password = split_credentials(uri)
    if not uri.startswith("http") or not password:
        return uri, {}
    return address, {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": password}


@contextlib.contextmanager
def request_timeout(seconds: int) -> Iterator[None]:
    """Let each request in this block take up to `seconds`."""
    before = os.environ[TIMEOUT_VARIABLE]
    os.environ[TIMEOUT_VARIABLE] = str(seconds)
    try:
        yield
    finally:
        os.environ[TIMEOUT_VARIABLE] = before


def check_artifact_host(artifact_uri: str, tracking_uri: str) -> None:
    """Raise RequestError if files are on another host, to which mlflow would send the password."""
    from mlflow.utils.credentials import get_default_host_creds

    store, server = urlsplit(artifact_uri), urlsplit(tracking_uri)
    if store.scheme not in ("http", "https", "mlflow-artifacts") or store.netloc in ("", server.netloc):
        return
    credentials = get_default_host_creds(artifact_uri)
    if credentials.password or credentials.token or credentials.auth:
        raise RequestError(
            f"MLflow at {without_password(tracking_uri)} keeps these files at another host,"
            f" {without_password(artifact_uri)}, which would be sent your password: use an experiment or a model whose"
            " files are on the server itself"
        )


def not_installed(error: ModuleNotFoundError) -> RequestError:
    return RequestError(
        f"tracking needs a Python package that is not installed ({error.name}): pip install mlflow, or set"
        " track.uri=none"
    )


def root_cause(error: BaseException) -> str:
    """Return a chain's first error as one line: mlflow wraps a refused connection three times."""
    while error.__context__ is not None:
        error = error.__context__
    return " ".join(without_password(str(error)).split())[:300] or type(error).__name__


def log(line: str) -> None:
    """Print a line with the time to standard error, which is `sync.log` beside a training run."""
    print(f"{time.strftime('%F %T')} {line}", file=sys.stderr, flush=True)
