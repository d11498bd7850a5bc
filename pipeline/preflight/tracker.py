"""Checks that the MLflow server answers and stores files, with plain HTTP and without `mlflow`.

Each check returns a line for the user, or raises TemporaryError.
"""

import base64
import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
import uuid
from typing import Any

from pipeline.config.credentials import split_credentials, without_password
from pipeline.config.schema import Config
from pipeline.errors import TemporaryError
from pipeline.record.folder import RunFolder
from pipeline.record.sender import tracking_uri

_TIMEOUT_S = 10


def check_server_answers(config: Config, folder: RunFolder) -> str:
    """Check that the server, if there is one, answers a call that a run makes.

    Its /health would not do: it answers even if the server refuses every other call.
    """
    uri = tracking_uri(config, folder)
    if uri is None or not uri.startswith(("http://", "https://")):
        return f"no server: {'track.uri=none' if uri is None else without_password(uri)}"
    shown = without_password(uri)
    try:
        with _open(uri, "api/2.0/mlflow/experiments/search?max_results=1") as answer:
            json.load(answer)
    except urllib.error.HTTPError as error:
        remedy = {
            401: "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
            403: f"start the server with --allowed-hosts naming {urllib.parse.urlsplit(shown).netloc}, port included",
        }.get(error.code, "look at the server's log")
        if error.code in (301, 302, 303, 307, 308):
            target = without_password(error.headers.get("Location", "an unnamed address"))
            remedy = f"it redirects to {target}, and redirects are not followed: set track.uri to that address"
        raise TemporaryError(f"MLflow at {shown} answers {error.code}: {remedy}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise TemporaryError(f"no MLflow server answers at {shown} ({error}): check that it is running") from None
    return f"{shown} answers"


def check_server_stores_files(config: Config, folder: RunFolder) -> str:
    """Check that the server stores a file and returns the same bytes."""
    uri = tracking_uri(config, folder)
    if uri is None or not uri.startswith("http"):
        return "no server"
    content = uuid.uuid4().bytes
    path = f"api/2.0/mlflow-artifacts/artifacts/doctor/{content.hex()}"
    try:
        for method, body in (("PUT", content), ("GET", None), ("DELETE", None)):
            with _open(uri, path, method, body) as answer:
                returned = answer.read()
            if method == "GET" and returned != content:
                problem = f"MLflow returned {len(returned)} bytes that are not the file it was sent"
                raise TemporaryError(f"{problem}: look for a proxy in between")
    except urllib.error.HTTPError as error:
        if error.code in (404, 503):
            without = "the server does not store files (--no-serve-artifacts)"
            return f"{without}: the run writes to the artifact store directly"
        remedy = "check that the server can write to its --artifacts-destination"
        raise TemporaryError(f"MLflow answers {error.code} to an upload: {remedy}") from None
    except OSError as error:
        raise TemporaryError(f"an upload to MLflow failed ({error}): look at the server's log") from None
    return "the server stores a file and returns it"


class _RefuseRedirects(urllib.request.HTTPRedirectHandler):
    """Make a redirect an HTTPError: urllib would send the password to the new host."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _open(uri: str, path: str, method: str = "GET", body: bytes | None = None) -> Any:
    """Return the server's answer to a call, made with the password of `uri` or the environment.

    Raises what urllib raises.
    """
    address, name, password = split_credentials(uri)
    parts = urllib.parse.urlsplit(address)
    url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}/{path}"
    request = urllib.request.Request(url, body, method=method)
    user = name or os.environ.get("MLFLOW_TRACKING_USERNAME")
    if user:
        password = password or os.environ.get("MLFLOW_TRACKING_PASSWORD", "")
        token = base64.b64encode(f"{user}:{password}".encode()).decode()
        request.add_header("Authorization", f"Basic {token}")
    return urllib.request.build_opener(_RefuseRedirects).open(request, timeout=_TIMEOUT_S)
