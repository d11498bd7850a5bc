"""MLflow never disturbs a training, and in the end the server has what the journal has."""

import base64
import json
import signal
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import mlflow
import pytest
import torch
import yaml
from harness import Job, Result, before_each, command_line, free_port, kill, quick, read_rows, wait_until
from mlflow.entities import LoggedModelStatus
from object_store import FaultProxy
from server import Server, foreign_server, sync, tracked_job

from pipeline.config.load import RECIPES
from pipeline.record.journal import Journal, read

QUICK = ("absent", "500", "silent")
"""The kinds of bad servers that need no --full."""
TROUBLES = (*QUICK, "401", "malformed")
CASES = [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.full) for kind in TROUBLES]
CANARY = "CANARY"
SECRET = f"{CANARY}/with+{CANARY}?and#{CANARY}"
Trained = dict[str, tuple[Job, Result]]


def job(folder: Path, digits: Path, uri: str | None, *more: str, nproc: int = 1) -> Job:
    tracker = [f"track.uri={uri}"] if uri else []
    return tracked_job(folder, digits, *tracker, "train.epochs=1", "train.max_steps=8", *more, nproc=nproc)


@contextmanager
def bad_servers() -> Iterator[dict[str, str]]:
    """Start a server of each bad kind and yield their addresses."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,  # the kernel accepts, and nobody replies
        foreign_server(500, lambda _: [b"broken"]) as (broken, _),
        foreign_server(401, lambda _: [b'{"error_code": "UNAUTHENTICATED"}']) as (refusing, _),
        foreign_server(200, lambda _: [b'{"a": [']) as (malformed, _),
    ):
        absent, waiting = (f"http://127.0.0.1:{port}" for port in (free_port(), silent.getsockname()[1]))
        yield dict(zip(TROUBLES, (absent, broken, waiting, refusing, malformed), strict=True))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, digits: Path, full: bool) -> Trained:
    """Run the same training without a tracker and with each kind of bad server."""
    folder = tmp_path_factory.mktemp("runs")
    with bad_servers() as uris, ThreadPoolExecutor(2) as pool:
        uris["none"] = "none"
        jobs = {kind: job(folder / kind, digits, uri) for kind, uri in uris.items()
                if full or kind in (*QUICK, "none")}  # fmt: skip
        results = pool.map(Job.run, jobs.values())
        return {kind: (jobs[kind], result) for kind, result in zip(jobs, results, strict=True)}


@pytest.fixture(scope="module")
def delivered(trained: Trained, server: Server) -> dict[str, Result]:
    """Send each of these runs to a good server, set by either variable, or start it again."""

    def send(kind: str) -> Result:
        run, _ = trained[kind]
        if kind == "absent":
            return quick(*run.train_words(), f"track.uri={server.uri}")
        name = "PIPELINE_TRACK_URI" if kind == "500" else "MLFLOW_TRACKING_URI"
        return sync(run, **{name: server.uri})

    kinds = [kind for kind in TROUBLES if kind in trained]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(kinds, pool.map(send, kinds), strict=True))


@pytest.mark.fault("D1")
@pytest.mark.parametrize("kind", CASES)
def test_a_bad_server_changes_nothing_and_gets_the_run_later(
    trained: Trained, delivered: dict[str, Result], server: Server, kind: str
) -> None:
    (plain, without), (run, result) = trained["none"], trained[kind]
    assert result.ended_with(0).done == without.done
    assert run.journal("train/", "val/") == plain.journal("train/", "val/")
    events = [row["event"] for row in read_rows(run.folder / "journal.jsonl") if "event" in row]
    assert events == ["created", "started", "evaluated", "saved", "ended"]
    (line,) = [line for line in result.err.splitlines() if "MLflow" in line]
    assert "pipeline sync" in line
    assert "Traceback" not in result.err
    assert result.seconds <= without.seconds + 60, "a silent server is given up"
    run.wait_gone(1)
    delivered[kind].ended_with(0)
    assert_complete(server, run)


def test_sending_again_adds_nothing(trained: Trained, delivered: dict[str, Result], server: Server) -> None:
    run, _ = trained["500"]
    info = server.run_of(run).info
    # as if sending had been interrupted
    server.client.create_logged_model(info.experiment_id, "model", info.run_id, {"pipeline.step": "0"})
    assert sync(run, MLFLOW_TRACKING_URI=server.uri).code == 0
    (run.folder / "mlflow.json").unlink()  # as if the record of what was sent had been lost
    assert sync(run, MLFLOW_TRACKING_URI=server.uri).code == 0
    assert server.run_of(run).info.run_id == info.run_id
    assert_complete(server, run)
    again = quick(*run.train_words(), f"track.uri={server.uri}", code=0)
    assert "sending what" not in again.err, "the server has all"
    with foreign_server() as (uri, _):
        assert "not as MLflow does" in sync(run, MLFLOW_TRACKING_URI=uri, code=75).error


def test_without_a_tracker_no_file_of_one_is_left(trained: Trained) -> None:
    run, _ = trained["none"]
    assert not {path.name for path in run.folder.iterdir()} & {"mlflow.json", "mlflow.lock", "sync.log"}
    assert "track.uri=none" in sync(run, code=2).error


@pytest.mark.full
def test_mlflow_shows_the_complete_run(tmp_path: Path, digits: Path, server: Server) -> None:
    """test_delivery.py has it for a run that is sent from its folder alone."""
    run = job(
        tmp_path / "story", digits, server.uri, "track.report=true", "track.register=story-digits@best",
        "evaluate.every=4 steps", "track.experiment=story",
    ).finished()  # fmt: skip
    assert "MLflow" not in run.log()
    found, client = server.run_of(run), server.client
    run_id, tags = found.info.run_id, found.data.tags
    server.check_points(run)
    images = [Path(file.path).name for file in client.list_artifacts(run_id, "images")]
    figures = sorted(name.split("+timestamp")[0] for name in images if name.endswith(".png"))
    names = ("classes", "confusion", "reliability")
    assert figures == sorted(f"{name}+step+{step}" for name in names for step in (4, 8)), "each once"
    report = {path.name for path in (run.folder / "report").iterdir() if path.is_file()}
    assert report == {"index.html", "curves.png", "confusion.png", "classes.png", "reliability.png"}
    assert {Path(file.path).name for file in client.list_artifacts(run_id, "report")} == report
    page = Path(client.download_artifacts(run_id, "report/index.html", str(tmp_path)))
    assert page.read_text() == (run.folder / "report" / "index.html").read_text(), "of the finished run"
    assert "finished: `done step=8" in tags["mlflow.note.content"]
    assert "pipeline train config.yaml" in tags["mlflow.note.content"]
    (data_set,) = found.inputs.dataset_inputs
    assert tags["data"].startswith(data_set.dataset.digest)
    assert (tags["recipe"], tags["world"]) == ("digits", "1")
    kind = client.get_experiment(found.info.experiment_id).tags["mlflow.experimentKind"]
    assert kind == "custom_model_development"
    (version,) = client.search_model_versions("name = 'story-digits'")
    assert client.get_model_version_by_alias("story-digits", "best").version == version.version
    assert f"system/{socket.gethostname()}/rss_mib" in found.data.metrics

    best = read_rows(run.folder / "journal.jsonl")[-1]["best"]
    tops = []
    for model in (str(run.folder / "checkpoints" / best["file"]), "models:/story-digits@best"):
        words = ("predict", model, str(digits / "val" / "3"), "--json")
        rows = json.loads(quick(*words, MLFLOW_TRACKING_URI=server.uri).out)["predictions"]
        tops.append({(row["image"], top["class"]): top["probability"] for row in rows for top in row["top"]})
    assert tops[0] == pytest.approx(tops[1], abs=1e-5)


@pytest.mark.fault("D1")
@pytest.mark.full
def test_an_outage_costs_no_step_or_point(tmp_path: Path, digits: Path, server: Server, outage: int) -> None:
    words = ("train.epochs=1000", "train.max_steps=none", "evaluate.every=1000 epochs",
             "checkpoint.every=1000 epochs")  # fmt: skip
    run = job(tmp_path / "outage", digits, server.uri, *words).start()
    run.wait_until(lambda: server.runs(run) and server.run_of(run).data.metrics, "first point", pause=0.3)
    down = 1000 * time.time()
    server.kill()
    time.sleep(outage)
    up = 1000 * time.time()
    server.start().wait_ready()
    step = run.step()
    run.wait_until(lambda: server.points(server.run_of(run))[-1][0] > step, "delivery afterwards", pause=0.3)
    assert "MLflow" not in run.stop(code=75).err

    run.arguments.append(f"train.max_steps={run.step() + 3}")
    assert run.run().code == 0
    assert [row["step"] for row in run.trace()] == list(range(1, run.step() + 1))
    assert_complete(server, run)
    data = server.run_of(run).data
    assert (data.params["train.max_steps"], data.tags["train.max_steps"]) == ("None", str(run.step()))
    assert not [key for key in data.tags if key.startswith("data.")], "what did not change has no tag"
    rows = [row for row in read_rows(run.folder / "journal.jsonl") if "metrics" in row]
    times = [(row["time"], row["metrics"].get("time/step_ms")) for row in rows]
    with_it = statistics.median(step_ms for at, step_ms in times if step_ms and not down < at <= up)
    without = statistics.median(step_ms for at, step_ms in times if step_ms and down < at <= up)
    assert without <= with_it + 1000, "ms: a call that blocks would cost seconds"


@pytest.mark.full
@pytest.mark.fault("D2")
def test_crash_and_stop_are_one_run_with_a_true_status(tmp_path: Path, digits: Path, server: Server) -> None:
    run = job(tmp_path / "killed", digits, server.uri, "track.required=true", "checkpoint.every=5 steps",
              "data.workers=2", "train.epochs=8", "train.max_steps=none", nproc=2)  # fmt: skip

    def state() -> tuple[str, int]:
        found = server.run_of(run)
        return found.info.status, len(server.points(found))

    def has_new_points(before: int) -> bool:
        if not (run.journal("") and server.runs(run)):
            return False
        status, points = state()
        return status == "RUNNING" and points > before

    run.start()
    run.wait_until(lambda: run.step() >= 6 and has_new_points(0), "points", pause=0.3)
    first = server.run_of(run).info.run_id
    kill(run.ranks()[0], signal.SIGKILL)
    run.wait_gone(5)
    wait_until(lambda: state()[0] == "FAILED", "status FAILED")
    points = state()[1]

    run.start()
    run.wait_until(lambda: has_new_points(points), "new points", pause=0.3)
    kill(run.ranks()[1], signal.SIGTERM)
    assert "MLflow" not in run.wait(code=75).err
    assert state()[0] == "KILLED"

    assert run.run().code == 0
    assert server.run_of(run).info.run_id == first
    assert_complete(server, run)


@pytest.mark.full
def test_the_last_delivery_may_take_longer_than_run_timeout(tmp_path: Path, digits: Path) -> None:
    with bad_servers() as uris:  # a silent server is given up after 7 s
        result = job(tmp_path / "run", digits, uris["silent"], "run.timeout=5", nproc=2).run()
    assert (result.code, result.done["step"]) == (0, "8"), result.err


def test_a_required_tracker_that_is_missing_is_named_at_once(tmp_path: Path, digits: Path) -> None:
    uri = f"http://127.0.0.1:{free_port()}"
    run = job(tmp_path / "run", digits, uri, "track.required=true")
    error = run.run(code=2).error
    assert (uri in error, "Connection refused" in error) == (True, True)
    assert not run.journal("")


@pytest.mark.fault("H3")
@pytest.mark.full
def test_a_password_is_used_and_written_nowhere(tmp_path: Path, digits: Path, server: Server) -> None:
    with FaultProxy(server.uri) as proxy:
        recipe = yaml.safe_load((RECIPES / "digits.yaml").read_text())
        recipe["track"] = {"uri": proxy.endpoint.replace("//", f"//user:{SECRET}@")}
        (tmp_path / "secretive.yaml").write_text(yaml.safe_dump(recipe))
        run = job(tmp_path / "run", digits, None, "train.max_steps=4")
        run.arguments[0] = str(tmp_path / "secretive.yaml")
        run.start()
        senders = run.wait_until(
            lambda: [line for line in map(command_line, run.processes()) if " sync " in line], "sender"
        )
        result = run.wait(code=0)
        assert "MLflow" not in result.err
    assert CANARY not in " ".join(senders) + result.err + result.out
    artifacts = (server.folder / "artifacts").rglob("*")
    for path in (server.folder / "mlflow.db", *artifacts, *run.folder.rglob("*")):
        assert path.is_dir() or CANARY.encode() not in path.read_bytes(), path
    assert proxy.authorizations == {"Basic " + base64.b64encode(f"user:{SECRET}".encode()).decode()}
    assert server.run_of(run).info.status == "FINISHED"

    refused = sync(run, MLFLOW_TRACKING_URI=f"http://user:{SECRET}@127.0.0.1:{free_port()}")
    assert (refused.code, "Connection refused" in refused.error, CANARY in refused.err) == (75, True, False)


def test_a_torn_line_is_cut_off_and_no_point_is_written_twice(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, pytest.fail)
    for step in range(1, 5):
        journal.log_metrics(step, {"train/loss": 1 / step, "time/step_ms": 8.0, "bad": float("nan")})
    journal.log_metrics(4, {"train/loss": 9.0, "val/top1": 0.5})
    content = path.read_bytes()
    path.write_bytes(content + b'{"time": 1, "step": 5, "metr')
    assert b"".join(json.dumps(row).encode() + b"\n" for row, _ in read(path)) == content

    resumed = Journal(path, pytest.fail, resumed_at=2)
    assert resumed.run_id == journal.run_id
    for step, loss in ((3, 1 / 3), (4, 0.9), (4, 0.8), (5, 0.2)):
        resumed.log_metrics(step, {"train/loss": loss, "time/step_ms": 9.0})
    assert path.read_bytes().startswith(content)
    rows = [(row["step"], row["metrics"]) for row in read_rows(path) if "step" in row]
    assert rows[:4] == [(step, {"train/loss": 1 / step, "time/step_ms": 8.0}) for step in range(1, 5)]
    assert rows[4:] == [
        (4, {"val/top1": 0.5}), (4, {"train/loss": 0.9}), (5, {"train/loss": 0.2, "time/step_ms": 9.0}),
    ]  # fmt: skip


def test_a_run_killed_before_a_save_shows_the_figures_of_its_receipt(tmp_path: Path, digits: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    every = ("evaluate.every=4 steps", "checkpoint.every=4 steps", "track.every=1 steps")
    run = job(tmp_path / "run", digits, uri, *every, "train.max_steps=12")
    kill_at_8 = "if words[0].state.step == 8: os.kill(os.getpid(), 9)"
    run.prelude = before_each("pipeline.train.loop.save", kill_at_8)
    assert run.run().code == -signal.SIGKILL
    run.wait_gone(10)
    discarded = run.journal("val/", "train/loss")
    assert {step for step, _, _ in discarded} == set(range(1, 9))
    run.prelude, run.nproc = "", 2  # whose weights differ
    run.finished()

    evaluations = json.loads((run.folder / "receipt.json").read_text())["evaluations"]
    receipt = {row["step"]: row for row in evaluations}
    journal = {(key, step): value for step, key, value in run.journal("val/", "train/loss")}
    before = {step: value for step, key, value in discarded if key == "val/loss"}
    assert receipt[8]["loss"] == journal["val/loss", 8] != before[8]
    assert receipt[8]["train_loss"] == journal["train/loss", 8]
    client = mlflow.MlflowClient(uri)
    (found,) = client.search_runs(["1"])
    assert found.data.metrics["val/loss"] == receipt[12]["loss"]
    history = client.get_metric_history(found.info.run_id, "val/loss")
    shown = {point.step: point.value for point in sorted(history, key=lambda point: point.timestamp)}
    assert shown == {step: row["loss"] for step, row in receipt.items()}
    counts = Counter(point.step for point in client.get_metric_history(found.info.run_id, "time/step_ms"))
    assert set(counts.values()) == {1}


def assert_complete(server: Server, job: Job) -> None:
    """Check that the server has the run once and finished, with all points, files and its model."""
    run = server.run_of(job)
    rows = read_rows(job.folder / "journal.jsonl")
    info = run.info
    assert (info.status, info.start_time, info.end_time) == ("FINISHED", rows[0]["time"], rows[-1]["time"])
    server.check_points(job)
    batch = yaml.safe_load((job.folder / "config.yaml").read_text())["batch"]["global"]
    assert run.data.params["batch.global"] == str(batch)
    assert run.data.tags["torch"] == torch.__version__
    files = [file.path for file in server.client.list_artifacts(info.run_id) if not file.is_dir]
    assert sorted(files) == ["config.yaml", "journal.jsonl", "plan.json", "receipt.json"]
    mlflow.set_tracking_uri(server.uri)
    for file in files:
        copy = mlflow.artifacts.download_artifacts(run_id=info.run_id, artifact_path=file)
        assert Path(copy).read_bytes() == (job.folder / file).read_bytes()
    (model,) = server.models(job)
    assert model.status == LoggedModelStatus.READY
    metrics = {metric.key for metric in server.client.get_logged_model(model.model_id).metrics}
    assert metrics >= {"val/top1", "val/loss"}
    assert [output.model_id for output in run.outputs.model_outputs] == [model.model_id]
