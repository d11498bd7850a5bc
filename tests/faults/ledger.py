"""Counts what was injected and what came out, and writes the report.

A test says by the mark `fault` which rows it injects and how often it does so by default:
`fault("A1", ci=3, long=20)` is once in `make test`, 3 times with `--faults ci`, 20 times with
`--faults long`, each with a seed of its own that its name shows (`--seed N` starts with another).
Each result is a line of the ledger; a long run that was broken off and started again on the same
code leaves out what has passed. The report is made from the ledger alone.
"""

import json
import os
import platform
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from faults.rows import ROWS

ROOT = Path(__file__).parents[2]


@dataclass
class Notes:
    """What a test has injected; without a note it is once each row of its mark."""

    taken: dict[str, list[float | None]] = field(default_factory=lambda: defaultdict(list))

    def note(self, row: str, *, times: int = 1, seconds: float | None = None) -> None:
        """seconds: until it had recovered, or had ended, as the row promises."""
        self.taken[row] += [seconds] * times


_NOTES = pytest.StashKey[Notes]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("faults")
    group.addoption("--faults", choices=("once", "ci", "long"), default="once", help="how often faults are injected")
    group.addoption("--seed", type=int, default=0, help="first seed of the faults' instants")
    group.addoption("--ledger", type=Path, help="file that results are added to; what it has is not run again")
    group.addoption("--report", type=Path, help="write the report of the ledger there")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(*rows, ci, long): injects these rows of the fault matrix, so often")
    if config.getoption("--ledger"):
        config.pluginmanager.register(_Ledger(config))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("fault")
        count = mark.kwargs.get(metafunc.config.getoption("--faults"), 1) if mark else 1
        first = metafunc.config.getoption("--seed")
        metafunc.parametrize("seed", range(first, first + count), ids=lambda seed: f"seed={seed}")


@pytest.fixture
def notes(request: pytest.FixtureRequest) -> Notes:
    return request.node.stash.setdefault(_NOTES, Notes())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    mark = item.get_closest_marker("fault")
    if mark and (call.when == "call" or call.excinfo):
        assert set(mark.args) <= set(ROWS), f"{item.nodeid}: {mark.args}"
        taken = item.stash.get(_NOTES, Notes()).taken or {row: [None] for row in mark.args}
        item.user_properties.append(("faults", dict(taken)))
    return (yield)


class _Ledger:
    def __init__(self, config: pytest.Config) -> None:
        self._path: Path = config.getoption("--ledger")
        self._report: Path | None = config.getoption("--report")
        self._is_worker = hasattr(config, "workerinput")  # of several, whose results come together in one process
        self._mode: str = config.getoption("--faults")
        self._code = _git("rev-parse", "HEAD:pipeline", "HEAD:tests") + _git(
            "status", "--porcelain", "pipeline", "tests"
        )
        self._commit = _git("rev-parse", "--short", "HEAD")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        passed = {(row["test"], row["mode"]) for row in self._rows() if row["passed"]}
        done = [
            item
            for item in items
            if (item.nodeid, self._mode) in passed
            or ((item.nodeid, "once") in passed and "full" not in item.fixturenames)  # type: ignore[attr-defined]
        ]
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item not in done]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        faults = dict(report.user_properties).get("faults")
        if self._is_worker or not faults or report.skipped or not (report.when == "call" or report.failed):
            return
        row = {"test": report.nodeid, "mode": self._mode, "passed": report.passed, "faults": faults,
               "time": time.time(), "commit": self._commit, "code": self._code}  # fmt: skip
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a") as file:
            file.write(json.dumps(row) + "\n")

    def pytest_sessionfinish(self) -> None:
        if self._report and not self._is_worker:
            self._report.write_text(_report(list(self._rows())))

    def _rows(self) -> Iterator[dict[str, Any]]:
        """Results of the code as it is now."""
        if self._path.exists():
            for line in self._path.read_text().splitlines():
                row = json.loads(line)
                if row["code"] == self._code:
                    yield row


def _report(results: list[dict[str, Any]]) -> str:
    table = []
    for name, row in ROWS.items():
        mine = [result for result in results if name in result["faults"]]
        kept = sum(len(result["faults"][name]) for result in mine if result["passed"])
        count = sum(len(result["faults"][name]) for result in mine)
        seconds = [s for result in mine if result["passed"] for s in result["faults"][name] if s is not None]
        took = f"{statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s" if seconds else ""
        by = "<br>".join(f"`{file}`" for file in sorted({result["test"].partition("::")[0] for result in mine}))
        seen = f"{kept:,} of {count:,}" if count else "not run"
        table.append(f"| {name} | {row.injected} | {row.promised} | {seen} | {took} | {by} |")
    failed = [f"- `{result['test']}`" for result in results if not result["passed"]]
    when = [time.strftime("%F", time.gmtime(result["time"])) for result in results]
    days = f"{min(when)} to {max(when)}" if when else "never"
    commands = {"once": "`make test`", "ci": "`make faults-ci` (two tests at a time)", "long": "`make faults`"}
    modes = ", ".join(dict.fromkeys(commands[result["mode"]] for result in results))
    commits = ", ".join(dict.fromkeys(result["commit"] for result in results))
    return "\n".join(
        [
            "# Faults",
            "",
            f"Made from the ledger of {modes}, {days}, commit {commits}, on {_machine()}. *Identical*: the digest"
            " of the weights, each line of the trace and each reported figure equal those of the run that nobody"
            " touched. *As promised*: so many of so many. *Took*: until training made progress again, or until all had left.",
            "",
            "| row | injected | promised | as promised | took (median) | by |",
            "| --- | --- | --- | --- | --- | --- |",
            *table,
            "",
            *(["Not as promised:", "", *failed] if failed else []),
        ]
    )


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return f"{len(os.sched_getaffinity(0))} CPUs ({model})"


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False).stdout.strip()
