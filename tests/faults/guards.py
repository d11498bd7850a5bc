"""Takes each guard out of a copy of this tree: some test must fail, or nothing holds that guard.

`make guards`.

A guard is a line of the program whose absence no run shows until the day it is needed. The tests
named beside it are run without it, and are expected to fail by an assertion of theirs.
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
    tests: tuple[str, ...]


GUARDS = (
    Guard(
        "digest check of a checkpoint",
        "pipeline/record/checkpoint.py",
        "    if not digest.startswith(stated):\n",
        "    if not digest:\n",
        ("tests/test_checkpoint.py::test_every_damaged_checkpoint_is_detected_named_and_skipped",),
    ),
    Guard(
        "lock of the run folder",
        "pipeline/record/folder.py",
        "            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n            return True",
        "            return True",
        ("tests/faults/test_stops.py::test_a_second_start_leaves_with_75_and_names_the_holder",),
    ),
    Guard(
        "death with the parent",
        "pipeline/world.py",
        "    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)\n",
        "",
        ("tests/faults/test_kills.py::test_killed_processes_end_with_the_same_bits[seed=0-2]",),
    ),
    Guard(
        "loader workers ignore SIGTERM",
        "pipeline/data/loader.py",
        "        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n",
        "        signal.signal(signal.SIGTERM, signal.SIG_DFL)\n",
        ("tests/faults/test_stops.py::test_loader_workers_leave_signals_to_their_group_to_the_rank",),
    ),
    Guard(
        "collective stop",
        "pipeline/group.py",
        "        dist.all_reduce(raised, dist.ReduceOp.MAX)\n        return",
        "        return",
        ("tests/faults/test_stops.py::test_sigterm_to_one_rank_saves_that_step_and_exits_75[seed=0]",),
    ),
    Guard(
        "a checkpoint is synced before it has its name",
        "pipeline/record/checkpoint.py",
        "                os.fsync(file.fileno())\n",
        "",
        ("tests/test_checkpoint.py::test_a_checkpoint_is_synced_before_it_is_renamed_and_older_ones_are_deleted_last",),
    ),
)


def main() -> int:
    unheld = []
    for guard in GUARDS:
        with tempfile.TemporaryDirectory(prefix="guards-") as folder:
            tree = Path(folder, "tree")
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "build", "*.pyc"))
            source = tree / guard.file
            text = source.read_text()
            assert text.count(guard.line) == 1, f"{guard.file} has not once {guard.line!r}"
            source.write_text(text.replace(guard.line, guard.without))
            tested = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", *guard.tests],
                cwd=tree,
                env={**os.environ, "PYTHONPATH": str(tree)},
                capture_output=True,
                text=True,
                check=False,
            )
        failed = [line for line in tested.stdout.splitlines() if line.startswith("FAILED")]
        print(f"without {guard.name}:", *(failed or ["NOTHING FAILS", tested.stdout[-2000:]]), sep="\n  ", flush=True)
        if not failed:
            unheld.append(guard.name)
    print(f"{len(GUARDS) - len(unheld)} of {len(GUARDS)} guards are held by a test")
    return bool(unheld)


if __name__ == "__main__":
    sys.exit(main())
