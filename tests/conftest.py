"""Options, the choice of tests, and the fixtures that all tests share."""

import atexit
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.addons.run import portable

os.environ["OMP_NUM_THREADS"] = "1"  # tests run at the same time: torch's threads would compete for cores
os.environ.update(portable.VARIABLES)  # before torch is imported: forks have the bits of interpreters
if "PYTEST_XDIST_WORKER" not in os.environ:
    tempfile.gettempdir()  # pytest's own files stay there
    os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="tests-")  # for what killed processes leave
    os.chmod(os.environ["TMPDIR"], 0o711)  # PostgreSQL runs as another user
    atexit.register(shutil.rmtree, os.environ["TMPDIR"], ignore_errors=True)
sys.path.insert(0, str(Path(__file__).parent))
from harness import CPU, REVISION, SMALL, Job, MakeJob, docker
from object_store import Bucket, FaultProxy, Rclone, S3Server, Weed
from place import Place

pytest_plugins = ["faults.ledger"]
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, runs would ignore it as well


def pytest_addoption(parser: pytest.Parser) -> None:
    add = parser.addoption
    add("--full", action="store_true", help="also run tests that repeat a promise at more sizes, as CI does")
    add("--engine", action="store_true", help="run only the tests that build and run containers")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked `full`, `long` or `engine` unless an option asks for them.

    Each xdist worker runs whole files, so that fixtures are made once; the longest come first.
    """
    longest = (  # those that mostly wait run beside those that compute
        "mirror models docs equivalence rendezvous compile kills nodes exact tracking lock finetune"
        " store_data stops security dry_run portable bench storage hangs wrong_requests delivery parallel"
        " object_store names manifests resume many_runs stream store_pack terminal"
    )
    order = {f"test_{name}": place for place, name in enumerate(longest.split())}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))

    def is_left_out(item: pytest.Item) -> bool:
        marks = {mark.name for mark in item.iter_markers()}
        return (
            ("engine" in marks) != config.getoption("--engine")
            or ("full" in marks and not _is_full(config))
            or ("long" in marks and config.getoption("--faults") != "long")
        )

    deselected = [item for item in items if is_left_out(item)]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item not in deselected]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Show a failure at once: a run that is stopped before its end shows no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid}\n{report.longreprtext}", flush=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what `make test` leaves out."""
    if not _is_full(config) and not config.getoption("--engine"):
        line = "not run: more sizes (make test ARGS=--full), more faults (make faults-ci),"
        terminalreporter.write_line(f"{line} containers (make test-containers)")


def _is_full(config: pytest.Config) -> bool:
    return config.getoption("--full") or config.getoption("--faults") != "once"


@pytest.fixture(autouse=True)
def _clean_environment() -> Iterator[None]:
    """Keep what a test's process group, or its MLflow client, chose from later tests' processes."""
    yield
    for name in ("GLOO_SOCKET_IFNAME", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        os.environ.pop(name, None)


@pytest.fixture
def alone() -> Iterator[None]:
    """Make a process group of this process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    return _is_full(request.config)


@pytest.fixture(scope="session")
def outage(request: pytest.FixtureRequest) -> int:
    """Return the seconds that the MLflow server is away."""
    return 20 if request.config.getoption("--faults") == "long" else 8


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the digits as an image folder, with 120 of their 360 images for validation."""
    from pipeline.addons.datasets.synthetic import make_digits

    root = tmp_path_factory.mktemp("data") / "digits"
    make_digits(root)
    for path in (path for path in root.glob("val/*/*") if int(path.stem) % 3):
        path.unlink()
    return root


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> MakeJob:
    """Return a function that makes a run of the digits with SMALL, further words and options."""

    def make(*words: str, **options: Any) -> Job:
        arguments = ["digits", f"data.root={digits}", *SMALL, *words]
        return Job(tmp_path_factory.mktemp("job") / "run", arguments, **options)

    return make


@pytest.fixture(scope="session")
def image(digits: Path) -> Path:
    return next((digits / "val/3").iterdir())


@pytest.fixture(scope="session")
def made_place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place.make(tmp_path_factory.mktemp("place"))


@pytest.fixture
def place(made_place: Place, tmp_path: Path) -> Place:
    """Return a copy of a folder with images and a finished run, for small runs in it."""
    shutil.copytree(made_place.path, tmp_path / "place")
    return Place(tmp_path / "place")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start a real MLflow server, once for all tests. Clients in this process give up quickly."""
    from server import Server  # imports mlflow

    with pytest.MonkeyPatch.context() as patch, Server(tmp_path_factory.mktemp("server")) as server:
        patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        patch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        yield server


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> S3Server:
    """Start a real S3 server, once for all tests. It ends with this process."""
    return Weed(tmp_path_factory.mktemp("weed")).start().wait_ready()


@pytest.fixture
def bucket(object_store: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """Make a bucket for one test, and set AWS_… for it in the environment."""
    yield from _bucket(object_store, monkeypatch)


@pytest.fixture
def weak_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """Make a bucket on a server that ignores a write's conditions, and answers ranges with 200."""
    server = Rclone(tmp_path / "rclone").start().wait_ready()
    yield from _bucket(server, monkeypatch)
    server.kill()


def _bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    bucket = Bucket(server, server.make_bucket())
    yield bucket
    server.delete_bucket(bucket.name)


@pytest.fixture
def fault_proxy(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """Put a proxy in front of the bucket's server, and AWS_ENDPOINT_URL to the proxy."""
    with FaultProxy(bucket.server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


@pytest.fixture(scope="session")
def images() -> None:
    """Build both container images from this checkout, or skip the test if no Docker engine answers.

    BASE_IMAGE in the environment selects another base image.
    """
    if not shutil.which("docker") or "Server Version" not in docker("info", check=False):
        pytest.skip("no Docker engine answers here")
    if not re.search(r"version v?[2-9]", docker("compose", "version", check=False)):
        pytest.skip("the Docker engine here has no Compose v2")
    docker("compose", *CPU, "build", timeout=1800, REVISION=REVISION)


@pytest.fixture(scope="session")
def jpegtran() -> str:
    """Return the path of the program that packs JPEGs."""
    return shutil.which("jpegtran") or pytest.skip("needs jpegtran (apt-get install libjpeg-turbo-progs)")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 64 KiB, which a test can remount with another size."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(path)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system of 64 KiB can be mounted here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)
