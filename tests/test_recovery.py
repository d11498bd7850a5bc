"""`pipeline k8s recover`: which pods it ends, and what it does when the API server does not answer.

On a real cluster it replaces the pods of dark nodes: see tests/on_cluster.py.
"""

import re
import signal
import socket
import ssl
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from harness import environment

from pipeline.addons.deploy.recovery import ApiServer, end_overdue_pods

NOW = datetime(2026, 11, 23, 12, 0, 30, tzinfo=UTC)


class Api(ApiServer):
    """An API server with some pods, on which requests fail or not. Its clock is NOW."""

    def __init__(self) -> None:
        self.pods, self.requests = list[dict[str, Any]](), list[tuple[str, str, Any, str]]()
        self.answers: dict[str, object] = {}
        """Verb -> the answer to every request of that verb; an exception is raised."""

    def request(
        self, verb: str, path: str, body: Any = None, content_type: str = "application/json"
    ) -> tuple[Any, datetime]:
        self.requests.append((verb, path, body, content_type))
        answer = self.answers.get(verb, {"items": self.pods})
        if isinstance(answer, Exception):
            raise answer
        return answer, NOW

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


def test_an_overdue_pod_is_marked_failed_and_deleted_and_no_other() -> None:
    api = Api()
    api.add("trainer-0-aaaaa", ended_s_ago=None)
    api.add("trainer-1-bbbbb", ended_s_ago=-100)  # within its grace period
    api.add("trainer-1-ccccc", ended_s_ago=15)  # its node may still report its end
    api.add("trainer-1-x7k2p", ended_s_ago=16)
    (line,) = end_overdue_pods(api)
    assert line.startswith("pod trainer-1-x7k2p on node n2: ")
    (_, listed, *_), patch, delete = api.requests
    running = "status.phase%21%3DSucceeded%2Cstatus.phase%21%3DFailed"
    assert listed == f"pods?labelSelector=app%3Dtrainer&fieldSelector={running}"
    assert patch[:2] == ("PATCH", "pods/trainer-1-x7k2p/status")
    assert patch[2]["metadata"] == {"uid": "uid-of-trainer-1-x7k2p", "resourceVersion": "7"}
    status = patch[2]["status"]
    assert status.items() >= {"phase": "Failed", "reason": "NodeDidNotAnswer"}.items()
    assert [(row["type"], row["status"]) for row in status["conditions"]] == [("DisruptionTarget", "True")]
    assert delete[:2] == ("DELETE", "pods/trainer-1-x7k2p")
    assert delete[2]["gracePeriodSeconds"] == 0
    assert delete[2]["preconditions"] == {"uid": "uid-of-trainer-1-x7k2p"}


def test_a_running_pod_of_a_silent_node_is_not_given_its_grace_period() -> None:
    api, by_taint = Api(), "DeletionByTaintManager"
    api.add("trainer-0-aaaaa", -104, by_taint, "True True")  # tainted by a person: it saves now
    api.add("trainer-0-bbbbb", -104, by_taint, "False False")  # its kubelet has stopped it
    api.add("trainer-0-ccccc", -104, "EvictionByEvictionAPI", "False True")
    api.add("trainer-1-ddddd", -105, by_taint, "False True")  # deleted 15 s ago
    api.add("trainer-1-x7k2p", -104, by_taint, "False True")
    (line,) = end_overdue_pods(api)
    assert line.startswith("pod trainer-1-x7k2p on node n2: it was due to end at 12:00:14Z, and ")


@pytest.mark.parametrize("verb", ["GET", "PATCH"])
def test_an_error_is_one_line_and_the_next_round_repeats_the_request(verb: str) -> None:
    api = Api()
    for name in ("trainer-0-abcde", "trainer-1-x7k2p"):
        api.add(name, ended_s_ago=60)
    odd = (None, {}, {"items": [{}]}) if verb == "GET" else ()
    for api.answers[verb] in (OSError("refused\nfor a reason"), ValueError(), *odd):
        found = end_overdue_pods(api)
        assert len(found) == (1 if verb == "GET" else 2), "one for each pod"
        assert all(re.fullmatch("cannot .*; trying again", line) for line in found)
    api.answers.clear()
    assert len(end_overdue_pods(api)) == 2


def test_a_server_with_another_certificate_gets_no_token_and_sigterm_ends_it_with_0(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token\n")
    (tmp_path / "namespace").write_text("vision")
    words = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=kubernetes",
             "-addext", "subjectAltName=IP:127.0.0.1"]  # fmt: skip
    for name in ("other", "ca"):
        command = ["openssl", "req", "-x509", *words, "-keyout", f"{name}.key", "-out", f"{name}.crt"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "other.crt", tmp_path / "other.key")
    code = f"import pathlib, pipeline.addons.deploy.recovery as r; r.recover(pathlib.Path({str(tmp_path)!r}))"
    with socket.create_server(("127.0.0.1", 0)) as server:
        # a proxy of the image is not for the API server
        env = environment(KUBERNETES_SERVICE_HOST="127.0.0.1", HTTPS_PROXY="http://127.0.0.1:1")
        env |= {"KUBERNETES_SERVICE_PORT": str(server.getsockname()[1])}
        command = [sys.executable, "-c", code]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
            assert "namespace vision" in process.stderr.readline()
            with pytest.raises(ssl.SSLError, match="unknown ca"):
                context.wrap_socket(server.accept()[0], server_side=True)
            assert "certificate" in process.stderr.readline()
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            assert process.stderr.read() == ""
