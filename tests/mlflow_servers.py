"""Send one run to MLflow servers of several versions, databases and artifact stores.

`make servers-table` writes docs/mlflow-servers.md with every combination; tests/test_servers.py
checks some of them. The servers are real, each version in an environment of its own.
"""

import argparse
import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import boto3
import mlflow
import pytest
from harness import Job, Result, free_port, pipeline, read_rows
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.store.artifact.s3_artifact_repo import _cached_get_s3_client
from object_store import S3Server, Weed
from server import Server

from pipeline.data.sources import make_digits

ROOT = Path(__file__).parent.parent
VERSIONS = ("2.22", "3.1", "3.17")
DATABASES = ("SQLite", "PostgreSQL")
STORES = ("the server", "S3", "the server, with a password")
NAME = "digits-on-servers"
WORDS = (
    "model.arch=shufflenet_v2_x0_5", "batch.global=48", "run.device=cpu", "run.threads=1", "data.workers=0",
    "train.max_steps=8", "evaluate.every=4 steps", "track.every=2 steps", f"track.register={NAME}@best",
)  # fmt: skip
_USER = {"MLFLOW_TRACKING_USERNAME": "admin", "MLFLOW_TRACKING_PASSWORD": "a long enough password"}
_FILES = ["config.yaml", "journal.jsonl", "plan.json", "receipt.json"]


@dataclass(frozen=True)
class Arrived:
    """The parts of a run that a server has."""

    status: str
    points: list[tuple[int, str, float, int]]
    files: list[str]
    figures: int
    inputs: int
    has_description: bool
    model: str
    """The place of the model: "logged model", "files of the run", or ""."""
    registered: str
    """The source of the registered version with the alias, or ""."""


def python_of(version: str) -> str | None:
    """Return the interpreter of the environment with that version of MLflow, or None."""
    path = ROOT / f"build/mlflow-{version}/bin/python"
    if path.exists():
        return str(path)
    return sys.executable if mlflow.__version__.startswith(f"{version}.") else None


def train(folder: Path, digits: Path) -> Job:
    """Return a finished run whose journal has everything, and which no server has."""
    job = Job(folder, ["digits", f"data.root={digits}", *WORDS, "track.uri=none"])
    result = job.run()
    assert result.code == 0, result.err
    return job


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """Start PostgreSQL and yield the URI of an empty database."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="postgres-") as folder:
        user = "nobody" if os.geteuid() == 0 else None  # PostgreSQL refuses to run as root
        if user:
            os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
        data = f"{folder}/data"
        subprocess.run(
            ["initdb", "--pgdata", data, "--username", "mlflow", "--auth", "trust", "--no-sync"],
            user=user, cwd=folder, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        with open(f"{folder}/log", "wb") as log:
            server = subprocess.Popen(
                ["postgres", "-D", data, "-k", folder, "-p", str(port), "-h", "127.0.0.1", "-F"],
                user=user, cwd=folder, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            end = time.monotonic() + 60
            while time.monotonic() < end:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.1)
            yield f"postgresql+psycopg2://mlflow@127.0.0.1:{port}/postgres"
        finally:
            server.terminate()
            server.wait()


@contextlib.contextmanager
def server_of(version: str, database: str, store: str, folder: Path) -> Iterator[tuple[Server, dict[str, str]]]:
    """Start a server, and yield it with the variables of its clients."""
    python = python_of(version)
    assert python
    with contextlib.ExitStack() as stack:
        words: list[str] = []
        client: dict[str, str] = {}
        server_env: dict[str, str] = {}
        if store == "S3":
            s3: S3Server = Weed(folder / "s3").start()
            stack.callback(s3.kill)
            words = ["--no-serve-artifacts", "--default-artifact-root", f"s3://{s3.wait_ready().make_bucket()}/mlflow"]
            client = server_env = {**s3.env, "MLFLOW_S3_ENDPOINT_URL": s3.endpoint}
        elif store.endswith("password"):
            words = ["--app-name", "basic-auth"]
            client = _USER
            server_env = {
                "MLFLOW_AUTH_ADMIN_USERNAME": "admin", "MLFLOW_AUTH_ADMIN_PASSWORD": _USER["MLFLOW_TRACKING_PASSWORD"],
                "MLFLOW_FLASK_SERVER_SECRET_KEY": "a key of the tests",
            }  # fmt: skip
            # versions before 3.17 read the user from a file
            (folder / "auth.ini").write_text(_AUTH_INI.format(folder=folder))
            server_env["MLFLOW_AUTH_CONFIG_PATH"] = str(folder / "auth.ini")
        uri = stack.enter_context(postgres()) if database == "PostgreSQL" else None
        server = Server(folder, *words, python=python, database=uri, **server_env)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in (client | {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}).items():
            patch.setenv(name, value)
        _cached_get_s3_client.cache_clear()  # this process may have the credentials of another server
        boto3.setup_default_session()
        server.start()
        stack.callback(server.kill)
        yield server.wait_ready(), client


_AUTH_INI = """[mlflow]
default_permission = READ
database_uri = sqlite:///{folder}/basic_auth.db
admin_username = admin
admin_password = a long enough password
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
"""


def send(job: Job, server: Server, client: dict[str, str]) -> Result:
    """Send the run as a user does."""
    return pipeline("sync", str(job.folder), MLFLOW_TRACKING_URI=server.uri, **client)


def look(job: Job, server: Server) -> Arrived:
    """Return what the server has of a run."""
    mlflow.set_tracking_uri(server.uri)
    run = server.run_of(job)
    repository = get_artifact_repository(run.info.artifact_uri)
    files = sorted(file.path for file in repository.list_artifacts() if not file.is_dir)
    images = [file.path for file in repository.list_artifacts("images") if file.path.endswith(".png")]
    version = server.client.get_model_version_by_alias(NAME, "best")
    if version.source.startswith("models:/m-"):
        model = "logged model"
        uri = server.client.get_logged_model(version.source.removeprefix("models:/")).artifact_location
    else:
        model, uri = "files of the run", version.source
    is_whole = {"MLmodel", "data"} <= {file.path for file in get_artifact_repository(uri).list_artifacts()}
    return Arrived(
        run.info.status, server.points(run), files, len(images), len(run.inputs.dataset_inputs),
        "mlflow.note.content" in run.data.tags, model if is_whole else "", version.source if is_whole else "",
    )  # fmt: skip


def check(job: Job, arrived: Arrived) -> None:
    """Fail unless everything arrived, once."""
    rows = [row for row in read_rows(job.folder / "journal.jsonl") if "metrics" in row]
    points = [(row["step"], key, value, row["time"]) for row in rows for key, value in row["metrics"].items()]
    assert arrived.status == "FINISHED"
    assert arrived.points == sorted(points)
    assert arrived.files == _FILES
    assert arrived.figures > 0
    assert arrived.inputs == 1
    assert arrived.has_description
    assert arrived.model
    assert arrived.registered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    page = parser.parse_args().page
    lines = []
    with tempfile.TemporaryDirectory() as scratch:
        digits = Path(scratch) / "digits"
        make_digits(digits)
        original = train(Path(scratch) / "original", digits)
        for number, (version, database, store) in enumerate(product(VERSIONS, DATABASES, STORES)):
            folder = Path(scratch) / str(number)
            shutil.copytree(original.folder, folder / "run")
            job = Job(folder / "run", original.arguments)
            with server_of(version, database, store, folder) as (server, client):
                result = send(job, server, client)
                assert result.code == 0, result.err
                arrived = look(job, server)
            check(job, arrived)
            lines.append(f"| {version} | {database} | {store} | {len(arrived.points)} | {arrived.model} |")
            print(lines[-1], flush=True)
    page.write_text(_PAGE + "\n".join(lines) + "\n")


_PAGE = """# MLflow servers

One run is sent by `pipeline sync`, with MLflow 3.17 as its client, to real servers of several
versions. In each row everything arrived: each metric once, the final status, description, data
set, configuration, journal, plan, receipt, pictures, the model, and its registered version with its
alias. What a server lacks is replaced or left out, and `sync.log` says so.

Written by `make servers-table`.

| server | database | files at | metrics, each once | model |
| --- | --- | --- | --- | --- |
"""

if __name__ == "__main__":
    main()
