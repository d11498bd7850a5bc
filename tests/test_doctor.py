"""The doctor: one injected fault a check, named with its remedy, before anything starts."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from harness import Result, pipeline

from pipeline import verdict
from pipeline.config import load
from pipeline.verdict import NotFiniteError


def examine(tmp_path: Path, digits: Path, *words: str, **env: str) -> Result:
    return pipeline(
        "doctor",
        "digits",
        f"data.root={digits}",
        f"run.dir={tmp_path / 'run'}",
        *words,
        **{"MLFLOW_TRACKING_URI": ""} | env,
    )


def findings(result: Result) -> dict[str, dict[str, Any]]:
    rows = json.loads(result.out)["findings"]
    assert all(set(row) == {"check", "ok", "line", "remedy"} for row in rows)
    return {row["check"]: row for row in rows}


def test_where_all_is_well_it_says_so_and_leaves_nothing(tmp_path: Path, digits: Path) -> None:
    result = examine(tmp_path, digits, "--json")
    assert result.code == 0, result.err
    assert all(row["ok"] for row in findings(result).values())
    assert list(tmp_path.iterdir()) == []
    said = examine(tmp_path, digits)
    assert said.out.strip() == "digits can run here"
    assert "1,437 images to train" in said.err


@pytest.mark.parametrize(
    ("check", "words", "says"),
    [
        ("recipe", ("train.epoch=1",), "did you mean train.epochs?"),
        ("run folder", ("run.dir=/etc/hostname/run",), "give a folder that can"),
        ("data", ("data.source=folder", "data.root=/no/such"), "/no/such"),
        ("plan", ("batch.global=97", "--world", "2"), "the nearest batch.global that works is 96 or 98"),
        ("device", ("run.device=cuda",), "cpu trains without one"),
    ],
)
def test_what_no_retry_mends_is_exit_2(
    tmp_path: Path, digits: Path, check: str, words: tuple[str, ...], says: str
) -> None:
    if check == "device" and Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    result = examine(tmp_path, digits, "--json", *words)
    assert result.code == 2
    found = findings(result)
    assert [name for name, row in found.items() if not row["ok"]] == [check]
    assert says in found[check]["line"] + found[check]["remedy"]
    assert result.error


def test_the_verdict_of_the_last_start_stands(tmp_path: Path, digits: Path) -> None:
    config = load("digits", [f"data.root={digits}", f"run.dir={tmp_path / 'run'}"])
    config.run_dir.mkdir()
    verdict.leave(config.run_dir, NotFiniteError("the loss is nan at step 7"), config.model_dump_json())
    result = examine(tmp_path, digits, "--json")
    assert result.code == 3
    assert findings(result)["last start"]["line"] == "the loss is nan at step 7"
    assert examine(tmp_path, digits, "train.epochs=13").code == 0, "another request"


def test_a_node_is_looked_at_as_the_one_it_is(tmp_path: Path, digits: Path) -> None:
    node = {"PET_NNODES": "3", "PET_NPROC_PER_NODE": "2", "PET_RDZV_ENDPOINT": "localhost:29500"}
    said = examine(tmp_path, digits, **node)
    assert said.code == 0, said.err
    assert "6 processes on 3 nodes" in said.err
    assert "localhost is 127.0.0.1" in said.err


def test_a_name_that_does_not_resolve_is_tried_again(
    tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.operate import checks

    monkeypatch.setattr(checks, "_NAMES_TIMEOUT_S", 1)
    with pytest.raises(verdict.TemporaryError, match=r"no-such-node\.invalid does not resolve"):
        checks.names("no-such-node.invalid:29500")


@pytest.mark.parametrize(
    ("status", "says"),
    [(401, "set MLFLOW_TRACKING_USERNAME"), (403, "--allowed-hosts naming 127.0.0.1:"), (500, "server's log")],
)
def test_what_mlflow_refuses_is_explained_and_stops_nobody(
    tmp_path: Path, digits: Path, status: int, says: str
) -> None:
    with _server(status) as uri:
        result = examine(tmp_path, digits, "--json", MLFLOW_TRACKING_URI=uri)
        assert result.code == 0, "training needs no tracker"
        assert says in findings(result)["MLflow"]["remedy"]
        required = examine(tmp_path, digits, "track.required=true", MLFLOW_TRACKING_URI=uri)
        assert required.code == 75
    gone = examine(tmp_path, digits, "--json", MLFLOW_TRACKING_URI=uri)
    assert "Connection refused" in findings(gone)["MLflow"]["line"]


@contextmanager
def _server(status: int) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
