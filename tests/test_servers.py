"""Servers of other versions of MLflow, databases and artifact stores take all of a run."""

import shutil
import sqlite3
from pathlib import Path

import mlflow
import pytest
from harness import Job, pipeline
from mlflow_servers import NAME, check, look, python_of, send, server_of, train

ROWS = (
    ("2.22", "SQLite", "the server"),
    pytest.param("2.22", "PostgreSQL", "the server, with a password", marks=pytest.mark.long),
    ("3.1", "SQLite", "S3"),
    ("3.17", "SQLite", "S3"),
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Job:
    """Train a run that no server has."""
    return train(tmp_path_factory.mktemp("original") / "run", digits)


@pytest.fixture
def run(original: Job, tmp_path: Path) -> Job:
    return Job(Path(shutil.copytree(original.folder, tmp_path / "run")), original.arguments)


@pytest.mark.full
@pytest.mark.parametrize(("version", "database", "store"), ROWS)
def test_a_server_gets_all_of_a_run_once(
    version: str, database: str, store: str, run: Job, tmp_path: Path, digits: Path
) -> None:
    if python_of(version) is None:
        pytest.skip(f"an environment with MLflow {version} is missing: make servers")
    if database == "PostgreSQL" and not shutil.which("initdb"):
        pytest.skip("PostgreSQL's initdb is missing")
    with server_of(version, database, store, tmp_path) as (server, client):
        first = send(run, server, client)
        again = send(run, server, client)
        (run.folder / "mlflow.json").unlink()  # as if the record of what was sent had been lost
        repeated = send(run, server, client)
        arrived = look(run, server)
        image = next(digits.glob("val/3/*.png"))
        predicted = pipeline("predict", f"models:/{NAME}@best", str(image), MLFLOW_TRACKING_URI=server.uri, **client)
    assert (first.code, again.code, repeated.code) == (0, 0, 0), first.err + again.err + repeated.err
    check(run, arrived)
    assert arrived.model == ("files of the run" if version == "2.22" else "logged model")
    assert ("this server has no logged models" in first.err) == (version == "2.22")
    assert predicted.code == 0, predicted.err
    assert str(image) in predicted.out


@pytest.mark.full
def test_a_part_that_is_refused_holds_back_nothing_else(run: Job, tmp_path: Path) -> None:
    """The artifact store is away: metrics, status and description arrive, and the rest later."""
    with server_of("3.17", "SQLite", "S3", tmp_path) as (server, client):
        away = client | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "MLFLOW_S3_ENDPOINT_URL": "http://127.0.0.1:9"}
        refused = send(run, server, away | {"AWS_MAX_ATTEMPTS": "1"})
        found = server.run_of(run)
        points = server.points(found)
        later = send(run, server, client)
        arrived = look(run, server)
    assert refused.code == 75
    for part in ("files", "figures", "model"):
        assert part in refused.error
        assert f"{part} not sent, and tried again later: " in refused.err
    assert found.info.status == "FINISHED"
    assert "mlflow.note.content" in found.data.tags
    assert points == arrived.points
    assert later.code == 0, later.err
    check(run, arrived)


@pytest.mark.full
def test_a_model_of_which_the_server_has_some_files_is_completed(run: Job, tmp_path: Path) -> None:
    """The store breaks after some files of the model: the next `sync` sends the others."""
    with server_of("3.17", "SQLite", "the server", tmp_path) as (server, client):
        folder = tmp_path / "artifacts"
        send(run, server, client)
        mlflow.set_tracking_uri(server.uri)
        ours = server.run_of(run)
        (model,) = server.client.search_logged_models([ours.info.experiment_id])
        (weights,) = folder.rglob("model.pt2")
        (others,) = folder.rglob("requirements.txt")
        others.unlink()
        before = weights.stat().st_mtime_ns
        with sqlite3.connect(tmp_path / "mlflow.db") as database:
            database.execute("UPDATE logged_models SET status = 1")  # LoggedModelStatus.PENDING
        (run.folder / "mlflow.json").unlink()
        result = send(run, server, client)
        (completed,) = server.client.search_logged_models([ours.info.experiment_id])
        assert result.code == 0, result.err
        assert completed.model_id == model.model_id
        assert completed.status == "READY"
        assert others.exists()
        assert weights.stat().st_mtime_ns == before
