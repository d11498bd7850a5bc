"""Count the injected faults and their results, and write the report.

The mark `fault` names the rows of the matrix that a test injects, and how often it runs:
`fault("A1", ci=3, long=20)` runs once in `make test`, 3 times with `--faults ci` and 20 times with
`--faults long`. Each time has its own seed, which is part of the test's name; `--seed N` sets the
first. Each result is a line of the ledger. A restarted long run skips the tests that passed before
with the same code. The report is made from the ledger, and keeps the rows of the page before it.
"""

import json
import os
import platform
import re
import statistics
import subprocess
import textwrap
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ROWS: dict[str, tuple[str, str]] = {
    name: (injected, promised)
    for name, injected, promised in re.findall(
        r"^\| (\w\d) \| (.+?) \| (.+?) \|", (ROOT / "docs/faults.md").read_text(), re.MULTILINE
    )
}
"""The name of each row of the report's table -> the injected fault, and what is promised."""
_COMMANDS = {"once": "`make test`", "ci": "`make faults-ci` (three tests at a time)", "long": "`make faults`"}


@dataclass
class Notes:
    """The faults that a test has injected; without a note, each row of its mark counts once."""

    injected: dict[str, list[float | None]] = field(default_factory=lambda: defaultdict(list))

    def note(self, row: str, *, times: int = 1, seconds: float | None = None) -> None:
        """Record a fault, with the seconds until the recovery or the end, as its row promises."""
        self.injected[row] += [seconds] * times


_NOTES = pytest.StashKey[Notes]()


def pytest_addoption(parser: pytest.Parser) -> None:
    add = parser.getgroup("faults").addoption
    add("--faults", choices=("once", "ci", "long"), default="once", help="how often to inject each fault")
    add("--seed", type=int, default=0, help="first seed, from which the instants of the faults are drawn")
    add("--ledger", type=Path, help="append results to this file; skip tests that passed in it")
    add("--report", type=Path, help="write the report of the ledger to this file")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(*rows, ci, long): injects faults, this often with --faults")
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
        injected = item.stash.get(_NOTES, Notes()).injected or {row: [None] for row in mark.args}
        item.user_properties.append(("faults", dict(injected)))
    return (yield)


class _Ledger:
    def __init__(self, config: pytest.Config) -> None:
        self._path: Path = config.getoption("--ledger")
        self._report: Path | None = config.getoption("--report")
        self._is_worker = hasattr(config, "workerinput")  # of xdist: only the controller writes the ledger
        self._mode: str = config.getoption("--faults")
        self._code = _git("rev-parse", "HEAD:pipeline", "HEAD:tests")
        self._code += _git("status", "--porcelain", "pipeline", "tests")
        self._commit = _git("rev-parse", "--short", "HEAD")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        passed = {(row["test"], row["mode"]) for row in self._rows() if row["passed"]}
        done = [item for item in items if (item.nodeid, self._mode) in passed]
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
            self._report.write_text(_report(self._rows()))

    def _rows(self) -> list[dict[str, Any]]:
        """Return the ledger's results of the current code."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return [row for row in map(json.loads, lines) if row["code"] == self._code]


def _report(results: list[dict[str, Any]]) -> str:
    table = ["| row | injected | promised | kept | s | test |", "| --- | --- | --- | --- | --- | --- |"]
    for name, (injected, promised) in ROWS.items():
        of_row = [result for result in results if name in result["faults"]]
        kept = [seconds for result in of_row if result["passed"] for seconds in result["faults"][name]]
        count = sum(len(result["faults"][name]) for result in of_row)
        known = [seconds for seconds in kept if seconds is not None]
        time_taken = f"{statistics.median(known):.1f}, {max(known):.1f}" if known else ""
        files = sorted({f"`{result['test'].partition('::')[0]}`" for result in of_row})
        rate = f"{len(kept):,}/{count:,}" if count else "not run"
        table.append(f"| {name} | {injected} | {promised} | {rate} | {time_taken} | {'<br>'.join(files)} |")
    failed = [f"- `{result['test']}`" for result in results if not result["passed"]]
    dates = [time.strftime("%F", time.gmtime(result["time"])) for result in results]
    days = " to ".join(sorted({min(dates), max(dates)})) if dates else "never"
    modes = ", ".join(dict.fromkeys(_COMMANDS[result["mode"]] for result in results))
    commits = ", ".join(dict.fromkeys(result["commit"] for result in results))
    paragraphs = [
        f"Measured by {modes}, {days}, commit {commits}, on {_machine()}.",
        "*Identical*: the digest of the weights, the trace (each sample once an epoch) and the figures"
        " equal those of an undisturbed run. *Kept*: successes of attempts. *s*: median and longest time"
        " until training made a step again, or until all processes had ended.",
    ]
    filled = [textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False) for text in paragraphs]
    lists = ["Promise not kept:", "\n".join(failed)] if failed else []
    return "\n\n".join(["# Faults", *filled, "\n".join(table), *lists]) + "\n"


def _machine() -> str:
    model = re.search("model name\\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{len(os.sched_getaffinity(0))} CPUs ({model[1] if model else platform.machine()})"


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
