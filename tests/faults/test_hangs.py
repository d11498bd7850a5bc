"""A rank that hangs or fails ends the run in seconds, and the error names rank, step and cause."""

import os
import signal
import time
from pathlib import Path

import pytest
from harness import SMALL, Job, children, command_line, kill

LIMIT = 8


def job(folder: Path, digits: Path, *more: str, nproc: int = 3, **env: str) -> Job:
    words = ["digits", f"data.root={digits}", *SMALL, "train.epochs=100", "data.workers=0", f"run.timeout={LIMIT}"]
    return Job(folder, [*words, *more], nproc=nproc, env=env)


@pytest.mark.fault("A7", ci=1, long=10)
def test_a_stopped_rank_ends_the_run_within_the_timeout(tmp_path: Path, digits: Path) -> None:
    run = job(tmp_path / "run", digits).start()
    run.wait_for_step(5)
    kill(run.ranks()[1], signal.SIGSTOP)
    stopped = time.monotonic()
    result = run.wait(60)
    assert time.monotonic() - stopped < LIMIT + 15
    assert result.code == 1
    run.wait_gone(1)
    assert "rank 1 was killed by signal 9" in result.err.splitlines()[-1], "the launcher kills and names it"
    resumed = job(tmp_path / "run", digits, f"train.max_steps={run.step() + 2}").run()
    assert resumed.code == 0, "the same command resumes"


@pytest.mark.full
def test_a_stopped_loader_worker_ends_the_run_with_the_stacks_of_its_rank(tmp_path: Path, digits: Path) -> None:
    run = job(tmp_path / "run", digits, "data.workers=1", nproc=1).start()
    run.wait_for_step(5)
    assert run.process
    workers = [pid for pid in children(run.process.pid) if "pipeline train" in command_line(pid)]
    kill(workers[0], signal.SIGSTOP)
    stopped = time.monotonic()
    result = run.wait(60)
    assert time.monotonic() - stopped < LIMIT + 15
    assert result.code == 1
    run.wait_gone(3)
    traceback = (run.folder / "hang-rank-0.txt").read_text()
    assert "most recent call first" in traceback
    assert "forward_backward" in traceback, "it waited for a batch"
    assert f"{run.folder / 'hang-rank-0.txt'}" in result.err


@pytest.mark.full
def test_a_paused_and_continued_job_is_not_taken_for_a_hang(tmp_path: Path, digits: Path) -> None:
    run = job(tmp_path / "run", digits, "train.max_steps=60", nproc=1).start()
    run.wait_for_step(5)
    assert run.process
    kill(run.process.pid, signal.SIGSTOP)
    time.sleep(LIMIT + 14)
    kill(run.process.pid, signal.SIGCONT)
    assert run.wait().code == 0


@pytest.mark.fault("A6", ci=1, long=10)
@pytest.mark.parametrize("rank", [2, pytest.param(0, marks=pytest.mark.full)])
def test_the_first_error_is_the_last_line_with_rank_step_and_samples(tmp_path: Path, digits: Path, rank: int) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        f"if os.environ.get('RANK') == '{rank}':\n"
        "    import torch.nn.functional as functional\n"
        "    original, calls = functional.cross_entropy, []\n"
        "    def failing(*arguments, **options):\n"
        "        calls.append(1)\n"
        "        if len(calls) == 12: raise RuntimeError('injected')\n"
        "        return original(*arguments, **options)\n"
        "    functional.cross_entropy = failing\n"
    )
    run = job(tmp_path / "run", digits, PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    started = time.monotonic()
    result = run.run()
    assert result.code == 1
    assert time.monotonic() - started < 60
    last = result.err.splitlines()[-1]
    assert f"rank {rank} failed at step 11 (sample ids " in last  # the first of the 12 calls warms up DDP
    assert "RuntimeError: injected" in last
