"""Shared by all tests: a folder of digits, made once."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rounds", type=int, default=1, help="how often each fault is injected (seeds differ)")
    parser.addoption(
        "--seed", type=int, default=0, help="first seed of the faults' instants; printed with each failure"
    )
    parser.addoption(
        "--full", action="store_true", help="also the tests that repeat a promise at more sizes, as CI does"
    )
    parser.addoption("--engine", action="store_true", help="the tests that build and run containers, and those alone")
    parser.addoption("--outage", type=int, default=8, help="seconds that the MLflow server is away (long: 20)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `full` or `engine`, unless asked for: `make test` holds every promise at least once.

    Of several workers one has a whole file, for its fixtures' sake; the longest files come first.
    """
    longest = {"test_tracking": 0, "test_resume": 1, "test_checkpoint": 2, "test_cluster": 3, "test_stop": 4}
    items.sort(key=lambda item: longest.get(item.path.stem, len(longest)))
    wants_engine = config.getoption("--engine")
    left_out = [
        item
        for item in items
        if bool(item.get_closest_marker("engine")) != wants_engine
        or (item.get_closest_marker("full") and not config.getoption("--full"))
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--full")


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--rounds")


@pytest.fixture(scope="session")
def first_seed(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--seed")


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
