"""A server of MLflow 2, and one whose files are in S3, get what they can take of a run."""

import shutil
from pathlib import Path

import boto3
import mlflow
import pytest
from harness import Job, pipeline
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.store.artifact.s3_artifact_repo import _cached_get_s3_client
from object_store import S3Server, Weed
from server import Server, train

MLFLOW_2 = Path(__file__).parent.parent / "build/mlflow-2.22/bin/python"
FILES = {"config.yaml", "journal.jsonl", "plan.json", "receipt.json"}

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Job:
    """Train a run that no server has."""
    return train(tmp_path_factory.mktemp("original") / "run", digits, "track.register=digits-on-servers@best")


@pytest.fixture
def run(original: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    return Job(Path(shutil.copytree(original.folder, tmp_path / "run")), original.arguments)


def check_metrics_and_files(run: Job, server: Server) -> None:
    """Fail unless the server has all of a finished run but its model, and each metric once."""
    found = server.run_of(run)
    mlflow.set_tracking_uri(server.uri)
    repository = get_artifact_repository(found.info.artifact_uri)
    assert found.info.status == "FINISHED"
    server.check_points(run)
    assert found.data.params["model.arch"] == "shufflenet_v2_x0_5"
    assert {"recipe", "torch", "mlflow.note.content"} <= found.data.tags.keys()
    assert {file.path for file in repository.list_artifacts()} >= FILES
    assert [file.path for file in repository.list_artifacts("images") if file.path.endswith(".png")]
    assert len(found.inputs.dataset_inputs) == 1


@pytest.mark.skipif(not MLFLOW_2.exists(), reason="an environment with MLflow 2.22 is missing: make servers")
def test_a_server_of_mlflow_2_gets_all_but_the_model_once(run: Job, tmp_path: Path) -> None:
    server = Server(tmp_path, python=str(MLFLOW_2)).start().wait_ready()
    try:
        results = [pipeline("sync", str(run.folder), MLFLOW_TRACKING_URI=server.uri) for _ in range(2)]
        check_metrics_and_files(run, server)
    finally:
        server.kill()
    for result in results:
        assert result.code == 75, result.err
        assert "model: " in result.error
        assert "files: " not in result.error


def test_an_artifact_store_that_is_away_holds_back_no_metric(
    run: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3: S3Server = Weed(tmp_path / "s3").start()
    client = {**s3.env, "MLFLOW_S3_ENDPOINT_URL": s3.endpoint}
    away = client | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "MLFLOW_S3_ENDPOINT_URL": "http://127.0.0.1:9"}
    for name, value in client.items():
        monkeypatch.setenv(name, value)
    _cached_get_s3_client.cache_clear()  # this process may have the credentials of another server
    boto3.setup_default_session()
    root = f"s3://{s3.wait_ready().make_bucket()}/mlflow"
    server = Server(tmp_path, "--no-serve-artifacts", "--default-artifact-root", root, **client).start().wait_ready()
    try:
        refused = pipeline("sync", str(run.folder), MLFLOW_TRACKING_URI=server.uri, **away | {"AWS_MAX_ATTEMPTS": "1"})
        found = server.run_of(run)
        points = server.points(found)
        later = pipeline("sync", str(run.folder), MLFLOW_TRACKING_URI=server.uri, **client)
        check_metrics_and_files(run, server)
        version = server.client.get_model_version_by_alias("digits-on-servers", "best")
        assert server.points(server.run_of(run)) == points
        assert server.client.get_logged_model(version.source.removeprefix("models:/")).artifact_location.startswith(
            root
        )
    finally:
        server.kill()
        s3.kill()
    assert (refused.code, later.code) == (75, 0), refused.err + later.err
    assert all(f"{part}: " in refused.error for part in ("files", "figures", "model"))
    assert found.info.status == "FINISHED"
    assert "mlflow.note.content" in found.data.tags
