"""Asked to stop: a signal to any one process, in any phase, and all save that step and leave with 75, in seconds."""

import random
import signal
import time
from pathlib import Path

import pytest
from harness import SMALL, Job, children, command_line, kill, pipeline, read_rows

from faults.ledger import Notes
from pipeline.record.checkpoint import newest_verified, step_of

PHASES = ("first batch", "training", "save", "validation")
EPOCH = 29  # steps


def job(folder: Path, digits: Path, *more: str, nproc: int = 4) -> Job:
    return Job(
        folder,
        ["digits", f"data.root={digits}", *SMALL, "train.epochs=2", f"data.workers={2 * nproc}",
         "checkpoint.every=10 steps", "evaluate.batch=2", *more],
        nproc=nproc,
    )  # fmt: skip


@pytest.mark.fault("B1", ci=1, long=13)
def test_sigterm_to_one_rank_saves_that_step_and_exits_75(
    tmp_path: Path, digits: Path, full: bool, seed: int, notes: Notes
) -> None:
    draw = random.Random(seed)
    ranks = 4 if full else 2
    run = job(tmp_path / "run", digits, nproc=ranks)
    for phase in PHASES if full else ("training",):
        before = run.step()
        run.start()
        _wait_for(phase, run, draw, before)
        step = run.step()
        asked = time.monotonic()
        kill(draw.choice(run.ranks()), signal.SIGTERM)
        result = run.wait()
        seconds = time.monotonic() - asked
        assert result.code == 75, (phase, result.err)
        assert seconds <= 10, phase
        notes.note("B1", seconds=seconds)
        run.wait_gone(1)
        found = newest_verified(run.folder / "checkpoints", lambda line: pytest.fail(line))
        assert found, phase
        saved = step_of(found[0])
        assert saved == run.step(), "the step that was made last is the one that is saved"
        assert saved <= step + 3, "it stops at the next step, not when it is convenient"
        assert f"step {saved} is saved" in result.error
    if full:
        whole = job(tmp_path / "whole", digits, nproc=ranks)
        assert run.run().done == whole.run().done
        assert read_rows(run.folder / "trace.jsonl") == read_rows(whole.folder / "trace.jsonl")
        assert run.journal("train/", "val/") == whole.journal("train/", "val/")


@pytest.mark.parametrize("by_torchrun", [pytest.param(False, marks=pytest.mark.full), True])
def test_sigterm_to_the_launcher_is_the_same(tmp_path: Path, digits: Path, by_torchrun: bool) -> None:
    """Agents signal whole process groups: loader workers hear it too."""
    run = job(tmp_path / "run", digits, "data.workers=2", nproc=2)
    run.by_torchrun = by_torchrun
    run.start().wait_for_step(5)
    assert run.process
    kill(run.process.pid, signal.SIGTERM)
    result = run.wait()
    assert result.code == (1 if by_torchrun else 75)  # torchrun has one code for all that is not success
    assert step_of(run.checkpoints()[-1]) == run.step()


def test_loader_workers_leave_signals_to_their_group_to_the_rank(tmp_path: Path, digits: Path) -> None:
    run = job(tmp_path / "run", digits, "train.epochs=100", nproc=1).start()
    run.wait_for_step(5)
    assert run.process
    loading = [pid for pid in children(run.process.pid) if " train " in command_line(pid)]
    assert loading
    for pid in loading:
        kill(pid, signal.SIGTERM)
        kill(pid, signal.SIGINT)
    run.wait_for_step(run.step() + 5)
    assert all(" train " in command_line(pid) for pid in loading), "each would have to be forked again"
    kill(run.process.pid, signal.SIGTERM)
    assert run.wait().code == 75


@pytest.mark.fault("B2")
def test_a_second_signal_does_not_break_the_save(tmp_path: Path, digits: Path) -> None:
    run = job(tmp_path / "run", digits, "data.workers=0", nproc=1).start()
    run.wait_for_step(5)
    assert run.process
    kill(run.process.pid, signal.SIGUSR1)
    run.wait_until(lambda: "most recent call first" in run.log(), "account of the threads")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        kill(run.process.pid, number)
    assert run.wait().code == 75
    assert step_of(run.checkpoints()[-1]) == run.step()


@pytest.mark.fault("A8")
def test_a_second_start_leaves_with_75_and_names_the_holder(tmp_path: Path, digits: Path) -> None:
    run = job(tmp_path / "run", digits, "data.workers=0", "train.epochs=100", nproc=2).start()
    run.wait_for_step(2)
    for arguments in ([], ["--nproc", "2"]):
        second = pipeline("train", *run.arguments, f"run.dir={run.folder}", *arguments, timeout=30)
        assert second.code == 75
        assert second.seconds < 5
        assert f"held by process {run.ranks()[0]}" in second.error
    kill(run.ranks()[1], signal.SIGTERM)
    assert run.wait().code == 75, "the first goes on until it is asked to stop"


def test_what_breaks_in_the_interpreters_end_costs_a_run_that_is_done_nothing(tmp_path: Path, digits: Path) -> None:
    # as gloo's threads do there, now and then
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os\nif 'RANK' in os.environ:\n    atexit.register(os.abort)\n"
    )
    run = job(tmp_path / "run", digits, "train.max_steps=1", nproc=2)
    run.env["PYTHONPATH"] = str(tmp_path)
    result = run.run()
    assert result.code == 0, result.err
    assert result.done["step"] == "1"


def _wait_for(phase: str, run: Job, draw: random.Random, before: int) -> None:
    """Until the run, which had made `before` steps when it was started, is in the midst of it."""
    match phase:
        case "first batch":
            run.wait_until(lambda: len(run.ranks()) == run.nproc, "all ranks")
            run.wait_until(lambda: (run.folder / "trace.jsonl").exists(), "start")
        case "training":
            run.wait_for_step(before + draw.randint(2, 15))
            time.sleep(draw.uniform(0, 0.2))
        case "save":
            run.wait_until(run.saving, "save", pause=0.0005)
        case "validation":
            run.wait_for_step((before // EPOCH + 1) * EPOCH)
            time.sleep(draw.uniform(0.1, 0.5))
