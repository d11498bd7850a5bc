"""The images and compose on a real Docker engine: what a stranger's `docker compose up` does, and what it survives."""

import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import pytest
from engine import CPU, REVISION, ROOT, docker
from harness import DONE, free_port, pipeline

pytestmark = pytest.mark.engine

CANARY = "CANARY-5e0c2f"
IN_A_LAYER = "one line for each ending that is not a crash"
IMAGES = ("ddp-pipeline", "ddp-pipeline-mlflow")
EXACT = "run.deterministic=true checkpoint.every=10steps track.every=2steps"


@dataclass
class Project:
    """One compose project, with volumes and a port of its own."""

    name: str
    port: int
    env: dict[str, str] = field(default_factory=dict)

    def compose(self, *arguments: str, check: bool = True, **env: str) -> str:
        every = {"MLFLOW_PORT": str(self.port), "NPROC": "2", "SHM_SIZE": "256mb", **self.env, **env}
        return docker("compose", "-p", self.name, *CPU, *arguments, check=check, **every)

    def container(self, service: str) -> str:
        return self.compose("ps", "--all", "--quiet", service).strip()

    def wait(self, timeout: float = 300) -> int:
        """The trainer's exit code, once it has ended."""
        return int(docker("wait", self.container("trainer"), timeout=timeout).strip())

    def logs(self, service: str) -> str:
        return docker("logs", self.container(service))

    def done(self) -> dict[str, str]:
        lines = [line for line in self.logs("trainer").splitlines() if line.startswith("done ")]
        assert lines, self.logs("trainer")[-3000:]
        match = DONE.match(lines[-1])
        assert match
        return match.groupdict()

    def read(self, path: str) -> str:
        """A file of the volume of runs; empty if it is not there."""
        return docker("exec", self.container("trainer"), "cat", path, check=False)

    def step(self, run: str) -> int:
        """The last step that the running trainer's journal reports."""
        rows = re.findall(r'"step": (\d+), "metrics"', self.read(f"/runs/{run}/journal.jsonl"))
        return int(rows[-1]) if rows else 0

    def wait_for(self, condition: Callable[[], object], what: str, timeout: float = 180) -> None:
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, f"no {what} in {timeout} s: {self.logs('trainer')[-3000:]}"
            time.sleep(0.3)


Popen = subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def layers(images: None) -> Iterator[tuple[Popen, Popen]]:
    """Looks for the secret in all layers of the images, and for what is in one; beside other tests: it takes a minute."""
    words = ["--regexp", CANARY, "--regexp", IN_A_LAYER]
    with (
        subprocess.Popen(["docker", "save", *IMAGES], stdout=subprocess.PIPE) as saving,
        subprocess.Popen(
            ["grep", "--only-matching", "--fixed-strings", "--text", *words],
            stdin=saving.stdout,
            stdout=subprocess.PIPE,
            text=True,
        ) as looking,
    ):
        yield saving, looking
        saving.kill()
        looking.kill()


@pytest.fixture(scope="module")
def project(images: None, layers: tuple[Popen, Popen]) -> Iterator[Project]:
    """A project in which the digits were trained, by the one command of the README."""
    found = Project("pipeline-test", free_port(), {"MLFLOW_TRACKING_PASSWORD": CANARY, "REVISION": REVISION})
    found.compose("down", "--volumes", "--timeout", "0")
    try:
        found.compose("up", "--detach", OVERRIDES=EXACT)
        assert found.wait() == 0, found.logs("trainer")
        yield found
    finally:
        found.compose("down", "--volumes", "--timeout", "0")


@pytest.fixture(scope="module")
def expected(project: Project) -> dict[str, str]:
    return project.done()


def test_up_trains_the_digits_and_mlflow_has_the_run(
    project: Project, expected: dict[str, str], tmp_path: Path
) -> None:
    import mlflow

    assert expected["images"] == "360/360"
    assert float(expected["top1"]) >= 0.97
    assert "MLflow did not" not in project.logs("trainer")
    client = mlflow.MlflowClient(f"http://127.0.0.1:{project.port}")
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["val/top1"] == pytest.approx(float(expected["top1"]), abs=5e-5)
    assert run.data.tags["mlflow.docker.image.uri"] == "ddp-pipeline"
    assert run.data.tags["mlflow.source.git.commit"] == REVISION
    assert run.data.tags["version"] == metadata.version("ddp-pipeline")
    assert {file.path for file in client.list_artifacts(run.info.run_id)} >= {
        "config.yaml",
        "plan.json",
        "journal.jsonl",
    }
    there = Path(client.download_artifacts(run.info.run_id, "journal.jsonl", str(tmp_path)))
    assert there.read_text() == project.compose(
        "run", "--rm", "--no-deps", "--entrypoint", "cat", "trainer", "/runs/digits/journal.jsonl"
    )


def test_killed_and_up_again_it_is_one_run_with_the_same_weights(project: Project, expected: dict[str, str]) -> None:
    import mlflow

    env = {"RUN": "killed", "OVERRIDES": EXACT}
    project.compose("up", "--detach", **env)
    project.wait_for(lambda: project.step("killed") >= 30, "step 30")
    project.compose("kill", "trainer")
    assert project.wait() == 137
    project.compose("up", "--detach", **env)
    project.wait_for(lambda: project.step("killed") >= 60, "step 60")
    project.compose("kill", "mlflow")  # whose death costs nothing either
    assert project.wait() == 0, project.logs("trainer")
    assert project.done() == expected
    assert "resuming from" in project.logs("trainer")
    project.compose("up", "--detach", "--wait", "mlflow")
    project.compose("run", "--rm", "--entrypoint", "pipeline", "trainer", "sync", "/runs/killed", **env)
    client = mlflow.MlflowClient(f"http://127.0.0.1:{project.port}")
    runs = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED", "FINISHED"], "one for each training, not for each start"
    points = [(point.step, point.value) for point in client.get_metric_history(runs[0].info.run_id, "train/loss")]
    assert sorted(points) == sorted(
        (point.step, point.value) for point in client.get_metric_history(runs[1].info.run_id, "train/loss")
    )


@pytest.mark.fault("B3", ci=1, long=20)
def test_stopped_it_has_saved_that_step(project: Project, seed: int) -> None:
    run = f"stopped-{seed}"
    env = {
        "RUN": run,
        "OVERRIDES": EXACT + " run.trace=true train.epochs=1000 evaluate.every=50\\ epochs track.uri=none",
    }
    project.compose("up", "--detach", "--no-deps", "trainer", **env)
    project.wait_for(lambda: project.step(run) > 0, "step")
    time.sleep(random.Random(seed).uniform(0, 3))
    started = time.monotonic()
    project.compose("stop", "trainer")
    assert time.monotonic() - started < 20
    assert project.wait() not in (0, 137)
    look = ["run", "--rm", "--no-deps", "--entrypoint", "sh", "trainer", "-c"]
    left = project.compose(*look, f"ls /runs/{run}/checkpoints | tail -n 1; tail -n 1 /runs/{run}/trace.jsonl")
    saved, made = re.findall(r"step-(\d{8})\.", left), re.findall(r'"step": (\d+)', left)
    assert int(saved[-1]) == int(made[-1])
    assert f"step {int(made[-1])} is saved" in project.logs("trainer")


@pytest.mark.fault("H4", "C3")
def test_a_container_can_do_no_more_than_it_must(project: Project) -> None:
    for service in ("trainer", "mlflow"):
        found = json.loads(docker("inspect", project.container(service)))[0]
        assert found["Config"]["User"] == "10001:10001"
        host = found["HostConfig"]
        assert (host["ReadonlyRootfs"], host["Privileged"], host["CapDrop"]) == (True, False, ["ALL"])
        assert host["SecurityOpt"] == ["no-new-privileges:true"]
        assert "docker.sock" not in json.dumps(found["Mounts"])
    status = project.compose("run", "--rm", "--no-deps", "--entrypoint", "cat", "trainer", "/proc/self/status")
    assert re.search(r"^CapEff:\s+0+$", status, re.MULTILINE)
    assert re.search(r"^NoNewPrivs:\s+1$", status, re.MULTILINE)
    assert re.search(r"^Uid:\s+10001\s+10001", status, re.MULTILINE)
    write = project.compose("run", "--rm", "--no-deps", "--entrypoint", "touch", "trainer", "/opt/x", check=False)
    assert "Read-only file system" in write


def test_the_image_has_what_torch_compile_wants(project: Project) -> None:
    compiling = (
        "echo '#include <Python.h>' | gcc -shared -fPIC -x c"
        " -I $(python -c 'import sysconfig; print(sysconfig.get_path(\"include\"))') -o /tmp/launcher.so - && echo"
        " compiled"
    )
    run = ("run", "--rm", "--no-deps", "--entrypoint", "sh", "trainer", "-c", compiling)
    assert "compiled" in project.compose(*run)


@pytest.mark.fault("H3")
def test_a_secret_in_the_environment_is_found_nowhere(
    project: Project, expected: dict[str, str], layers: tuple[Popen, Popen]
) -> None:
    told = docker("inspect", project.container("trainer"))
    assert CANARY in told, "the trainer has it"
    assert CANARY not in project.logs("trainer") + project.logs("mlflow")
    for service, folder in (("trainer", "/runs"), ("mlflow", "/mlflow")):
        look = (
            "run",
            "--rm",
            "--no-deps",
            "--entrypoint",
            "grep",
            service,
            "--recursive",
            "--files-with-matches",
            "--text",
        )
        assert CANARY not in project.compose(*look, "no-such-word", folder, check=False)
        assert project.compose(*look, CANARY, folder, check=False).strip() == ""
    for image in IMAGES:
        assert CANARY not in docker("history", "--no-trunc", image) + docker("inspect", image)
    saving, looking = layers
    assert set(looking.communicate()[0].split("\n")) == {IN_A_LAYER, ""}
    assert saving.wait() == 0


@pytest.mark.fault("H5")
def test_mlflow_is_on_loopback_and_the_compose_network_alone(project: Project) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outward:
        outward.connect(("192.0.2.1", 9))  # sends nothing; tells which address of ours is used
        address = outward.getsockname()[0]
    assert not address.startswith("127.")
    with socket.create_connection(("127.0.0.1", project.port), timeout=5):
        pass
    with pytest.raises(OSError, match=r"refused|timed out"):
        socket.create_connection((address, project.port), timeout=5)


@pytest.mark.fault("H5")
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/2.0/mlflow-artifacts/artifacts/../../../../etc/passwd"),
        ("GET", "/api/2.0/mlflow-artifacts/artifacts/%2e%2e/%2e%2e/%2e%2e/etc/passwd"),
        ("GET", "/api/2.0/mlflow-artifacts/artifacts/%252e%252e%252f%252e%252e%252fetc%252fpasswd"),
        ("GET", "/api/2.0/mlflow-artifacts/artifacts?path=../../../etc"),
        ("PUT", "/api/2.0/mlflow-artifacts/artifacts/%2e%2e/%2e%2e/mlflow/planted"),
    ],
)
def test_a_path_that_leads_out_of_the_artifacts_is_refused(project: Project, method: str, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", project.port, timeout=20)
    connection.request(method, path, b"planted" if method == "PUT" else None)
    answer = connection.getresponse()
    assert answer.status in (400, 403, 404, 405), answer.status
    assert b"root:" not in answer.read()
    planted = project.compose("exec", "mlflow", "find", "/mlflow", "-name", "planted")
    assert planted.strip() == ""


def test_a_name_that_is_not_listed_is_refused(project: Project) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{project.port}/ajax-api/2.0/mlflow/experiments/search?max_results=1"
    )
    request.add_header("Host", "evil.example")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=20)
    assert refused.value.code == 403


def test_a_change_of_the_code_builds_no_packages_anew(images: None, tmp_path: Path) -> None:
    for name in ("Dockerfile", ".dockerignore", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for path in ROOT.glob("requirements*.lock"):
        shutil.copy(path, tmp_path)
    shutil.copytree(ROOT / "pipeline", tmp_path / "pipeline", ignore=shutil.ignore_patterns("__pycache__"))
    with open(tmp_path / "pipeline/world.py", "a") as file:
        file.write("# changed\n")
    base = ["--build-arg", f"BASE_IMAGE={os.environ['BASE_IMAGE']}"] if "BASE_IMAGE" in os.environ else []
    started = time.monotonic()
    said = docker("build", "--progress", "plain", "--tag", "ddp-pipeline:changed", *base, str(tmp_path))
    print(f"built in {time.monotonic() - started:.0f} s")
    steps = re.split(r"\n(?=#\d+ \[)", said)
    assert all("CACHED" in step for step in steps if "pip install --require-hashes" in step), said[-3000:]
    docker("image", "rm", "ddp-pipeline:changed")


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"RECIPE": "digit"}, "did you mean digits?"),
        ({"OVERRIDES": "batch.global=97"}, "batch.global=97 does not divide by 2 processes"),
        ({"OVERRIDES": "data.source=folder data.root=/data/imagenet"}, "/data/imagenet is not a folder"),
        ({"DATA": "/no/such/folder"}, "/no/such/folder"),
        ({"SHM_SIZE": "1mb", "OVERRIDES": "run.dir=/runs/other"}, "/dev/shm has 1.0 MiB"),
    ],
)
def test_a_wrong_request_is_one_clear_line(project: Project, env: dict[str, str], says: str) -> None:
    said = project.compose("run", "--rm", "--no-deps", "trainer", check=False, RUN="wrong", **env)
    assert sum(says in line for line in said.splitlines()) == 1, said


def test_without_a_gpu_the_plain_file_says_so(images: None) -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    said = docker("compose", "-p", "pipeline-gpu", "run", "--rm", "--no-deps", "trainer", check=False)
    docker("compose", "-p", "pipeline-gpu", "down", "--volumes", check=False)
    assert 'could not select device driver "nvidia"' in said
    readme = (ROOT / "README.md").read_text()
    assert 'could not select device driver "nvidia"' in readme, "foreseen"


def test_a_port_that_is_taken_is_named(project: Project) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        said = docker("compose", "-p", "pipeline-port", *CPU, "up", "--detach", "mlflow", check=False, MLFLOW_PORT=port)
        docker("compose", "-p", "pipeline-port", *CPU, "down", "--volumes", check=False)
    assert "address already in use" in said
    assert port in said


@pytest.fixture(scope="module")
def two_processes(images: None) -> str:
    """What two processes of one container end with: the bits that two nodes must end with."""
    said = docker(
        "run", "--rm", "--shm-size", "256m", "--read-only", "--tmpfs", "/tmp", "ddp-pipeline", "train", "digits",
        "--nproc", "2", *REHEARSED,
    )  # fmt: skip
    return next(line for line in said.splitlines() if line.startswith("done "))


REHEARSED = ("run.deterministic=true", "track.uri=none", "train.max_steps=60", "checkpoint.every=10 steps",
             "track.every=2 steps")  # fmt: skip


EACH_ALONE = ("", "--kill 1@25", "--kill 0@25", "--cut 1@25:5")


@pytest.mark.parametrize(
    "faults",
    ["--kill 1@15 --cut 1@30:5 --kill 0@45", *(pytest.param(one, marks=pytest.mark.long) for one in EACH_ALONE)],
)
def test_a_rehearsal_ends_with_the_same_weights(two_processes: str, faults: str) -> None:
    result = pipeline("rehearse", "digits", "--nodes", "2", *faults.split(), *REHEARSED, timeout=600)
    assert result.code == 0, result.err
    assert result.out.strip() == two_processes
    assert result.err.count(" and is replaced ") >= faults.count("--kill")
    _assert_nothing_is_left(result.err)


def test_a_rehearsal_that_is_interrupted_leaves_nothing(images: None) -> None:
    command = [sys.executable, "-m", "pipeline", "rehearse", "digits", "--nodes", "2", *REHEARSED]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        said = ""
        for line in process.stderr:
            said += line
            if "first step done" in line:
                break
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 75
    _assert_nothing_is_left(said)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("train.epochs=0",), "train.epochs=0"),
        (("data.source=folder", "data.root=/data"), "/data"),
        (("--image", "no-such-image"), "image 'no-such-image' is not on this machine"),
        (("--kill", "2@5"), "node 2 does not exist"),
        (("--kill", "half"), "'half' is not NODE@STEP"),
        (("batch.global=97",), "batch.global=97 does not divide by 2 processes"),
    ],
)
def test_a_wrong_rehearsal_is_one_line(images: None, words: tuple[str, ...], says: str) -> None:
    result = pipeline("rehearse", "digits", "--nodes", "2", *words)
    assert result.code == 2
    assert says in result.error
    _assert_nothing_is_left(result.err)


def _assert_nothing_is_left(said: str) -> None:
    """Assert that the rehearsal whose messages are `said` has removed all that it made."""
    for name in set(re.findall(r"rehearsal-[0-9a-f]{8}", said)):
        for kind in (("ps", "--all"), ("network", "ls"), ("volume", "ls")):
            assert docker(*kind, "--quiet", "--filter", f"label=ddp-pipeline.rehearsal={name}").strip() == ""
