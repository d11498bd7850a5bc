"""MLflow behind a reverse proxy: a path prefix, TLS with a private authority, bearer tokens."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import Job, Result, free_port, quick
from server import Server, sync, tracked_job

from pipeline.addons.mlflow.tracker import check_server_answers
from pipeline.config.load import load
from pipeline.errors import TemporaryError
from pipeline.record.folder import RunFolder

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
CANARY = "CANARY"
TOKEN, WRONG, EXPIRED, READER = (f"{CANARY}-{name}" for name in ("good", "wrong", "expired", "reader"))
CERT, USER, PASSWORD = (f"MLFLOW_TRACKING_{name}" for name in ("SERVER_CERT_PATH", "USERNAME", "PASSWORD"))
# nginx answers a wrong token with HTML, and an expired one as gateways do: JSON without error_code
CONFIG = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log; events {{}}
http {{
  access_log off; default_type application/json; client_max_body_size 100m;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  ssl_certificate {folder}/server.pem; ssl_certificate_key {folder}/server.pem;
  map $http_authorization $answer {{
    default 401; "Bearer {TOKEN}" 200; "Basic bWU6Q0FOQVJZ" 200;
    "Bearer {EXPIRED}" expired; "Bearer {READER}" 403;
  }}
  server {{
    listen 127.0.0.1:{port} ssl;
    location /prefix/ {{
      if ($answer = 401) {{ return 401; }}
      if ($answer = 403) {{ return 403; }}
      if ($answer = expired) {{ return 401 '{{"exp": "token expired"}}'; }}
      proxy_pass {upstream}/;
    }}
  }}
  server {{
    listen 127.0.0.1:{mutual_port} ssl; ssl_client_certificate {folder}/authority.pem; ssl_verify_client on;
    location /prefix/ {{ proxy_pass {upstream}/; }}
  }}
}}
"""

pytestmark = pytest.mark.skipif(
    not (NGINX and shutil.which("openssl")),
    reason="needs nginx and openssl (apt-get install nginx-light openssl)",
)


@dataclass
class Proxy:
    server: Server
    folder: Path
    uri: str
    mutual_uri: str
    """The same server, for clients with a certificate."""

    def variables(self, token: str = TOKEN) -> dict[str, str]:
        authority = str(self.folder / "authority.pem")
        return {"MLFLOW_TRACKING_URI": self.uri, "MLFLOW_TRACKING_TOKEN": token, CERT: authority}


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Iterator[Proxy]:
    """Start nginx in front of the server."""
    folder = tmp_path_factory.mktemp("proxy")
    make_certificate(folder, "authority", "-addext", "keyUsage=critical,keyCertSign")
    signed = ("-CA", "authority.pem", "-CAkey", "authority.pem", "-addext", "subjectAltName=IP:127.0.0.1")
    make_certificate(folder, "server", *signed)
    make_certificate(folder, "client", *signed)
    ports = {"port": free_port(), "mutual_port": free_port()}
    tokens = {"TOKEN": TOKEN, "EXPIRED": EXPIRED, "READER": READER}
    (folder / "nginx.conf").write_text(CONFIG.format(folder=folder, upstream=server.uri, **ports, **tokens))
    with subprocess.Popen([str(NGINX), "-e", "stderr", "-c", str(folder / "nginx.conf")]) as nginx:
        yield Proxy(server, folder, *(f"https://127.0.0.1:{port}/prefix" for port in ports.values()))
        nginx.kill()


def make_certificate(folder: Path, name: str, *more: str) -> None:
    """Write NAME.pem: a key, and a certificate that is signed by itself unless `more` says else."""
    words = f"-newkey rsa:2048 -nodes -days 2 -subj /CN={name} -keyout key -out cert".split()
    subprocess.run(["openssl", "req", "-x509", *words, *more], cwd=folder, check=True, capture_output=True)
    (folder / f"{name}.pem").write_text((folder / "key").read_text() + (folder / "cert").read_text())


def assert_no_canary(job: Job, *results: Result) -> None:
    """Fail if a token is in a file of the run, in its output or in that of other commands."""
    assert CANARY not in "".join([job.output(), job.log(), *(result.out + result.err for result in results)])
    for path in filter(Path.is_file, job.folder.rglob("*")):
        assert CANARY.encode() not in path.read_bytes(), path


def test_doctor_and_train_use_token_prefix_and_authority(tmp_path: Path, digits: Path, proxy: Proxy) -> None:
    run = tracked_job(tmp_path / "run", digits, "train.max_steps=4", **proxy.variables())
    doctor = quick("doctor", *run.train_words()[1:], "--json", **run.env, code=0)
    lines = {row["check"]: row["line"] for row in json.loads(doctor.out)["findings"]}
    assert proxy.uri in lines["MLflow"]
    assert "artifacts" in lines
    assert "MLflow" not in run.finished().log()
    found = proxy.server.run_of(run)
    assert found.info.status == "FINISHED"
    assert proxy.server.client.list_artifacts(found.info.run_id)
    assert found.outputs.model_outputs
    assert_no_canary(run, doctor)


def test_refused_credentials_can_be_replaced_later(tmp_path: Path, digits: Path, proxy: Proxy) -> None:
    run = tracked_job(tmp_path / "run", digits, "train.max_steps=4", **proxy.variables(WRONG)).finished()
    assert "error code 401" in (run.folder / "sync.log").read_text()
    results = []
    for variables, cause in (
        (proxy.variables(EXPIRED), "token expired"),
        (proxy.variables(f"{TOKEN}\n"), "header value: …"),
        (proxy.variables() | {CERT: ""}, "CERTIFICATE_VERIFY_FAILED"),
    ):
        results.append(sync(run, **variables, code=75))
        assert cause in results[-1].error
    results.append(sync(run, **proxy.variables(), code=0))
    assert proxy.server.run_of(run).info.status == "FINISHED"
    assert_no_canary(run, *results)


@pytest.mark.parametrize(
    ("variables", "cause"),
    [({}, ""), ({"MLFLOW_TRACKING_TOKEN": WRONG}, "answers 401"),
     ({"MLFLOW_TRACKING_TOKEN": READER}, "answers 403"),
     ({USER: "me", PASSWORD: CANARY, "MLFLOW_TRACKING_TOKEN": WRONG}, ""),
     ({CERT: ""}, "CERTIFICATE_VERIFY_FAILED"), ({CERT: "", "REQUESTS_CA_BUNDLE": "authority.pem"}, ""),
     ({"MLFLOW_TRACKING_URI": "mutual"}, "answers 400"),
     ({"MLFLOW_TRACKING_URI": "mutual", "MLFLOW_TRACKING_CLIENT_CERT_PATH": "client.pem"}, "")],
)  # fmt: skip
def test_doctor_uses_the_variables_of_mlflow(
    variables: dict[str, str], cause: str, tmp_path: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (proxy.variables() | variables).items():
        path = str(proxy.folder / value) if value.endswith(".pem") else value
        monkeypatch.setenv(name, proxy.mutual_uri if value == "mutual" else path)
    config = load("digits", [])
    if cause:
        with pytest.raises(TemporaryError, match=cause) as refusal:
            check_server_answers(config, RunFolder(tmp_path))
        assert CANARY not in str(refusal.value)
    else:
        assert "answers" in check_server_answers(config, RunFolder(tmp_path))
