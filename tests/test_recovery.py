"""`pipeline k8s recover` against an HTTPS server that plays the part of Kubernetes' API."""

import json
import os
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from harness import environment, pipeline

from pipeline.addons.deploy import recovery
from pipeline.addons.deploy.recovery import ApiServer, connect, end_overdue_pods
from pipeline.errors import RequestError

PODS = "/api/v1/namespaces/vision/pods"
LIST = f"{PODS}?{recovery._SELECTOR}"
NOW = datetime(2026, 11, 23, 12, 0, 30, tzinfo=UTC)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with ca.crt and with server.pem, the key and certificate of 127.0.0.1."""
    folder = tmp_path_factory.mktemp("certificates")
    ca, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer, subject = (
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        for name in ("kubernetes", "apiserver")
    )

    def certificate(name: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType) -> bytes:
        builder = x509.CertificateBuilder(issuer, name, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(datetime(2020, 1, 1)).not_valid_after(datetime(2120, 1, 1))
        signed = builder.add_extension(extension, critical=True).sign(ca, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)

    (folder / "ca.crt").write_bytes(certificate(issuer, ca, x509.BasicConstraints(ca=True, path_length=None)))
    names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "server.pem").write_bytes(server.private_bytes(*pem) + certificate(subject, server, names))
    return folder


class Api:
    """Kubernetes' API for the pods of one namespace: selectors, preconditions and a clock."""

    def __init__(self, folder: Path, certificate: Path) -> None:
        self.account, self.pods, self.requests = folder, list[dict[str, Any]](), list[dict[str, Any]]()
        self.errors: dict[str, tuple[int, str]] = {}
        """Verb -> the status and body that every request of that verb is answered with."""
        self.clock, self.is_slow = NOW, False
        self.release = threading.Event()
        handler = type("Handler", (_Handler,), {"api": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]

    def add(
        self, name: str, *, ended_s_ago: float | None, phase: str = "Running", app: str = "trainer"
    ) -> None:
        metadata = {"name": name, "uid": f"uid-of-{name}", "resourceVersion": "7", "labels": {"app": app}}
        if ended_s_ago is not None:
            end = self.clock - timedelta(seconds=ended_s_ago)
            metadata |= {"deletionTimestamp": end.strftime("%Y-%m-%dT%H:%M:%SZ")}
        self.pods.append({"metadata": metadata, "spec": {"nodeName": "n2"}, "status": {"phase": phase}})

    def answer(self, verb: str, target: str, body: Any) -> tuple[int, str]:
        if self.is_slow:
            self.release.wait()
        if verb in self.errors:
            return self.errors[verb]
        url = urlsplit(target)
        if verb == "GET":
            return 200, json.dumps({"items": self._selected(parse_qs(url.query))})
        name = url.path.removeprefix(f"{PODS}/").removesuffix("/status")
        pod = next((pod for pod in self.pods if pod["metadata"]["name"] == name), None)
        if not pod:
            return 404, json.dumps({"message": f'pods "{name}" not found'})
        expected = body["metadata"] if verb == "PATCH" else body["preconditions"]
        if any(pod["metadata"][key] != value for key, value in expected.items()):
            return 409, json.dumps(
                {"message": f'Operation cannot be fulfilled on pods "{name}": it was modified'}
            )
        if verb == "PATCH":
            pod["status"] |= body["status"]
        else:
            self.pods.remove(pod)
        return 200, json.dumps(pod)

    def _selected(self, query: dict[str, list[str]]) -> list[dict[str, Any]]:
        labels = dict(part.split("=") for part in query["labelSelector"][0].split(","))
        excluded = [part.removeprefix("status.phase!=") for part in query["fieldSelector"][0].split(",")]
        return [
            pod
            for pod in self.pods
            if labels.items() <= pod["metadata"]["labels"].items() and pod["status"]["phase"] not in excluded
        ]


class _Handler(BaseHTTPRequestHandler):
    api: Api

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        self.api.requests.append({
            "verb": self.command, "target": self.path, "token": self.headers["Authorization"],
            "type": self.headers["Content-Type"], "body": body,
        })  # fmt: skip
        status, text = self.api.answer(self.command, self.path, body)
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    do_PATCH = do_DELETE = do_GET

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(self.api.clock.timestamp())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def api(tmp_path: Path, certificates: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    account = tmp_path / "serviceaccount"
    account.mkdir()
    (account / "token").write_text("a-token\n")
    (account / "namespace").write_text("vision")
    (account / "ca.crt").write_bytes((certificates / "ca.crt").read_bytes())
    api = Api(account, certificates / "server.pem")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")  # a proxy of the image is not for the API server
    threading.Thread(target=api.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield api
    api.release.set()
    api.server.shutdown()
    api.server.server_close()


def lines(api: Api) -> list[str]:
    return list(end_overdue_pods(connect(api.account)))


def test_an_overdue_pod_is_marked_failed_and_deleted(api: Api) -> None:
    api.add("trainer-1-x7k2p", ended_s_ago=16)
    (line,) = lines(api)
    assert line.startswith("pod trainer-1-x7k2p on node n2: ")
    listing, patch, delete = api.requests
    assert (listing["verb"], listing["target"]) == ("GET", LIST)
    assert (patch["verb"], patch["target"]) == ("PATCH", f"{PODS}/trainer-1-x7k2p/status")
    assert patch["type"] == "application/strategic-merge-patch+json"
    assert patch["body"]["metadata"] == {"uid": "uid-of-trainer-1-x7k2p", "resourceVersion": "7"}
    (condition,) = patch["body"]["status"].pop("conditions")
    assert patch["body"]["status"].items() >= {"phase": "Failed", "reason": "NodeDidNotAnswer"}.items()
    assert (condition["type"], condition["lastTransitionTime"]) == (
        "DisruptionTarget",
        "2026-11-23T12:00:30Z",
    )
    assert (delete["verb"], delete["target"]) == ("DELETE", f"{PODS}/trainer-1-x7k2p")
    assert delete["body"]["gracePeriodSeconds"] == 0
    assert delete["body"]["preconditions"] == {"uid": "uid-of-trainer-1-x7k2p"}
    (api.account / "token").write_text("rotated")
    assert (lines(api), api.pods) == ([], [])
    assert [request["token"] for request in api.requests] == [*3 * ["Bearer a-token"], "Bearer rotated"]


def test_the_condition_of_the_taint_manager_is_kept(api: Api) -> None:
    api.add("trainer-0-abcde", ended_s_ago=20)
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
    api.pods[0]["status"]["conditions"] = [{"type": "Ready", "status": "False"}, condition]
    assert len(lines(api)) == 1
    assert "conditions" not in api.requests[1]["body"]["status"]


def test_no_other_pod_is_touched_by_the_clock_of_the_api_server(api: Api) -> None:
    api.add("trainer-0-aaaaa", ended_s_ago=None)
    api.add("trainer-1-bbbbb", ended_s_ago=-100)  # within its grace period
    api.add("trainer-1-ccccc", ended_s_ago=15)  # its node may still report its end
    api.add("trainer-2-ddddd", ended_s_ago=500, phase="Failed")
    api.add("trainer-3-eeeee", ended_s_ago=500, phase="Succeeded")
    api.add("mlflow-fffff", ended_s_ago=500, app="mlflow")
    assert lines(api) == []
    assert [request["target"] for request in api.requests] == [LIST]


def test_a_pod_that_has_changed_since_the_list_is_left_alone(api: Api) -> None:
    api.add("trainer-1-bbbbb", ended_s_ago=60)
    connection = connect(api.account)
    answer = connection.request("GET", LIST.partition("/vision/")[2])
    api.pods[0]["metadata"] |= {"uid": "another", "resourceVersion": "8"}  # trainer-1 of the next generation
    with pytest.raises(recovery.ApiError, match="answer 409"):
        recovery._end(connection, answer[0]["items"][0], answer[1])
    assert [pod["status"]["phase"] for pod in api.pods] == ["Running"]


@pytest.mark.parametrize("verb", ["GET", "PATCH"])
def test_an_error_of_the_api_is_one_line_and_the_next_round_repeats_the_request(api: Api, verb: str) -> None:
    api.add("trainer-1-x7k2p", ended_s_ago=60)
    answers = [(403, json.dumps({"kind": "Status", "message": "refused\nfor a reason"})), (503, "null")]
    for status, text in (*answers, (200, ""), (200, "<html>502</html>"), (200, '{"items": [{}]}')):
        if verb == "GET" or status != 200:
            api.errors = {verb: (status, text)}
            (line,) = lines(api)
            assert line.startswith(verb)
            assert line.endswith("; trying again")
            assert api.pods
    api.errors.clear()
    assert (len(lines(api)), api.pods) == (1, [])


def test_an_api_server_that_does_not_answer_is_one_line(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_TIMEOUT_S", 0.3)
    api.is_slow = True
    gone = ApiServer("127.0.0.1", 1, api.account, "vision")
    for line in (*lines(api), *end_overdue_pods(gone)):
        assert line.startswith(f"GET {LIST}: ")


def test_a_server_with_a_certificate_of_another_ca_gets_no_token(api: Api) -> None:
    (api.account / "ca.crt").write_text("")
    (line,) = lines(api)
    assert line.startswith(f"GET {LIST}: ")
    assert not api.requests


def test_sigterm_ends_it_at_once_with_0(api: Api) -> None:
    api.add("trainer-1-x7k2p", ended_s_ago=60)
    account = str(api.account)
    code = f"import pathlib, pipeline.addons.deploy.recovery as r; r.recover(pathlib.Path({account!r}))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=environment(**os.environ)
    )
    try:
        assert process.stderr
        assert process.stderr.readline() == "recovery | watching the pods app=trainer in namespace vision\n"
        assert "marked as Failed" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()


def test_outside_a_cluster_it_exits_with_2() -> None:
    result = pipeline("k8s", "recover")
    assert (result.code, result.error.startswith("this is not a pod with a service account")) == (2, True)
    with pytest.raises(RequestError):
        connect(Path("/nonexistent"))
