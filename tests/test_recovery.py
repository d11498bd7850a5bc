"""`pipeline k8s recover`: which pods it ends, and how it speaks to an API server.

On a real cluster it replaces the pods of dark nodes: see tests/on_cluster.py.
"""

import json
import re
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from harness import quick

from pipeline.addons.deploy.recovery import ApiServer, end_overdue_pods

PODS = "/api/v1/namespaces/vision/pods"
NOW = datetime(2026, 11, 23, 12, 0, 30, tzinfo=UTC)


def certify(folder: Path) -> None:
    """Write server.pem, a key and certificate of 127.0.0.1, and ca.crt, which is the same CA."""
    words = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=kubernetes",
             "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "ca.crt"]  # fmt: skip
    subprocess.run(["openssl", "req", "-x509", *words], cwd=folder, check=True, capture_output=True)
    (folder / "server.pem").write_text((folder / "key.pem").read_text() + (folder / "ca.crt").read_text())


class Api(ThreadingHTTPServer):
    """An API server with some pods, on which requests fail or not. Its clock is NOW."""

    def __init__(self, account: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.account, self.pods, self.requests = account, list[dict[str, Any]](), list[dict[str, Any]]()
        self.failures: dict[str, tuple[int, str]] = {}
        """Verb -> the status and body that every request of that verb is answered with."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(account / "server.pem")
        self.socket = context.wrap_socket(self.socket, server_side=True)

    def lines(self) -> list[str]:
        return end_overdue_pods(ApiServer(self.account))

    def add(self, name: str, ended_s_ago: float | None, why: str = "", ready: str = "True True") -> None:
        """Add a pod; why: the reason of its deletion; ready: it, and its containers."""
        metadata = {"name": name, "uid": f"uid-of-{name}", "resourceVersion": "7"}
        if ended_s_ago is not None:
            end = NOW - timedelta(seconds=ended_s_ago)
            metadata |= {"deletionTimestamp": end.strftime("%Y-%m-%dT%H:%M:%SZ")}
        kinds = zip(("DisruptionTarget", "Ready", "ContainersReady"), ["True", *ready.split()], strict=True)
        status = {"conditions": [{"type": kind, "status": value, "reason": why} for kind, value in kinds]}
        grace = {"deletionGracePeriodSeconds": 120}
        self.pods.append({"metadata": metadata | grace, "status": status, "spec": {"nodeName": "n2"}})


class _Handler(BaseHTTPRequestHandler):
    server: Api

    def do_GET(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
        headers = self.headers["Authorization"], self.headers["Content-Type"]
        self.server.requests.append(
            {"verb": self.command, "target": self.path, "headers": headers, "body": body}
        )
        answer = json.dumps({"items": self.server.pods} if self.command == "GET" else {})
        status, text = self.server.failures.get(self.command, (200, answer))
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    do_PATCH = do_DELETE = do_GET

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(NOW.timestamp())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    (tmp_path / "token").write_text("a-token\n")
    (tmp_path / "namespace").write_text("vision")
    certify(tmp_path)
    api = Api(tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.server_address[1]))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")  # a proxy of the image is not for the API server
    threading.Thread(target=api.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield api
    api.shutdown()
    api.server_close()


def test_an_overdue_pod_is_marked_failed_and_deleted_and_no_other(api: Api) -> None:
    api.add("trainer-0-aaaaa", ended_s_ago=None)
    api.add("trainer-1-bbbbb", ended_s_ago=-100)  # within its grace period
    api.add("trainer-1-ccccc", ended_s_ago=15)  # its node may still report its end
    api.add("trainer-1-x7k2p", ended_s_ago=16)
    (line,) = api.lines()
    assert line.startswith("pod trainer-1-x7k2p on node n2: ")
    listing, patch, delete = api.requests
    running = "status.phase%21%3DSucceeded%2Cstatus.phase%21%3DFailed"
    assert listing["target"] == f"{PODS}?labelSelector=app%3Dtrainer&fieldSelector={running}"
    assert (patch["verb"], patch["target"]) == ("PATCH", f"{PODS}/trainer-1-x7k2p/status")
    assert patch["headers"] == ("Bearer a-token", "application/strategic-merge-patch+json")
    assert patch["body"]["metadata"] == {"uid": "uid-of-trainer-1-x7k2p", "resourceVersion": "7"}
    assert patch["body"]["status"].items() >= {"phase": "Failed", "reason": "NodeDidNotAnswer"}.items()
    (condition,) = patch["body"]["status"]["conditions"]
    assert condition.items() >= {"type": "DisruptionTarget", "status": "True"}.items()
    assert condition["lastTransitionTime"] == "2026-11-23T12:00:30Z"
    assert (delete["verb"], delete["target"]) == ("DELETE", f"{PODS}/trainer-1-x7k2p")
    assert delete["body"]["gracePeriodSeconds"] == 0
    assert delete["body"]["preconditions"] == {"uid": "uid-of-trainer-1-x7k2p"}
    api.pods.clear()
    (api.account / "token").write_text("rotated")
    assert api.lines() == []
    assert api.requests[-1]["headers"][0] == "Bearer rotated"


def test_a_running_pod_of_a_silent_node_is_not_given_its_grace_period(api: Api) -> None:
    by_taint = "DeletionByTaintManager"
    api.add("trainer-0-aaaaa", -104, by_taint, "True True")  # tainted by a person: it saves now
    api.add("trainer-0-bbbbb", -104, by_taint, "False False")  # its kubelet has stopped it
    api.add("trainer-0-ccccc", -104, "EvictionByEvictionAPI", "False True")
    api.add("trainer-1-ddddd", -105, by_taint, "False True")  # deleted 15 s ago
    api.add("trainer-1-x7k2p", -104, by_taint, "False True")
    (line,) = api.lines()
    assert line.startswith("pod trainer-1-x7k2p on node n2: it was due to end at 12:00:14Z, and ")


@pytest.mark.parametrize("verb", ["GET", "PATCH"])
def test_an_error_is_one_line_and_the_next_round_repeats_the_request(api: Api, verb: str) -> None:
    for name in ("trainer-0-abcde", "trainer-1-x7k2p"):
        api.add(name, ended_s_ago=60)
    answers = [(403, json.dumps({"kind": "Status", "message": "refused\nfor a reason"})), (503, "null")]
    of_listing = [(200, ""), (200, "<html>"), (200, '{"items": [{}]}')] if verb == "GET" else []
    for api.failures[verb] in [*answers, *of_listing]:
        found = api.lines()
        assert len(found) == (1 if verb == "GET" else 2), "one for each pod"
        assert all(re.fullmatch("cannot .*; trying again", line) for line in found)
    api.failures.clear()
    assert len(api.lines()) == 2


def test_a_server_that_does_not_answer_or_has_another_certificate_gets_no_token(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    certify(api.account)
    (line,) = api.lines()
    assert "certificate" in line
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    (line,) = api.lines()
    assert "Connection refused" in line
    assert not api.requests


def test_sigterm_ends_it_at_once_with_0(api: Api) -> None:
    api.add("trainer-1-x7k2p", ended_s_ago=60)
    account = str(api.account)
    code = f"import pathlib, pipeline.addons.deploy.recovery as r; r.recover(pathlib.Path({account!r}))"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        assert "namespace vision" in process.stderr.readline()
        assert "trainer-1-x7k2p" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stderr.read() == ""


def test_outside_a_cluster_it_exits_with_2() -> None:
    result = quick("k8s", "recover")
    assert (result.code, result.error.startswith("this is not a pod with a service account")) == (2, True)
