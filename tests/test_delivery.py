"""Each part of a run arrives though another is refused, and nothing that failed is forgotten."""

import json
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import boto3
import mlflow
import pytest
from harness import Job, environment, quick, read_rows, wait_until
from mlflow.entities import Run
from mlflow.store.artifact.s3_artifact_repo import _cached_get_s3_client
from object_store import Bucket, FaultProxy
from place import SMALL, Place
from server import Server, sync, tracked_job

from pipeline.addons.mlflow import TRAINING_DONE
from pipeline.addons.mlflow.connection import root_cause
from pipeline.addons.mlflow.run import find_run

MLFLOW_2 = Path(__file__).parent.parent / "build/mlflow-2.22/bin/python"
PARTS = {"description", "inputs", "files", "figures", "model"}
"""The parts that `parts_at` looks for."""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Job:
    """Train a run whose journal has everything, and that no server has."""
    words = ("evaluate.every=4 steps", "track.uri=none", "track.report=true", "track.register=digits@best")
    folder = tmp_path_factory.mktemp("original") / "run"
    job = tracked_job(folder, digits, "train.max_steps=8", *words).finished()
    (folder / "report" / ".curves.png").write_bytes(b"a half")  # as rank 0 writes it
    return job


@pytest.fixture
def run(original: Job, tmp_path: Path) -> Job:
    """Return a copy of the run, which MLflow takes for another one."""
    job = Job(Path(shutil.copytree(original.folder, tmp_path / tmp_path.name)), original.arguments)
    change_rows(job, lambda row: row | {"run": tmp_path.name} if "run" in row else row)
    return job


def change_rows(job: Job, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    rows = map(change, read_rows(job.folder / "journal.jsonl"))
    (job.folder / "journal.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows if row))


def forget_end(job: Job) -> None:
    """Make the run one that was killed: it has no model, whose export takes seconds."""
    change_rows(job, lambda row: row if row.get("event") != "ended" else None)


def parts_at(server: Server, run: Run) -> set[str]:
    """Return which of PARTS the server has of a run."""

    def files(folder: str = "") -> set[str]:
        # MLflow 3's client would ask MLflow 2 for models, too
        query = f"run_id={run.info.run_id}&path={folder}"
        with urlopen(f"{server.uri}/api/2.0/mlflow/artifacts/list?{query}", timeout=60) as answer:
            return {file["path"] for file in json.load(answer).get("files", [])}

    found = {
        "description": "mlflow.note.content" in run.data.tags,
        "inputs": run.inputs.dataset_inputs,
        "files": {"config.yaml", "plan.json", "journal.jsonl", "receipt.json"} <= files()
        and not any("/." in path for path in files("report")),
        "figures": any(image.endswith(".png") for image in files("images")),
        "model": run.outputs and run.outputs.model_outputs,
    }
    return {name for name, is_there in found.items() if is_there}


@pytest.mark.full
@pytest.mark.parametrize(("is_killed", "status"), [(False, "FINISHED"), (True, "FAILED")])
def test_uploads_that_are_not_answered_hold_back_metrics_and_status_for_seconds(
    server: Server, run: Job, tmp_path: Path, is_killed: bool, status: str
) -> None:
    """The rows of the training are written while the first upload waits for its answer."""
    if is_killed:
        forget_end(run)
    journal = run.folder / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    started = next(number for number, line in enumerate(lines) if '"started"' in line)
    journal.write_text("".join(lines[: started + 1]))
    words = [sys.executable, "-m", "pipeline", "sync", str(run.folder), "--follow"]  # as rank 0 does
    with (
        FaultProxy(server.uri, only="^PUT /api/2.0/mlflow-artifacts/", rates={"stall": 1}) as proxy,
        open(tmp_path / "log", "wb") as log,
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                         env=environment(PIPELINE_TRACK_URI=proxy.endpoint)) as sender,
    ):  # fmt: skip
        try:
            assert sender.stdout.readline() == b"ready\n"
            wait_until(lambda: proxy.counts["stall"], "an upload")
            with open(journal, "a") as file:
                file.write("".join(lines[started + 1 :]))
            if not is_killed:
                sender.stdin.write(TRAINING_DONE)
            sender.stdin.close()
            wait_until(lambda: server.run_of(run).info.status == status, f"the status {status}")
            if is_killed:
                assert sender.wait(30) == 75
            else:
                server.check_points(run)
        finally:
            sender.kill()
    if is_killed:
        assert sync(run, MLFLOW_TRACKING_URI=server.uri).code == 0
        assert server.run_of(run).info.status == status
        server.check_points(run)


@pytest.mark.parametrize(
    ("refused", "held", "arrived"),
    [pytest.param("logged-models/search", {"model"}, PARTS - {"model"}, marks=pytest.mark.full),
     ("runs/set-tag", {"description", "figures"}, {"inputs", "files", "model"}),
     pytest.param(r"PUT .* \d{6,}$", {"files", "model"}, {"description", "inputs", "figures"},
                  marks=pytest.mark.full)],
    ids=["models", "tags", "large uploads"],
)  # fmt: skip
def test_a_refused_call_holds_back_its_part_alone(
    server: Server, run: Job, refused: str, held: set[str], arrived: set[str]
) -> None:
    # a long run's journal
    change_rows(run, lambda row: row | {"padding": "x" * 150_000} if "run" in row else row)
    with FaultProxy(server.uri, only=refused, rates={"403": 1}) as proxy:
        first = sync(run, MLFLOW_TRACKING_URI=proxy.endpoint, code=75)
        found = server.run_of(run)
        points_before, parts_before = server.points(found), parts_at(server, found)
        proxy.rates = {}
        sync(run, MLFLOW_TRACKING_URI=proxy.endpoint, code=0)
    assert {part for part in PARTS if re.search(rf" {part}: ", first.error)} == held, first.error
    assert found.info.status == "FINISHED"
    server.check_points(run)
    assert arrived <= parts_before
    found = server.run_of(run)
    assert parts_at(server, found) == PARTS
    assert server.points(found) == points_before


@pytest.mark.full
@pytest.mark.skipif(not MLFLOW_2.exists(), reason="an environment with MLflow 2.22 is missing: make servers")
def test_a_server_of_mlflow_2_gets_all_but_the_model_once(run: Job, tmp_path: Path) -> None:
    with Server(tmp_path, python=str(MLFLOW_2)) as old:
        for _ in range(2):
            result = sync(run, MLFLOW_TRACKING_URI=old.uri, code=75)
            assert "model: " in result.error
            assert "files: " not in result.error
        old.check_points(run)
        assert old.run_of(run).info.status == "FINISHED"
        assert parts_at(old, old.run_of(run)) == PARTS - {"model"}


@pytest.mark.full
def test_an_artifact_store_that_is_away_holds_back_no_metric(
    run: Job, tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    _cached_get_s3_client.cache_clear()  # this process may have the credentials of another server
    boto3.setup_default_session()
    root, here = f"{bucket.place}/mlflow", {"MLFLOW_S3_ENDPOINT_URL": bucket.server.endpoint}
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", bucket.server.endpoint)
    away = dict.fromkeys(("AWS_ENDPOINT_URL", "MLFLOW_S3_ENDPOINT_URL"), "http://127.0.0.1:9")
    with Server(tmp_path, "--no-serve-artifacts", "--default-artifact-root", root, **here) as own:
        first = sync(run, MLFLOW_TRACKING_URI=own.uri, AWS_MAX_ATTEMPTS="1", **away, code=75)
        own.check_points(run)
        assert own.run_of(run).info.status == "FINISHED"
        sync(run, MLFLOW_TRACKING_URI=own.uri, **here, code=0)
        own.check_points(run)
        assert parts_at(own, own.run_of(run)) == PARTS
        assert all(model.artifact_location.startswith(root) for model in own.models(run))
    assert all(f"{part}: " in first.error for part in ("files", "figures", "model"))


@pytest.mark.full
def test_a_run_stays_one_when_its_experiment_changes(server: Server, run: Job) -> None:
    forget_end(run)
    with FaultProxy(server.uri, only="runs/log-batch", rates={"503": 1}) as proxy:
        variables = {"MLFLOW_TRACKING_URI": proxy.endpoint, "MLFLOW_ENABLE_ASYNC_LOGGING": "true"}
        assert sync(run, **variables).code == 75, "metrics that a thread would log are not lost"
    assert sync(run, MLFLOW_TRACKING_URI=server.uri).code == 0
    config = run.folder / "config.yaml"
    config.write_text(config.read_text().replace("experiment: null", "experiment: another"))
    assert "another" in config.read_text()
    assert sync(run, MLFLOW_TRACKING_URI=server.uri).code == 0
    server.run_of(run)
    server.check_points(run)


def test_a_run_is_found_among_more_than_a_thousand_experiments(tmp_path: Path) -> None:
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    run = client.create_run(client.create_experiment("oldest"), tags={"pipeline.run": "abc"})
    columns = "name, artifact_location, lifecycle_stage, creation_time, last_update_time, workspace"
    now = int(1000 * time.time())
    rows = [(f"e{n}", str(tmp_path), "active", now + n, now + n, "default") for n in range(1100)]
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.executemany(f"INSERT INTO experiments ({columns}) VALUES (?, ?, ?, ?, ?, ?)", rows)
    assert len(client.search_experiments(max_results=1000)) == 1000
    assert find_run(client, "abc").info.run_id == run.info.run_id


def test_the_cause_of_an_error_of_mlflow_has_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "CANARY\n")
    assert root_cause(ValueError("no user has the key CANARY")) == "no user has the key …"
    assert root_cause(ValueError("in header value: 'CANARY\n'")) == "in header value: …"


def test_variables_of_mlflow_are_used_or_named(place: Place) -> None:
    small = [word for word in SMALL if not word.startswith("track.")]
    words = ("digits", *small, "track.report=false", "run.dir=runs/new")
    variables = {"MLFLOW_EXPERIMENT_NAME": "from outside", "MLFLOW_RUN_ID": "0" * 32}
    for command in ("doctor", "train"):
        assert "MLFLOW_RUN_ID" in quick(command, *words, cwd=place.path, **variables, code=0).err
    client = mlflow.MlflowClient(f"sqlite:///{place.path}/runs/mlflow.db")
    experiment = client.get_experiment_by_name("from outside").experiment_id
    (found,) = client.search_runs([experiment])
    assert found.info.status == "FINISHED"

    client.delete_experiment(experiment)
    again = quick("train", *words, "run.resume=never", cwd=place.path, **variables, code=0)
    for said in (again.err, quick("sync", "runs/new", cwd=place.path, code=2).error):
        assert f"mlflow experiments restore --experiment-id {experiment}" in said
    client.restore_experiment(experiment)
    assert quick("sync", "runs/new", cwd=place.path).code == 0
