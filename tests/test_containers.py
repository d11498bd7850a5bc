"""The images and `docker compose up` on a real Docker engine: training, faults and security."""

import http.client
import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from harness import CPU, DONE, REVISION, ROOT, docker, free_port, pipeline, wait_until
from mlflow import MlflowClient
from mlflow.entities import Run

pytestmark = pytest.mark.engine

CANARY = "CANARY-5e0c2f"
TEXT_IN_LAYER = "def from_exit_code(code: int) -> type[RunError]:"
"""A text in a layer of the trainer's image, which shows that the search for CANARY works."""
IMAGES = ("ddp-pipeline", "ddp-pipeline-mlflow")
EXACT = "run.deterministic=true train.max_steps=84 checkpoint.every=10steps track.every=2steps"


@dataclass
class Project:
    """A compose project with its own volumes."""

    name: str
    env: dict[str, str]
    files: tuple[str, ...] = CPU
    port: int = field(default_factory=free_port)

    def compose(self, *arguments: str, check: bool = True, **env: str) -> str:
        env = {"MLFLOW_PORT": str(self.port), "NPROC": "2", "SHM_SIZE": "256mb", **self.env, **env}
        return docker("compose", "-p", self.name, *self.files, *arguments, check=check, **env)

    def container(self, service: str) -> str:
        return self.compose("ps", "--all", "--quiet", service).strip()

    def wait(self, timeout: float = 300) -> int:
        """Wait for the trainer's end; return its exit code."""
        return int(docker("wait", self.container("trainer"), timeout=timeout).strip())

    def logs(self, service: str) -> str:
        return docker("logs", self.container(service))

    def done(self) -> dict[str, str]:
        """Return the fields of the trainer's `done` line."""
        lines = [line for line in self.logs("trainer").splitlines() if line.startswith("done ")]
        match = DONE.match(lines[-1]) if lines else None
        assert match, self.logs("trainer")[-3000:]
        return match.groupdict()

    def trained(self) -> dict[str, str]:
        """Wait for the trainer's end, which must be a success; return the fields of `done`."""
        assert self.wait() == 0, self.logs("trainer")
        return self.done()

    def down(self) -> None:
        self.compose("down", "--volumes", "--timeout", "0")

    def run(self, program: str, *words: str, service: str = "trainer", check: bool = True) -> str:
        """Return the output of a program in a new container of a service."""
        new = ("run", "--rm", "--no-deps", "--entrypoint", program, service)
        return self.compose(*new, *words, check=check)

    def request(self, method: str, path: str, **headers: str) -> http.client.HTTPResponse:
        """Return MLflow's answer to a request, which uploads `planted` if it is a PUT."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request(method, path, b"planted" if method == "PUT" else None, headers)
        return connection.getresponse()

    def mlflow_runs(self) -> tuple[MlflowClient, list[Run]]:
        """Return the runs of the digits on this project's server, and a client of it."""
        client = MlflowClient(f"http://127.0.0.1:{self.port}")
        return client, list(client.search_runs([client.get_experiment_by_name("digits").experiment_id]))

    def wait_for_step(self, run: str, step: int) -> None:
        """Wait until the journal of the running trainer has the step."""

        def is_there() -> bool:
            journal = ("cat", f"/runs/{run}/journal.jsonl")
            text = docker("exec", self.container("trainer"), *journal, check=False)
            return any(int(found) >= step for found in re.findall(r'"step": (\d+), "metrics"', text))

        wait_until(is_there, f"step {step}", 180)


def inspect(container: str) -> dict[str, Any]:
    return json.loads(docker("inspect", container))[0]


@pytest.fixture(scope="module")
def project(images: None) -> Iterator[Project]:
    """Train the digits with the command of the README and return the compose project."""
    project = Project("pipeline-test", {"MLFLOW_TRACKING_PASSWORD": CANARY, "REVISION": REVISION})
    project.down()
    try:
        project.compose("up", "--detach", OVERRIDES=EXACT)
        project.trained()
        yield project
    finally:
        project.down()


@pytest.fixture(scope="module")
def expected(project: Project) -> dict[str, str]:
    return project.done()


def test_up_trains_and_tracks_a_run(project: Project, expected: dict[str, str], tmp_path: Path) -> None:
    assert expected["images"] == "360/360"
    assert float(expected["top1"]) >= 0.97
    assert "MLflow did not" not in project.logs("trainer")
    client, (run,) = project.mlflow_runs()
    assert run.info.status == "FINISHED"
    assert run.data.metrics["val/top1"] == pytest.approx(float(expected["top1"]), abs=5e-5)
    assert run.data.tags["mlflow.docker.image.uri"] == "ddp-pipeline"
    assert run.data.tags["mlflow.source.git.commit"] == REVISION
    assert run.data.tags["version"] == metadata.version("ddp-pipeline")
    artifacts = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert artifacts >= {"config.yaml", "plan.json", "journal.jsonl"}
    journal = Path(client.download_artifacts(run.info.run_id, "journal.jsonl", str(tmp_path)))
    assert journal.read_text() == project.run("cat", "/runs/digits/journal.jsonl")


def test_a_killed_trainer_resumes_to_the_same_weights(project: Project, expected: dict[str, str]) -> None:
    env = {"RUN": "killed", "OVERRIDES": EXACT}
    project.compose("up", "--detach", **env)
    project.wait_for_step("killed", 30)
    project.compose("kill", "trainer")
    assert project.wait() == 137
    project.compose("up", "--detach", **env)
    project.wait_for_step("killed", 60)
    project.compose("kill", "mlflow")  # must not affect the training
    assert project.trained() == expected
    assert "resuming from" in project.logs("trainer")
    project.compose("up", "--detach", "--wait", "mlflow")
    project.compose("run", "--rm", "--entrypoint", "pipeline", "trainer", "sync", "/runs/killed", **env)
    client, runs = project.mlflow_runs()
    assert [run.info.status for run in runs] == ["FINISHED"] * 2, "one for each training, not for each start"
    first, second = (client.get_metric_history(run.info.run_id, "train/loss") for run in runs)
    points = [sorted((point.step, point.value) for point in history) for history in (first, second)]
    assert points[0] == points[1]


def test_a_removed_trainer_resumes_from_the_bucket(project: Project, expected: dict[str, str]) -> None:
    import boto3

    port, key, secret = str(free_port()), "tester", f"{CANARY}-of-the-store"
    env = {"REVISION": REVISION, "STORE_PORT": port, "RUN": "mirrored", "OVERRIDES": EXACT}
    env |= {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
    bucket = boto3.resource(
        "s3", endpoint_url=f"http://127.0.0.1:{port}", aws_access_key_id=key, aws_secret_access_key=secret,
        region_name="us-east-1",
    ).Bucket("pipeline")  # fmt: skip
    stored = Project("pipeline-test-s3", env, (*CPU, "-f", "docker-compose.s3.yml"))
    stored.compose("build", "store")
    stored.down()
    try:
        stored.compose("up", "--detach")
        uploaded = bucket.objects.filter(Prefix="mirrored/checkpoints/")
        wait_until(lambda: list(uploaded), "checkpoint in the bucket", 180)
        stored.wait_for_step("mirrored", 40)
        stored.compose("kill", "trainer")
        mounts = inspect(stored.container("trainer"))["Mounts"]
        names = (mount["Name"] for mount in mounts if mount["Type"] == "volume")
        (volume,) = (name for name in names if re.fullmatch("[0-9a-f]{64}", name))  # it has no other name
        stored.compose("rm", "--force", "--volumes", "trainer")
        assert volume not in docker("volume", "ls", "--quiet")
        stored.compose("up", "--detach")
        assert stored.trained() == expected
        assert "resuming from" in stored.logs("trainer")
        _, (run,) = stored.mlflow_runs()
        assert run.info.status == "FINISHED"
        assert CANARY not in stored.logs("trainer") + stored.logs("store") + stored.logs("mlflow")
        found = inspect(stored.container("store"))
        assert (found["Config"]["User"], found["HostConfig"]["ReadonlyRootfs"]) == ("10001:10001", True)
        assert CANARY not in docker("history", "--no-trunc", "ddp-pipeline-store")
    finally:
        stored.down()


@pytest.mark.fault("B3", ci=1, long=20)
def test_docker_stop_saves_the_last_step(project: Project, seed: int) -> None:
    run = f"stopped-{seed}"
    words = f"{EXACT} run.trace=true train.max_steps=none train.epochs=1000 track.uri=none"
    words += " evaluate.every=50\\ epochs"
    project.compose("up", "--detach", "--no-deps", "trainer", RUN=run, OVERRIDES=words)
    project.wait_for_step(run, 1)
    time.sleep(random.Random(seed).uniform(0, 3))
    project.compose("stop", "trainer")
    assert project.wait() not in (0, 137), "it ends by itself, before the engine kills it"
    last = f"ls /runs/{run}/checkpoints | tail -n 1; tail -n 1 /runs/{run}/trace.jsonl"
    output = project.run("sh", "-c", last)
    saved, trained = re.findall(r"step-(\d{8})\.", output), re.findall(r'"step": (\d+)', output)
    assert int(saved[-1]) == int(trained[-1])
    assert f"step {int(trained[-1])} is saved" in project.logs("trainer")


def assert_unprivileged(host: dict[str, Any]) -> None:
    assert (host["ReadonlyRootfs"], host["Privileged"], host["CapDrop"]) == (True, False, ["ALL"])
    assert host["SecurityOpt"] == ["no-new-privileges:true"]


@pytest.mark.fault("H4", "C3")
def test_a_container_has_minimal_privileges(project: Project) -> None:
    for service in ("trainer", "mlflow"):
        found = inspect(project.container(service))
        assert found["Config"]["User"] == "10001:10001"
        assert_unprivileged(found["HostConfig"])
        assert "docker.sock" not in json.dumps(found["Mounts"])
    status = project.run("cat", "/proc/self/status")
    for line in (r"CapEff:\s+0+", r"NoNewPrivs:\s+1", r"Uid:\s+10001\s+10001.*"):
        assert re.search(rf"^{line}$", status, re.MULTILINE), line
    assert "Read-only file system" in project.run("touch", "/opt/x", check=False)


def test_the_image_has_the_prerequisites_of_torch_compile_and_packs(project: Project) -> None:
    include = "import sysconfig; print(sysconfig.get_path('include'))"
    gcc = f'gcc -shared -fPIC -x c -I $(python -c "{include}") -o /tmp/launcher.so -'
    assert "compiled" in project.run("sh", "-c", f"echo '#include <Python.h>' | {gcc} && echo compiled")
    code = "from pipeline.addons.datasets.jpeg_restarts import check_jpegtran; check_jpegtran()"
    assert "usable" in project.run("sh", "-c", f'python -c "{code}" && echo usable')


@pytest.mark.fault("H3")
def test_a_secret_is_in_no_log_file_or_layer(project: Project, expected: dict[str, str]) -> None:
    assert CANARY in docker("inspect", project.container("trainer")), "the trainer's environment has it"
    assert CANARY not in project.logs("trainer") + project.logs("mlflow")
    options = ("--recursive", "--files-with-matches", "--text")
    for service, folder in (("trainer", "/runs"), ("mlflow", "/mlflow")):
        assert project.run("grep", *options, CANARY, folder, service=service, check=False).strip() == ""
    for image in IMAGES:
        assert CANARY not in docker("history", "--no-trunc", image) + docker("inspect", image)
    patterns = ("--regexp", CANARY, "--regexp", TEXT_IN_LAYER)
    search = ["grep", "--only-matching", "--fixed-strings", "--text", *patterns]
    with subprocess.Popen(["docker", "save", *IMAGES], stdout=subprocess.PIPE) as saving:  # takes a minute
        found = subprocess.run(search, stdin=saving.stdout, capture_output=True, text=True, check=False)
    assert (set(found.stdout.split("\n")), saving.returncode) == ({TEXT_IN_LAYER, ""}, 0)


@pytest.mark.fault("H5")
def test_mlflow_listens_only_on_loopback_and_the_compose_network(project: Project) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outward:
        outward.connect(("192.0.2.1", 9))  # sends nothing, but selects the address of our outer interface
        address = outward.getsockname()[0]
    assert not address.startswith("127.")
    with socket.create_connection(("127.0.0.1", project.port), timeout=5):
        pass
    with pytest.raises(OSError, match=r"refused|timed out"):
        socket.create_connection((address, project.port), timeout=5)
    path = "/ajax-api/2.0/mlflow/experiments/search?max_results=1"
    assert project.request("GET", path, Host="evil.example").status == 403


@pytest.mark.fault("H5")
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/api/2.0/mlflow-artifacts/artifacts/%2e%2e/%2e%2e/%2e%2e/etc/passwd"),
     ("GET", "/api/2.0/mlflow-artifacts/artifacts/%252e%252e%252f%252e%252e%252fetc%252fpasswd"),
     ("GET", "/api/2.0/mlflow-artifacts/artifacts?path=../../../etc"),
     ("PUT", "/api/2.0/mlflow-artifacts/artifacts/%2e%2e/%2e%2e/mlflow/planted")],
)  # fmt: skip
def test_a_path_outside_the_artifacts_is_refused(project: Project, method: str, path: str) -> None:
    response = project.request(method, path)
    assert response.status in (400, 403, 404, 405), response.status
    assert b"root:" not in response.read()
    assert project.compose("exec", "mlflow", "find", "/mlflow", "-name", "planted").strip() == ""


@pytest.mark.parametrize(
    ("env", "says"),
    [({"RECIPE": "digit"}, "did you mean digits?"),
     ({"OVERRIDES": "data.source=folder data.root=/data/imagenet"}, "/data/imagenet is not a folder"),
     ({"DATA": "/no/such/folder"}, "/no/such/folder")],
)  # fmt: skip
def test_a_wrong_request_prints_one_clear_line(project: Project, env: dict[str, str], says: str) -> None:
    output = project.compose("run", "--rm", "--no-deps", "trainer", check=False, RUN="wrong", **env)
    assert sum(says in line for line in output.splitlines()) == 1, output


def test_without_a_gpu_the_default_compose_file_reports_the_missing_driver(images: None) -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    output = docker("compose", "-p", "pipeline-gpu", "run", "--rm", "--no-deps", "trainer", check=False)
    docker("compose", "-p", "pipeline-gpu", "down", "--volumes", check=False)
    assert 'could not select device driver "nvidia"' in output
    page = (ROOT / "docs/operations.md").read_text()
    assert 'could not select device driver "nvidia"' in page, "the documentation explains this error"


REHEARSED = ("run.deterministic=true", "track.uri=none", "train.max_steps=60", "checkpoint.every=10 steps",
             "track.every=2 steps")  # fmt: skip


@pytest.fixture(scope="module")
def two_processes(images: None) -> str:
    """Train with two processes in one container; return the `done` line, as two nodes must."""
    output = docker("run", "--rm", "--shm-size", "256m", "--read-only", "--tmpfs", "/tmp", "ddp-pipeline",
                    "train", "digits", "--nproc", "2", *REHEARSED)  # fmt: skip
    return next(line for line in output.splitlines() if line.startswith("done "))


@pytest.mark.parametrize(
    "faults",
    ["--kill 1@15 --cut 1@30:5 --kill 0@45", *(pytest.param(fault, marks=pytest.mark.long)
     for fault in ("", "--kill 1@25", "--kill 0@25", "--cut 1@25:5"))],
)  # fmt: skip
def test_a_rehearsal_ends_with_the_same_weights(two_processes: str, faults: str) -> None:
    result = pipeline("rehearse", "digits", "--nodes", "2", *faults.split(), *REHEARSED, timeout=600, code=0)
    assert result.out.strip() == two_processes
    assert result.err.count(" and is replaced ") >= faults.count("--kill")
    _assert_nothing_is_left(result.err)


def test_an_interrupted_rehearsal_removes_everything_it_made(images: None) -> None:
    command = [sys.executable, "-m", "pipeline", "rehearse", "digits", "--nodes", "2", *REHEARSED]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        log = process.stderr.readline()
        while "first step done" not in log:
            log += process.stderr.readline() or pytest.fail(log)
        (name,) = set(re.findall(r"rehearsal-[0-9a-f]{8}", log))
        nodes = docker("ps", "--quiet", "--filter", f"label=ddp-pipeline.rehearsal={name}").split()
        hosts = [inspect(node)["HostConfig"] for node in nodes]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 75
    assert len(hosts) >= 2
    for host in hosts:
        assert min(host["Memory"], host["PidsLimit"]) > 0
        assert_unprivileged(host)
    _assert_nothing_is_left(log)


@pytest.mark.parametrize(
    ("words", "says"),
    [(("data.source=folder", "data.root=/data"), "/data"),
     (("--image", "no-such-image"), "image 'no-such-image' is not on this machine")],
)  # fmt: skip
def test_a_wrong_rehearsal_request_prints_one_line(images: None, words: tuple[str, ...], says: str) -> None:
    result = pipeline("rehearse", "digits", "--nodes", "2", *words, code=2)
    assert says in result.error
    _assert_nothing_is_left(result.err)


def _assert_nothing_is_left(log: str) -> None:
    """Assert that the rehearsals named in `log` have removed their containers and networks."""
    for name in set(re.findall(r"rehearsal-[0-9a-f]{8}", log)):
        for kind in (("ps", "--all"), ("network", "ls"), ("volume", "ls")):
            assert docker(*kind, "--quiet", "--filter", f"label=ddp-pipeline.rehearsal={name}").strip() == ""
