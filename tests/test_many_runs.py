"""Many runs on one MLflow server can be told apart, name each other, and have one sender each."""

import signal
import socket
from pathlib import Path

from harness import before_each, quick
from server import Server
from test_tracking import job


def test_runs_name_predecessor_and_verification(tmp_path: Path, digits: Path, server: Server) -> None:
    first = job(tmp_path / "first", digits, server.uri, "track.parent=study").finished()
    before = server.run_of(first)
    words = ("track.parent=study", f"run.resume={first.folder}", "train.max_steps=12", "checkpoint.keep=2")
    after = server.run_of(job(tmp_path / "second", digits, server.uri, *words).finished())
    changes = set(after.data.tags["changes"].split()) - set(before.data.tags["changes"].split())
    assert "train.max_steps=12" in changes
    assert "checkpoint.keep=2" not in changes
    before = server.run_of(first)
    parent = before.data.tags["mlflow.parentRunId"]
    assert after.data.tags["mlflow.parentRunId"] == parent
    assert server.client.get_run(parent).info.status == "FINISHED"
    assert after.data.tags["continues"].startswith(f"first (run {before.info.run_id} of experiment ")
    assert before.data.tags["continued by"].startswith(f"second (run {after.info.run_id} of experiment ")

    listing = {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")}
    not_named = quick("verify", str(first.folder), "--steps", "8")
    assert f"not noted in MLflow: set MLFLOW_TRACKING_URI={server.uri} if " in not_named.err
    verified = quick("verify", str(first.folder), code=0, MLFLOW_TRACKING_URI=server.uri)
    assert f"noted in MLflow at {server.uri}" in verified.err
    assert f"on {socket.gethostname()}: identical: " in server.run_of(first).data.tags["verified"]
    assert {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")} == listing


def test_two_senders_send_each_metric_once(tmp_path: Path, digits: Path, server: Server) -> None:
    run = job(tmp_path / "run", digits, server.uri, "train.epochs=1000", "train.max_steps=none")
    run.prelude = before_each("pipeline.train.loop.update_once", "time.sleep(0.1)")
    run.start()
    run.wait_until(lambda: server.runs(run) and server.run_of(run).data.metrics, "a metric", pause=0.3)
    by_hand = quick("sync", str(run.folder), code=75)  # beside a live sender it sends nothing
    assert f" on {socket.gethostname()} since " in by_hand.error
    run.send(signal.SIGKILL)  # the sender outlives its training
    quick("sync", str(run.folder), code=0)  # waits until the sender has noticed
    server.check_points(run)
    assert server.run_of(run).info.status == "FAILED"
