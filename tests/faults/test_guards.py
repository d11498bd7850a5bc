"""Without a guard, or with a fault in the core, a test fails.

A guard is a line of code that a run needs only when something goes wrong. `make guards` removes
each from a copy of this tree. `make mutations` puts in each fault of mutations.yaml.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

ROOT = Path(__file__).parents[2]


class Guard(NamedTuple):
    name: str
    file: str
    line: str
    without: str
    test: str
    """Fails without the guard."""


GUARDS = [
    Guard("digest check of a checkpoint", "pipeline/record/checkpoint_files.py",
          "    if not digest.startswith(stated):\n",
          "    if not digest:\n",
          "tests/test_checkpoint.py::test_every_damaged_checkpoint_is_detected_named_and_skipped"),
    Guard("lock of the run folder", "pipeline/addons/deploy/takeover.py",
          "            acquire(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
          "", "tests/faults/test_stops.py::test_a_second_start_exits_75_and_names_the_holder"),
    Guard("processes end with their parent", "pipeline/supervision.py",
          "    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)\n",
          "", "tests/faults/test_kills.py::test_killed_processes_end_with_the_same_bits[seed=0-2]"),
    Guard("loader workers ignore SIGTERM", "pipeline/data/workers.py",
          "        signal.signal(number, signal.SIG_IGN)\n",
          "        signal.signal(number, signal.SIG_DFL)\n",
          "tests/faults/test_stops.py::test_signals_to_loader_workers_or_again_do_not_break_the_save"),
    Guard("the watchdog learns of a signal that the main thread cannot handle", "pipeline/guards/signals.py",
          "        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)\n",
          "            pass\n",
          "tests/faults/test_hangs.py::test_a_stop_ends_processes_that_wait_for_a_device_or_a_peer"),
    Guard("collective stop", "pipeline/group.py",
          "        dist.all_reduce(raised, dist.ReduceOp.MAX)\n        return",
          "        return",
          "tests/faults/test_stops.py::test_sigterm_to_one_rank_saves_that_step_and_exits_75[seed=0]"),
    Guard("fsync of a checkpoint before it is renamed", "pipeline/record/checkpoint.py",
          "                os.fsync(file.fileno())\n",
          "", "tests/test_checkpoint.py::test_a_checkpoint_is_synced_before_it_is_renamed"),
]  # fmt: skip
MUTATIONS = [
    Guard(row["fault"], f"pipeline/{file}", row["old"], row["new"], f"tests/{row['test']}")
    for file, rows in yaml.safe_load(Path(__file__).with_name("mutations.yaml").read_text()).items()
    for row in rows
]


def each(guards: list[Guard]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("guard", guards, ids=lambda guard: guard.name)


@each(GUARDS + MUTATIONS)
def test_a_guard_is_one_place_in_its_file(guard: Guard) -> None:
    assert (ROOT / guard.file).read_text().count(guard.line) == 1
    file, _, name = guard.test.partition("::")
    assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()


@pytest.mark.long
@each(GUARDS)
def test_without_a_guard_its_test_fails(guard: Guard, tmp_path: Path) -> None:
    assert_noticed(guard, tmp_path / "tree")


@pytest.mark.long
@each(MUTATIONS)
def test_with_a_mutation_its_test_fails(guard: Guard, tmp_path: Path) -> None:
    assert_noticed(guard, tmp_path / "tree")


def assert_noticed(guard: Guard, tree: Path) -> None:
    """Assert that the test fails in a copy of this tree, with the other text."""
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "build", "*.pyc"))
    source = tree / guard.file
    source.write_text(source.read_text().replace(guard.line, guard.without))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "--tb=line", "-p", "no:cacheprovider", guard.test],
        cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "\nFAILED " in done.stdout, done.stdout[-2000:]
