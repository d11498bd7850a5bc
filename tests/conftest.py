"""Shared by all tests: a folder of digits, made once."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # tests run side by side: torch's threads would wait for each other's cores
sys.path.insert(0, str(Path(__file__).parent))
from engine import build_images
from forked import Forked, Place

pytest_plugins = ["faults.ledger"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="also the tests that repeat a promise at more sizes, as CI does"
    )
    parser.addoption("--engine", action="store_true", help="the tests that build and run containers, and those alone")
    parser.addoption("--outage", type=int, default=8, help="seconds that the MLflow server is away (long: 20)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `full` or `engine`, unless asked for: `make test` holds every promise at least once.

    Of several workers one has a whole file, for its fixtures' sake; the longest files come first.
    """
    longest = {
        "test_kills": 0,
        "test_tracking": 1,
        "test_equivalence": 2,
        "test_parallel": 3,
        "test_checkpoint": 4,
        "test_parts": 5,
    }
    items.sort(key=lambda item: longest.get(item.path.stem, len(longest)))
    wants_engine = config.getoption("--engine")
    left_out = [
        item
        for item in items
        if bool(item.get_closest_marker("engine")) != wants_engine
        or (item.get_closest_marker("full") and not _is_full(config))
        or (item.get_closest_marker("long") and config.getoption("--faults") != "long")
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _is_full(config: pytest.Config) -> bool:
    return config.getoption("--full") or config.getoption("--faults") != "once"


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    return _is_full(request.config)


@pytest.fixture(scope="session")
def outage(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--outage")


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits as an image folder."""
    from pipeline.data.sources import make_digits

    root = tmp_path_factory.mktemp("data") / "digits"
    make_digits(root)
    return root


@pytest.fixture(scope="session")
def forked() -> Iterator[Forked]:
    server = Forked()
    yield server
    server.close()


@pytest.fixture(scope="session")
def made_place(tmp_path_factory: pytest.TempPathFactory, forked: Forked) -> Place:
    return Place.make(tmp_path_factory.mktemp("place"), forked)


@pytest.fixture
def place(made_place: Place, tmp_path: Path) -> Place:
    """A copy of a folder with images and a finished run, for small runs in it."""
    shutil.copytree(made_place.path, tmp_path / "place")
    return Place(tmp_path / "place", made_place.forked)


@pytest.fixture(scope="session")
def images() -> None:
    """Both images, built from this checkout."""
    build_images()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB, to be mounted anew with another size."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system of 64 KiB can be mounted here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)
