"""The connection to an MLflow server: credentials, request timeouts, and errors as one line.

A password in the tracking URI reaches mlflow through the environment, never in the URI itself, so
that no message, file or tag of mlflow can contain it.
"""

import os
import re
import sys
import time
from urllib.parse import SplitResult, urlsplit

from pipeline.addons.ops.credentials import split_credentials, without_password
from pipeline.errors import RequestError, RunError, one_line

REQUEST_TIMEOUT_S = 5  # while training runs: the end of a run has time for two such requests
FILE_TIMEOUT_S = 60  # a server may pass a file on to slower storage before it answers
LOCAL_SCHEMES = ("", "file")
SCHEMES = (*LOCAL_SCHEMES, "mlflow-artifacts", "s3", "gs", "wasbs")
"""Places of files that are allowed.

With other schemes mlflow connects to hosts that the server names, or uses other keys.
"""


def split_uri(uri: str) -> tuple[str, dict[str, str]]:
    """Return the URI without user and password, and the variables that give these to mlflow."""
    address, user, password = split_credentials(uri)
    if not uri.startswith("http") or not password:
        return uri, {}
    return address, {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": password}


def protect_credentials() -> None:
    """Have mlflow send no credentials to a host that is not the one that the user has named."""
    # mlflow's default repeats a request at any other host
    os.environ["MLFLOW_ALLOW_HTTP_REDIRECTS"] = "false"
    certificate = "MLFLOW_TRACKING_SERVER_CERT_PATH"
    if not os.environ.get(certificate):  # if empty, mlflow would accept any certificate
        os.environ.pop(certificate, None)


def set_timeout(seconds: int) -> None:
    """Let each request take up to `seconds` from now on."""
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(seconds)


def configure(uri: str, timeout_s: int) -> str:
    """Set the variables that mlflow reads, and return the URI without user and password."""
    address, credentials = split_uri(uri)
    protect_credentials()
    set_timeout(timeout_s)
    os.environ |= credentials | {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # our own loop retries; mlflow's would block for minutes
        "MLFLOW_ENABLE_ASYNC_LOGGING": "false",  # an error of a thread of mlflow's would be lost
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }
    return address


def check_artifact_host(artifact_uri: str, tracking_uri: str) -> None:
    """Raise RequestError if files are on another host, to which mlflow would send a password."""
    from mlflow.utils.credentials import get_default_host_creds

    store, server = urlsplit(artifact_uri), urlsplit(tracking_uri)
    shown = f"MLflow keeps these files at {without_password(artifact_uri)}"
    allowed = (*SCHEMES, "http", "https", "dbfs")  # dbfs: at the host of the user's own Databricks profile
    if store.scheme not in allowed:
        raise RequestError(f"{shown}: use an experiment whose files are at one of {', '.join(allowed[1:])}")
    if store.scheme not in ("http", "https", "mlflow-artifacts"):
        return
    if store.scheme == "mlflow-artifacts":  # mlflow takes the scheme, and a missing host, from the server
        store = store._replace(scheme=server.scheme, netloc=store.netloc or server.netloc)
    credentials = get_default_host_creds(artifact_uri)
    if _origin(store) != _origin(server) and (credentials.password or credentials.token or credentials.auth):
        remedy = "use an experiment or a model whose files are on the server itself"
        raise RequestError(f"{shown}, another host, which would be sent your password", remedy)


def _origin(address: SplitResult) -> tuple[str, str]:
    """Return the scheme, and the host with its port unless that is the scheme's own."""
    port = {"http": ":80", "https": ":443"}.get(address.scheme, "")
    return address.scheme, address.netloc.lower().removesuffix(port)


def root_cause(error: BaseException) -> str:
    """Return a chain's first error as one line, without credentials.

    mlflow wraps a refused connection three times.
    """
    while error.__context__ is not None:
        error = error.__context__
    # a token with a line break is in the error about that header
    text = re.sub(r"(header value:|Bearer|Basic) .*", r"\1 …", without_password(str(error)), flags=re.DOTALL)
    if token := os.environ.get("MLFLOW_TRACKING_TOKEN", "").strip():
        text = text.replace(token, "…")
    return one_line(text, 1000 if isinstance(error, RunError) else 300) or type(error).__name__


def log(line: str) -> None:
    """Print a line with the time to standard error, which is `sync.log` beside a training run."""
    print(f"{time.strftime('%F %T')} {line}", file=sys.stderr, flush=True)
