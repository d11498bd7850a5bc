"""Checks that the MLflow server answers and stores files, with plain HTTP and without `mlflow`.

The requests have the credentials and the TLS settings that mlflow would use. Each check returns a
line for the user, or raises TemporaryError; RequestError if a SQLite database cannot be written.
"""

import base64
import configparser
import contextlib
import os
import re
import tempfile
import urllib.parse
import uuid
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.config.credentials import without_password
from pipeline.config.schema import Config
from pipeline.errors import RequestError, TemporaryError
from pipeline.files import parse_json
from pipeline.record.folder import RunFolder
from pipeline.record.mlflow.connection import deleted_experiment, explain, find_remedy, missing_package, split_uri
from pipeline.record.sender import ignored_variables, tracking_uri

_TIMEOUT_S = 10
_MAX_ANSWER_KIB = 1 << 10
_EXPERIMENTS = "api/2.0/mlflow/experiments"


def check_server_answers(config: Config, folder: RunFolder) -> str:
    """Check that the server, if there is one, answers a call that a run makes.

    Its /health would not do: it answers even if the server refuses every other call.
    """
    uri = tracking_uri(config, folder)
    if uri is None or not uri.startswith(("http://", "https://")):
        check_database_is_writable(uri)
        return f"no server: {'track.uri=none' if uri is None else without_password(uri) + ignored_variables()}"
    shown = without_password(uri)
    sent = _variables(uri)
    try:
        answer = _request(uri, f"{_EXPERIMENTS}/search?max_results=1")
        if answer.is_ok:
            parse_json(answer.body)
            experiment = _experiment(uri, config.track.experiment or config.recipe)
            if experiment.get("lifecycle_stage") == "deleted":
                raise TemporaryError(*deleted_experiment(experiment["name"], experiment["experiment_id"]))
            return f"{shown} answers{ignored_variables()}"
    except (OSError, ValueError) as error:
        cause, remedy = explain(error, sent)
        problem = f"no MLflow server answers at {shown} ({cause})"
        raise TemporaryError(problem, remedy or "check that it is running") from None
    text = f"answers {answer.status} {answer.body.decode(errors='replace')}"
    host = urllib.parse.urlsplit(shown).netloc
    remedy = find_remedy(text, sent, host) or "look at the server's log"
    if answer.status in (301, 302, 303, 307, 308):
        target = without_password(answer.location or "an unnamed address")
        remedy = (
            f"it redirects to {target}, and redirects are not followed: set track.uri to that address, or"
            " MLFLOW_TRACKING_TOKEN if that is a login page"
        )
    raise TemporaryError(f"MLflow at {shown} answers {answer.status}", remedy)


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
    """Check that the server stores a file and returns the same bytes.

    If the run writes its files to an object store itself, check that it has the store's client.
    """
    uri = tracking_uri(config, folder)
    if uri is None or not uri.startswith("http"):
        return "no server"
    content = uuid.uuid4().bytes
    path = f"api/2.0/mlflow-artifacts/artifacts/doctor/{content.hex()}"
    try:
        location = _artifact_location(uri, config.track.experiment or config.recipe)
        if urllib.parse.urlsplit(location).scheme not in ("", "mlflow-artifacts", "http", "https"):
            if missing := missing_package(location):
                raise TemporaryError(f"the run writes its files to {location}, and {missing}")
            return f"the run writes its files to {location} itself"
        for method, body in (("PUT", content), ("GET", None), ("DELETE", None)):
            answer = _request(uri, path, method, body)
            if method == "PUT" and answer.status in (404, 503):
                without = "the server does not store files (--no-serve-artifacts)"
                return f"{without}: the run writes to the artifact store directly"
            if not answer.is_ok:
                text = f"MLflow answers {answer.status} to an upload"
                remedy = find_remedy(text, _variables(uri))
                default = "check that the server can write to its --artifacts-destination"
                raise TemporaryError(text, remedy or default)
            if method == "GET" and answer.body != content:
                problem = f"MLflow returned {len(answer.body)} bytes that are not the file it was sent"
                raise TemporaryError(problem, "look for a proxy in between")
    except (OSError, ValueError) as error:
        cause, remedy = explain(error, _variables(uri))
        raise TemporaryError(f"an upload to MLflow failed ({cause})", remedy or "read the server log") from None
    return "the server stores a file and returns it"


def _artifact_location(uri: str, experiment: str) -> str:
    """Return where files of the experiment are, or of the default one, or "" if none is there."""
    found = _experiment(uri, experiment) or _experiment(uri, None)
    return without_password(str(found.get("artifact_location", "")))


def _experiment(uri: str, name: str | None) -> dict[str, Any]:
    """Return what the server says about an experiment, by default its first, or {}."""
    query = "get?experiment_id=0"
    if name is not None:
        query = f"get-by-name?experiment_name={urllib.parse.quote(name, safe='')}"
    answer = _request(uri, f"{_EXPERIMENTS}/{query}")
    with contextlib.suppress(ValueError, LookupError, TypeError):
        if answer.is_ok:
            return dict(parse_json(answer.body)["experiment"])
    return {}


class _Answer(NamedTuple):
    status: int
    body: bytes
    location: str
    """The target of a redirect, or ""."""

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300


def _request(uri: str, path: str, method: str = "GET", body: bytes | None = None) -> _Answer:
    """Return the server's answer to a call. Raises OSError or ValueError if there is none.

    requests is what mlflow uses: it reads REQUESTS_CA_BUNDLE and the variables of a proxy. No
    redirect is followed, because the credentials would go to another host.
    """
    import requests

    address, _ = split_uri(uri)
    sent = _variables(uri)
    user, password = sent.get("MLFLOW_TRACKING_USERNAME"), sent.get("MLFLOW_TRACKING_PASSWORD")
    headers = {"X-MLFLOW-WORKSPACE": workspace} if (workspace := sent.get("MLFLOW_WORKSPACE", "").strip()) else {}
    if user and password:
        headers["Authorization"] = f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"
    elif token := sent.get("MLFLOW_TRACKING_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    authority = sent.get("MLFLOW_TRACKING_SERVER_CERT_PATH") or None  # empty, requests would accept any certificate
    is_insecure = sent.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("true", "1")
    if authority is not None and is_insecure:
        raise ValueError("MLFLOW_TRACKING_INSECURE_TLS and MLFLOW_TRACKING_SERVER_CERT_PATH are both set")
    with requests.request(
        method, f"{address.rstrip('/')}/{path}", data=body, headers=headers,
        verify=not is_insecure if authority is None else authority, cert=sent.get("MLFLOW_TRACKING_CLIENT_CERT_PATH"),
        allow_redirects=False, stream=True, timeout=_TIMEOUT_S,
    ) as answer:  # fmt: skip
        content = b"".join(islice(answer.iter_content(1 << 10), _MAX_ANSWER_KIB))
        return _Answer(answer.status_code, content, answer.headers.get("Location", ""))


def _variables(uri: str) -> dict[str, str]:
    """Return the environment variables as mlflow uses them: with the credentials of `uri`."""
    file = configparser.ConfigParser(interpolation=None)
    file.read(Path("~/.mlflow/credentials").expanduser(), encoding="utf-8")
    variables = dict(os.environ)
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        variables[name] = variables.get(name) or file.get("mlflow", name.lower(), fallback="") or ""
    return variables | split_uri(uri)[1]
