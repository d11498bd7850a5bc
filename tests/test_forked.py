"""A fork that a test starts can be found, waited for and killed like any process."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from harness import SMALL, Job, children, kill, variable

_FORKED_WITHOUT_EXEC = 0x40
"""PF_FORKNOEXEC of the kernel's flags of a process."""


def test_a_started_fork_is_found_by_its_command_line_and_its_signal_is_its_exit_code(
    tmp_path: Path, digits: Path
) -> None:
    run = Job(tmp_path / "run", ["digits", f"data.root={digits}", *SMALL]).start()
    assert run.process
    assert run.process.pid in run.processes()
    assert os.getsid(run.process.pid) == run.process.pid
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(0.1)
    kill(run.process.pid, signal.SIGKILL)
    assert run.process.wait(30) == -signal.SIGKILL
    run.wait_gone(5)


@pytest.mark.parametrize("by_torchrun", [False, True])
def test_a_launcher_that_is_a_fork_forks_its_ranks(tmp_path: Path, digits: Path, by_torchrun: bool) -> None:
    run = Job(
        tmp_path / "run", ["digits", f"data.root={digits}", *SMALL], nproc=2, by_torchrun=by_torchrun
    ).start()
    assert run.process
    first, second = run.wait_until(lambda: len(run.ranks()) == 2 and run.ranks(), "ranks")
    assert [variable(pid, "RANK") for pid in (first, second)] == ["0", "1"]
    assert os.getsid(first) == first, "a launcher ends the process group of each rank"
    for pid in (first, second):
        flags = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6])
        assert flags & _FORKED_WITHOUT_EXEC
    run.wait_for_step(1)
    kill(second, signal.SIGKILL)
    result = run.wait(60)
    assert result.code == 1
    run.wait_gone(5)


def test_a_launcher_that_is_stopped_at_once_ends_its_ranks(tmp_path: Path, digits: Path) -> None:
    run = Job(tmp_path / "run", ["digits", f"data.root={digits}", *SMALL], nproc=2).start()
    assert run.process
    run.wait_until(lambda: children(run.process.pid), "rank", pause=0)  # type: ignore[union-attr]
    kill(run.process.pid, signal.SIGTERM)
    result = run.wait(60)
    assert (result.code, "Traceback" in result.err) == (75, False), result.err
    run.wait_gone(5)


def test_a_started_fork_has_the_exit_code_and_the_output_of_its_command(tmp_path: Path) -> None:
    result = Job(tmp_path / "run", ["digits", "train.epochs=none of these"]).start().wait()
    assert result.code == 2
    assert result.error.startswith("train.epochs=")
    assert not result.out
