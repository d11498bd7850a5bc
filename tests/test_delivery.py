"""Each part of a run arrives though another is refused, and nothing that failed is forgotten."""

import json
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import mlflow
import pytest
from harness import Job, environment, pipeline, read_rows
from mlflow_servers import train
from object_store import FaultProxy
from server import Server

from pipeline.config.credentials import without_password
from pipeline.config.load import load
from pipeline.errors import RequestError
from pipeline.record.journal import is_row_start, read_events
from pipeline.record.mlflow.run import find_run
from pipeline.record.sender import TRAINING_DONE

UPLOADS = "^PUT /api/2.0/mlflow-artifacts/"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Job:
    """Train a run that no server has."""
    return train(tmp_path_factory.mktemp("original") / "run", digits)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        server = Server(tmp_path_factory.mktemp("server")).start()
        yield server.wait_ready()
        server.kill()


@pytest.fixture
def run(original: Job, tmp_path: Path) -> Job:
    """Return a copy of the run, which MLflow takes for another one."""
    job = Job(Path(shutil.copytree(original.folder, tmp_path / tmp_path.name)), original.arguments)
    change_rows(job, lambda row: row | {"run": tmp_path.name} if "run" in row else row)
    return job


def change_rows(job: Job, change) -> None:  # type: ignore[no-untyped-def]
    journal = job.folder / "journal.jsonl"
    rows = [change(row) for row in read_rows(journal)]
    journal.write_text("".join(json.dumps(row) + "\n" for row in rows if row))


def follow(job: Job, uri: str) -> "subprocess.Popen[bytes]":
    """Start the sender beside a training, as rank 0 does."""
    return subprocess.Popen(
        [sys.executable, "-m", "pipeline", "sync", str(job.folder), "--follow"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=environment(PIPELINE_TRACK_URI=uri),
    )  # fmt: skip


def wait_until(condition: Callable[[], object], what: str, timeout: float = 30) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"no {what} in {timeout} s"
        time.sleep(0.1)


def points(job: Job) -> int:
    return sum(len(row["metrics"]) for row in read_rows(job.folder / "journal.jsonl") if "metrics" in row)


@pytest.mark.full
@pytest.mark.parametrize(("is_killed", "status"), [(False, "FINISHED"), (True, "FAILED")])
def test_uploads_that_are_not_answered_hold_back_no_metric_and_no_status(
    server: Server, run: Job, is_killed: bool, status: str
) -> None:
    if is_killed:
        change_rows(run, lambda row: row if row.get("event") != "ended" else None)
    with FaultProxy(server.uri, only=UPLOADS, rates={"stall": 1}) as proxy:
        sender = follow(run, proxy.endpoint)
        assert sender.stdin
        assert sender.stdout
        assert sender.stdout.readline() == b"ready\n"
        wait_until(lambda: proxy.counts["stall"], "an upload")
        if not is_killed:
            sender.stdin.write(TRAINING_DONE)
        sender.stdin.close()
        wait_until(lambda: server.run_of(run).info.status == status, f"the status {status}", 10)
        sender.kill()
        sender.wait()
    assert len(server.points(server.run_of(run))) == points(run)


REFUSED = {
    "models": ("logged-models/search", "403", {"model"}, {"description", "inputs", "files", "figures"}),
    "tags": ("runs/set-tag", "503", {"description", "figures"}, {"inputs", "files"}),
    "uploads": (UPLOADS, "truncate", {"files", "figures", "model"}, {"description", "inputs"}),
}
"""The requests that fail, how, the parts that lack them, and others that arrive."""


@pytest.mark.full
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call_holds_back_its_part_alone_until_the_next_sync(server: Server, run: Job, name: str) -> None:
    only, fault, held, arrived = REFUSED[name]
    with FaultProxy(server.uri, only=only, rates={fault: 1}) as proxy:
        refused = pipeline("sync", str(run.folder), MLFLOW_TRACKING_URI=proxy.endpoint)
    found = server.run_of(run)
    assert refused.code == 75
    named = {part for part in held | arrived if f" {part}: " in refused.error}
    assert named == held, refused.error
    assert found.info.status == "FINISHED"
    assert len(server.points(found)) == points(run)
    entry = json.loads((run.folder / "mlflow.json").read_text())
    (run.folder / "mlflow.json").write_text(json.dumps({server.uri: entry[proxy.endpoint]}))
    later = pipeline("sync", str(run.folder), MLFLOW_TRACKING_URI=server.uri)
    assert later.code == 0, later.err
    found = server.run_of(run)
    assert "mlflow.note.content" in found.data.tags
    assert found.outputs.model_outputs
    assert {"config.yaml", "receipt.json"} <= {file.path for file in server.client.list_artifacts(found.info.run_id)}


@pytest.mark.full
def test_a_model_whose_checkpoint_was_away_is_sent_later(server: Server, run: Job) -> None:
    checkpoints = run.folder / "checkpoints"
    moved = checkpoints.rename(run.folder / "moved")
    refused = pipeline("sync", str(run.folder), MLFLOW_TRACKING_URI=server.uri)
    moved.rename(checkpoints)
    later = pipeline("sync", str(run.folder), MLFLOW_TRACKING_URI=server.uri)
    assert (refused.code, later.code) == (75, 0), refused.err + later.err
    assert "model: " in refused.error
    assert server.run_of(run).outputs.model_outputs


@pytest.mark.full
def test_metrics_that_mlflow_would_log_in_a_thread_are_not_lost(server: Server, run: Job) -> None:
    with FaultProxy(server.uri, only="runs/log-batch", rates={"503": 1}) as proxy:
        asynchronous = {"MLFLOW_TRACKING_URI": proxy.endpoint, "MLFLOW_ENABLE_ASYNC_LOGGING": "true"}
        assert pipeline("sync", str(run.folder), **asynchronous).code == 75


@pytest.mark.full
def test_a_run_stays_one_when_its_experiment_changes(server: Server, run: Job) -> None:
    assert pipeline("sync", str(run.folder), MLFLOW_TRACKING_URI=server.uri).code == 0
    config = run.folder / "config.yaml"
    config.write_text(config.read_text().replace("experiment: null", "experiment: another"))
    assert "another" in config.read_text()
    assert pipeline("sync", str(run.folder), MLFLOW_TRACKING_URI=server.uri).code == 0
    server.run_of(run)


@pytest.mark.full
def test_a_run_names_all_that_continue_it_also_if_it_comes_last(server: Server, run: Job, tmp_path: Path) -> None:
    (origin,) = [row["run"] for row in read_rows(run.folder / "journal.jsonl") if "run" in row]
    others = []
    for name in ("before", "after"):
        job = Job(Path(shutil.copytree(run.folder, tmp_path / name)), run.arguments)
        change_rows(job, lambda row, name=name: row | {"run": f"{origin}-{name}"} if "run" in row else row)
        change_rows(
            job,
            lambda row: row | {"tags": row["tags"] | {"continues": origin}} if row.get("event") == "started" else row,
        )
        others.append(job)
    for job in (others[0], run, others[1], others[0]):
        assert pipeline("sync", str(job.folder), MLFLOW_TRACKING_URI=server.uri).code == 0
    found = server.run_of(run)
    for job in others:
        other = server.run_of(job)
        assert found.info.run_id in other.data.tags["continues"]
        assert found.data.tags["continued by"].count(other.info.run_id) == 1


def test_a_run_is_found_among_more_than_a_thousand_experiments(tmp_path: Path) -> None:
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    run = client.create_run(client.create_experiment("oldest"), tags={"pipeline.run": "abc"})
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        for number in range(1100):
            now = int(1000 * time.time()) + number
            row = (f"e{number}", str(tmp_path), "active", now, now, "default")
            columns = "name, artifact_location, lifecycle_stage, creation_time, last_update_time, workspace"
            database.execute(f"INSERT INTO experiments ({columns}) VALUES (?, ?, ?, ?, ?, ?)", row)
    assert len(client.search_experiments(max_results=1000)) == 1000
    found = find_run(client, "abc")
    assert found
    assert found.info.run_id == run.info.run_id


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("track.register=digits@v1", "keeps the aliases latest and v1, v2"),
        ("track.register=digits@latest", "keeps the aliases latest and v1, v2"),
        (f"track.experiment={'e' * 501}", "up to 500 characters"),
    ],
)
def test_a_name_that_mlflow_refuses_after_the_training_is_refused_before(word: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        load("digits", [word])


def test_a_password_with_a_blank_is_refused_and_not_shown(tmp_path: Path) -> None:
    refused = pipeline("train", "digits", f"run.dir={tmp_path}/run", "track.uri=postgresql://u:CANARY b@h/db")
    assert refused.code == 2
    assert "%20" in refused.error
    assert "CANARY" not in refused.err
    assert without_password("mysql://h/db?pwd=CANARY&passphrase=CANARY&ssl=1") == "mysql://h/db?ssl=1"


def test_the_position_in_a_journal_that_lost_rows_is_noticed(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    journal.write_text('{"time": 1}\n{"time": 2}\n')
    assert [offset for offset in range(40) if is_row_start(journal, offset)] == [0, 12, 24]


def test_a_journal_of_one_endless_line_is_damaged(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    with open(journal, "wb") as file:
        file.truncate(1 << 33)
    with pytest.raises(ValueError, match="line 1 is not a row"):
        list(read_events(journal))
