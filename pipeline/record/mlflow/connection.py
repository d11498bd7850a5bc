"""The connection to an MLflow server: credentials, request timeouts, and errors as one line.

A password in the tracking URI reaches mlflow through the environment, never in the URI itself, so
that no message, file or tag of mlflow can contain it.
"""

import contextlib
import importlib.util
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from urllib.parse import SplitResult, unquote, urlsplit

from pipeline.config.credentials import split_credentials, without_password
from pipeline.errors import RequestError, RunError

REQUEST_TIMEOUT_S = 5  # while training runs: the end of a run has time for two such requests
FILE_TIMEOUT_S = 60  # a server may pass a file on to slower storage before it answers
TIMEOUT_VARIABLE = "MLFLOW_HTTP_REQUEST_TIMEOUT"  # mlflow reads it at each request
CERTIFICATE_VARIABLE = "MLFLOW_TRACKING_SERVER_CERT_PATH"
ARTIFACTS = "mlartifacts"
"""Name of the folder of files beside a local database."""
LOCAL_SCHEMES = ("", "file")
SCHEMES = (*LOCAL_SCHEMES, "mlflow-artifacts", "s3", "gs", "wasbs", "abfss")
"""Places of files that are allowed.

With other schemes mlflow connects to hosts that the server names, or uses other keys.
"""
_AZURE = re.compile(r"[^@]+@[\w-]+\.dfs\.core\.(windows\.net|chinacloudapi\.cn|usgovcloudapi\.net)")
"""Hosts of abfss. mlflow itself checks those of wasbs only."""
_THREAD = threading.local()
_CLIENTS = {
    "s3": ("boto3", "'ddp-pipeline[s3]'"),
    "gs": ("google.cloud.storage", "google-cloud-storage"),
    "wasbs": ("azure.storage.blob", "azure-storage-blob azure-identity"),
    "abfss": ("azure.storage.filedatalake", "azure-storage-file-datalake azure-identity"),
}
"""By scheme: the module with which mlflow reaches an artifact store, and what pip installs it."""
_UNAUTHORIZED = re.compile(
    r"(error code|answers) 401\b|^401 Client Error|\b(UNAUTHENTICATED|CUSTOMER_UNAUTHORIZED): "
    r"|^INTERNAL_ERROR: .*(?i:unauthori[sz]ed|\bexpired)"  # a gateway's own JSON, of which mlflow drops the status
)
_REMEDIES = (
    (r"Invalid Host header", "start the server with --allowed-hosts naming {host}, port included"),
    (r"(error code|answers) 403\b|^403 Client Error|\bPERMISSION_DENIED: |^INTERNAL_ERROR: .*(?i:forbidden)",
     "get the right to write to this experiment, or name another with track.experiment"),
    (r"CERTIFICATE_VERIFY_FAILED.*mismatch", "give the host name of the server's certificate in track.uri"),
    (r"CERTIFICATE_VERIFY_FAILED.*expired", "renew the server's certificate"),
    (r"CERTIFICATE_VERIFY_FAILED|CA certificate bundle|NO_CERTIFICATE_OR_CRL",
     "set MLFLOW_TRACKING_SERVER_CERT_PATH to a PEM file with the certificate of its authority"),
    (r"MLFLOW_TRACKING_INSECURE_TLS", "unset MLFLOW_TRACKING_INSECURE_TLS"),
    (r"(?i)certificate required|No required SSL certificate|TLS certificate file|handshake failure",
     "set MLFLOW_TRACKING_CLIENT_CERT_PATH to a PEM file with your certificate and its key"),
    (r"header value:", "set MLFLOW_TRACKING_TOKEN without spaces and line breaks"),
    (r"error code 413\b|^413 Client Error", "raise the proxy's limit for uploads (client_max_body_size of nginx)"),
)  # fmt: skip
"""Remedies, by a pattern of the error's text. The first that matches counts."""


def split_uri(uri: str) -> tuple[str, dict[str, str]]:
    """Return the URI without user and password, and the variables that give these to mlflow."""
    address, user, password = split_credentials(uri)
    if not uri.startswith("http") or not password:
        return uri, {}
    return address, {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": password}


def protect_credentials() -> None:
    """Have mlflow send no credentials to a host that is not the one that the user has named."""
    os.environ["MLFLOW_ALLOW_HTTP_REDIRECTS"] = "false"  # mlflow's default repeats a request at any other host
    if not os.environ.get(CERTIFICATE_VARIABLE):  # if empty, mlflow would accept any certificate
        os.environ.pop(CERTIFICATE_VARIABLE, None)


def configure(uri: str, timeout_s: int) -> str:
    """Set the variables that mlflow reads, and return the URI without user and password."""
    address, credentials = split_uri(uri)
    protect_credentials()
    os.environ |= credentials | {
        TIMEOUT_VARIABLE: str(timeout_s),
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # our own loop retries; mlflow's would block for minutes
        "MLFLOW_ENABLE_ASYNC_LOGGING": "false",  # an error of a thread of mlflow's would be lost
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }
    return address


@contextlib.contextmanager
def request_timeout(seconds: int) -> Iterator[None]:
    """Let each request that this thread makes in this block take up to `seconds`."""
    from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_TIMEOUT as VARIABLE

    # mlflow asks this object at each request; the variable itself is that of all threads
    VARIABLE.get_raw = lambda: getattr(_THREAD, "timeout", None) or os.environ[TIMEOUT_VARIABLE]
    before = getattr(_THREAD, "timeout", None)
    _THREAD.timeout = str(seconds)
    try:
        yield
    finally:
        _THREAD.timeout = before


def check_artifact_host(artifact_uri: str, tracking_uri: str) -> None:
    """Raise RequestError if files are on another host, to which mlflow would send a password."""
    from mlflow.utils.credentials import get_default_host_creds

    store, server = urlsplit(artifact_uri), urlsplit(tracking_uri)
    shown = f"MLflow at {without_password(tracking_uri)} keeps these files at {without_password(artifact_uri)}"
    allowed = (*SCHEMES, "http", "https", "dbfs")  # dbfs: at the host of the user's own Databricks profile
    if store.scheme not in allowed:
        raise RequestError(f"{shown}: use an experiment whose files are at one of {', '.join(allowed[1:])}")
    if store.scheme == "abfss" and not _AZURE.fullmatch(store.netloc):
        raise RequestError(
            f"{shown}, not a host of Azure Storage, which would be sent your credentials: use an experiment or a model"
            " whose files are at ACCOUNT.dfs.core.windows.net"
        )
    target = store
    if store.scheme == "mlflow-artifacts":  # mlflow takes the scheme, and a host that is not named, from the server
        target = store._replace(scheme=server.scheme, netloc=store.netloc or server.netloc)
    if store.scheme not in ("http", "https", "mlflow-artifacts") or _origin(target) == _origin(server):
        return
    credentials = get_default_host_creds(artifact_uri)
    if credentials.password or credentials.token or credentials.auth:
        raise RequestError(
            f"{shown}, another host, which would be sent your password: use an experiment or a model whose files are on"
            " the server itself"
        )


def _origin(address: SplitResult) -> tuple[str, str]:
    """Return the scheme, and the host with its port unless that is the scheme's own."""
    port = {"http": ":80", "https": ":443"}.get(address.scheme, "")
    return address.scheme, address.netloc.lower().removesuffix(port)


def not_installed(error: ModuleNotFoundError) -> RequestError:
    return RequestError(
        f"tracking needs a Python package that is not installed ({error.name}): pip install mlflow, or set"
        " track.uri=none"
    )


def deleted_experiment(name: str, number: str) -> tuple[str, str]:
    """Return problem and remedy of a run in a deleted experiment, whose name MLflow keeps."""
    restore = f"mlflow experiments restore --experiment-id {number}"
    return f"the experiment {name} is deleted in MLflow", f"restore it with '{restore}', or set track.experiment=NAME"


def check_not_moved(artifact_uri: str, tracking_uri: str) -> None:
    """Raise RequestError if files are at the former place of a local database that was moved.

    They are made beside it (`run.open_run`), and mlflow would make the former folders anew.
    """
    database = re.match(r"sqlite(?:\+\w+)?:///(.+)", tracking_uri)
    url = urlsplit(artifact_uri)
    above, found, _ = unquote(url.path).partition(f"/{ARTIFACTS}/")
    folder = os.path.realpath(os.path.dirname(os.path.abspath(database[1]))) if database else ""
    former, place = f"{above}/{ARTIFACTS}", f"{folder}/{ARTIFACTS}"
    if not (folder and found and url.scheme in LOCAL_SCHEMES and os.path.isdir(place)):
        return  # without files beside the database, it was made with another place for them
    if os.path.realpath(former) != os.path.realpath(place):
        made = f"mkdir -p {shlex.quote(above)} && ln -s {shlex.quote(place)} {shlex.quote(former)}"
        if os.path.exists(former):
            made = f"mv {shlex.quote(former)} {shlex.quote(former)}.old && {made}"
        raise RequestError(
            f"MLflow's database was moved to {folder}, and has these files at {former}",
            f"make the former place a link with '{made}', or set track.experiment=NAME",
        )


def missing_package(artifact_uri: str) -> str:
    """Return "" if mlflow can reach files at this place, or which Python module it lacks."""
    scheme = urlsplit(artifact_uri).scheme
    if scheme not in _CLIENTS:
        return ""
    module, package = _CLIENTS[scheme]
    with contextlib.suppress(ModuleNotFoundError):  # a package that contains it is missing
        if importlib.util.find_spec(module):
            return ""
    return f"the Python module {module} is not installed: pip install {package}"


def root_cause(error: BaseException) -> str:
    """Return a chain's first error as one line, with what to do about it if that is known."""
    return ": ".join(filter(None, explain(error)))


def explain(error: BaseException, sent: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return a chain's first error as one line, without credentials, and what to do, or "".

    mlflow wraps a refused connection three times. sent: the variables with the credentials.
    """
    while error.__context__ is not None:
        error = error.__context__
    if isinstance(error, RunError):
        return without_password(error.problem), without_password(error.remedy)
    text = " ".join(without_password(str(error)).split())
    remedy = find_remedy(text, sent)
    text = re.sub(r"\.? Response body: '<.*", "", text)  # a proxy's HTML page
    text = re.sub(r"(header value:|Bearer|Basic) .*", r"\1 …", text)
    if token := sent.get("MLFLOW_TRACKING_TOKEN", "").strip():
        text = text.replace(token, "…")
    return text[:300] or type(error).__name__, remedy


def find_remedy(text: str, sent: Mapping[str, str], host: str = "the host of track.uri") -> str:
    """Return what to set or do after an error with this text, or ""."""
    user, token = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"
    if not _UNAUTHORIZED.search(text):
        return next((remedy.format(host=host) for pattern, remedy in _REMEDIES if re.search(pattern, text)), "")
    if sent.get("MLFLOW_TRACKING_USERNAME") and sent.get("MLFLOW_TRACKING_PASSWORD"):
        other = f", or unset them, because they are sent in place of {token}" if sent.get(token) else ""
        return f"set {user} to valid ones{other}"
    if sent.get(token):
        return f"set {token} to another token, because this one is wrong or has expired"
    return f"set {user}, or {token}"


def is_unreachable(error: BaseException | None) -> bool:
    """Return True if no server answered: then it takes no other request either."""
    import requests

    while error is not None:
        if isinstance(error, (requests.exceptions.ConnectionError, requests.exceptions.Timeout)):
            return True
        error = error.__context__
    return False


def log(line: str) -> None:
    """Print a line with the time to standard error, which is `sync.log` beside a training run."""
    print(f"{time.strftime('%F %T')} {line}", file=sys.stderr, flush=True)
