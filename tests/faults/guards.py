"""Remove each guard from a copy of this tree and check that a test then fails (`make guards`).

A guard is a line of code that a run needs only when something goes wrong. Each guard names its
tests: without the guard at least one of them must fail.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Guard:
    name: str
    file: str
    line: str
    without: str
    test: str


GUARDS = (
    Guard(
        "digest check of a checkpoint",
        "pipeline/record/checkpoint_files.py",
        "    if not digest.startswith(stated):\n",
        "    if not digest:\n",
        "tests/test_checkpoint.py::test_every_damaged_checkpoint_is_detected_named_and_skipped",
    ),
    Guard(
        "lock of the run folder",
        "pipeline/files.py",
        "            acquire(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "",
        "tests/faults/test_stops.py::test_a_second_start_exits_75_and_names_the_holder",
    ),
    Guard(
        "processes end with their parent",
        "pipeline/orphan.py",
        "    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)\n",
        "",
        "tests/faults/test_kills.py::test_killed_processes_end_with_the_same_bits[seed=0-2]",
    ),
    Guard(
        "loader workers ignore SIGTERM",
        "pipeline/data/workers.py",
        "        signal.signal(number, signal.SIG_IGN)\n",
        "        signal.signal(number, signal.SIG_DFL)\n",
        "tests/faults/test_stops.py::test_loader_workers_ignore_signals_to_their_process_group",
    ),
    Guard(
        "the watchdog learns of a signal that the main thread cannot handle",
        "pipeline/guards/signals.py",
        "        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)\n",
        "",
        "tests/faults/test_hangs.py::test_a_stop_ends_processes_that_wait_for_a_device_or_a_peer",
    ),
    Guard(
        "collective stop",
        "pipeline/group.py",
        "        dist.all_reduce(raised, dist.ReduceOp.MAX)\n        return",
        "        return",
        "tests/faults/test_stops.py::test_sigterm_to_one_rank_saves_that_step_and_exits_75[seed=0]",
    ),
    Guard(
        "fsync of a checkpoint before it is renamed",
        "pipeline/files.py",
        "        os.fsync(file.fileno())\n",
        "",
        "tests/test_checkpoint.py::test_a_checkpoint_is_synced_before_it_is_renamed",
    ),
)


def main() -> int:
    untested = []
    for guard in GUARDS:
        with tempfile.TemporaryDirectory(prefix="guards-") as folder:
            tree = Path(folder, "tree")
            shutil.copytree(
                ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "build", "*.pyc")
            )
            source = tree / guard.file
            text = source.read_text()
            assert text.count(guard.line) == 1, f"{guard.file} must contain {guard.line!r} exactly once"
            source.write_text(text.replace(guard.line, guard.without))
            tests = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", guard.test],
                cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True,
                check=False,
            )  # fmt: skip
        failed = [line for line in tests.stdout.splitlines() if line.startswith("FAILED")]
        print(
            f"without {guard.name}:",
            *(failed or ["NOTHING FAILS", tests.stdout[-2000:]]),
            sep="\n  ",
            flush=True,
        )
        if not failed:
            untested.append(guard.name)
    print(f"{len(GUARDS) - len(untested)} of {len(GUARDS)} guards have a test that fails without them")
    return bool(untested)


if __name__ == "__main__":
    sys.exit(main())
