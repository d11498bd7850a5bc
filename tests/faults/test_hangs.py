"""A rank that hangs or fails ends the run in seconds, and the error names rank, step and cause."""

import signal
import time
from pathlib import Path

import pytest
from harness import SMALL, Job, before_each, kill

from pipeline.guards import watchdog
from pipeline.record.checkpoint_files import newest_verified, step_of
from pipeline.record.journal import last_event

LIMIT = 8


def job(folder: Path, digits: Path, *more: str, nproc: int = 3) -> Job:
    words = ["digits", f"data.root={digits}", *SMALL, "train.epochs=100", "data.workers=0"]
    return Job(folder, [*words, f"run.timeout={LIMIT}", *more], nproc=nproc)


@pytest.mark.fault("A7", ci=1, long=10)
def test_a_stopped_rank_ends_the_run_within_the_timeout(tmp_path: Path, digits: Path) -> None:
    run = job(tmp_path / "run", digits).start().wait_for_step(5)
    kill(run.ranks()[1], signal.SIGSTOP)
    result = run.wait(LIMIT + 60, code=1)
    run.wait_gone(1)
    assert "rank 1 was killed by signal 9" in result.err.splitlines()[-1], "the launcher kills and names it"
    job(tmp_path / "run", digits, f"train.max_steps={run.step() + 2}").run(code=0)  # the same command resumes


@pytest.mark.full
def test_a_pause_is_no_hang_and_a_stopped_loader_worker_ends_the_run(tmp_path: Path, digits: Path) -> None:
    run = job(tmp_path / "run", digits, "data.workers=1", nproc=1).start().wait_for_step(5)
    run.send(signal.SIGSTOP)
    time.sleep(LIMIT + 14)  # the length of the pause
    run.send(signal.SIGCONT)
    run.wait_for_step(run.step() + 5)
    kill(run.workers(run.ranks()[0])[0], signal.SIGSTOP)
    result = run.wait(LIMIT + 60, code=1)
    run.wait_gone(3)
    stacks = run.folder / "hang-rank-0.txt"
    assert "most recent call first" in stacks.read_text()
    assert "forward_backward" in stacks.read_text(), "it waited for a batch"
    assert str(stacks) in result.err


def test_a_stop_ends_processes_that_wait_for_a_device_or_a_peer(tmp_path: Path, digits: Path) -> None:
    assert 1 + watchdog.STOP_S + watchdog._WRITING_S < 30, "torchrun's shutdown timeout"
    words = ("checkpoint.every=5 steps", "run.timeout=60")
    run = job(tmp_path / "run", digits, *words, nproc=2)
    # An event waits as behind an NCCL kernel whose peer has died: no signal interrupts it.
    run.prelude = f"""\
import ctypes
from pipeline.guards import nonfinite, watchdog
from pipeline.train import session
watchdog.STOP_S = 4

class Event:
    records = 0
    def record(self):
        self.records += 1
    def synchronize(self):
        lock = ctypes.create_string_buffer(64)
        if self.records == 15: open({str(tmp_path / "waits")!r}, "w").close()
        while self.records == 15:
            ctypes.CDLL(None).pthread_mutex_lock(lock)

def make_loss_guard(*parts):
    guard = nonfinite.DeviceLossGuard(*parts)
    if parts[0].group.is_main:
        guard._copied = Event()
    return guard

session.make_loss_guard = make_loss_guard
"""
    run.start().wait_until((tmp_path / "waits").exists, "wait")
    result = run.stop(code=75)  # before run.timeout ends them, with 1
    run.wait_gone(1)
    # the other rank exits by itself, too, or because this one is gone
    assert "rank 0 was asked to stop, made no progress for " in result.err
    assert "synchronize" in (run.folder / "hang-rank-0.txt").read_text()
    end = last_event(run.folder / "journal.jsonl")
    assert (end["status"], end["line"].partition(",")[0]) == ("KILLED", "rank 0 was asked to stop")
    found = newest_verified(run.folder / "checkpoints", lambda line: pytest.fail(line))
    assert step_of(found[0]) == 10, "the newest before the hang; that of step 15 waits for the device"
    assert job(tmp_path / "run", digits, *words, "train.max_steps=17", nproc=2).run().done["step"] == "17"


@pytest.mark.fault("A6", ci=1, long=10)
@pytest.mark.parametrize("rank", [2, pytest.param(0, marks=pytest.mark.full)])
def test_the_last_line_names_the_first_error_and_its_samples(tmp_path: Path, digits: Path, rank: int) -> None:
    run = job(tmp_path / "run", digits)
    fault = f"if calls == 12 and os.environ['RANK'] == '{rank}': raise RuntimeError('injected')"
    run.prelude = before_each("torch.nn.functional.cross_entropy", fault)
    result = run.run(code=1)
    assert "made no progress" not in result.err, "the others do not wait for run.timeout"
    last = result.err.splitlines()[-1]
    assert f"rank {rank} failed at step 11 (sample ids " in last  # the first of the 12 calls warms up DDP
    assert "RuntimeError: injected" in last
