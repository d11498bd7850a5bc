"""A stop signal to any process, in any phase, saves the current step and exits 75 in seconds."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
from harness import SLOW, Job, assert_same, before_each, command_line, kill, quick, wait_until

from faults.ledger import Notes
from pipeline.errors import RunError, TemporaryError
from pipeline.guards.signals import StopRequest
from pipeline.guards.watchdog import Watchdog
from pipeline.record.checkpoint_files import newest_verified, step_of

PHASES = ("first batch", "training", "save", "validation")
EPOCH = 29  # steps


def job(folder: Path, digits: Path, *more: str, nproc: int = 4) -> Job:
    words = ["digits", f"data.root={digits}", *SLOW, "train.epochs=2", f"data.workers={2 * nproc}",
             "checkpoint.every=10 steps", "evaluate.batch=2"]  # fmt: skip
    return Job(folder, [*words, *more], nproc=nproc)


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
        start = time.monotonic()
        kill(draw.choice(run.ranks()), signal.SIGTERM)
        result = run.wait(60, code=75)  # docs/faults.md has the measured time
        notes.note("B1", seconds=time.monotonic() - start)
        run.wait_gone(1)
        found = newest_verified(run.folder / "checkpoints", lambda line: pytest.fail(line))
        assert found, phase
        saved = step_of(found[0])
        assert saved == run.step(), "the last step is saved"
        assert saved <= step + 3, "it stops at the next step"
        assert f"step {saved} is saved" in result.error
    if full:
        uninterrupted = job(tmp_path / "uninterrupted", digits, nproc=ranks)
        assert run.run_in_forks().out == uninterrupted.run_in_forks().out
        assert_same(run, uninterrupted)


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_closed_terminal_stops_a_run_and_saves_its_step(tmp_path: Path, digits: Path, nproc: int) -> None:
    run = job(tmp_path / "run", digits, "data.workers=2", nproc=nproc).start().wait_for_step(5)
    result = run.stop(signal.SIGHUP, code=75)
    assert f"step {run.step()} is saved" in result.error
    assert step_of(run.checkpoints()[-1]) == run.step()


@pytest.mark.fault("B2")
def test_signals_to_loader_workers_or_again_do_not_break_the_save(tmp_path: Path, digits: Path) -> None:
    run = job(tmp_path / "run", digits, "train.epochs=100", nproc=1).start().wait_for_step(5)
    workers = run.workers(run.ranks()[0])
    assert workers
    for pid in workers:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            kill(pid, number)
    run.wait_for_step(run.step() + 5)
    assert all(" train " in command_line(pid) for pid in workers), "no worker ended"
    run.send(signal.SIGUSR1)
    run.wait_until(lambda: "most recent call first" in run.log(), "stacks of the threads")
    for number in (signal.SIGTERM, signal.SIGINT):
        run.send(number)
    assert run.stop().code == 75
    assert step_of(run.checkpoints()[-1]) == run.step()


@pytest.mark.parametrize("by_torchrun", [False, True])
def test_nohup_keeps_a_run_until_its_launcher_stops(tmp_path: Path, digits: Path, by_torchrun: bool) -> None:
    """Test with loader workers: torchrun's agent signals the whole process group."""
    run = job(tmp_path / "run", digits, "data.workers=2", "train.epochs=100", nproc=2)
    run.by_torchrun = run.interpreter = by_torchrun
    run.prelude = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    run.start().wait_for_step(2)
    for pid in run.processes():
        kill(pid, signal.SIGHUP)
    run.wait_for_step(run.step() + 5)
    assert len(run.ranks()) == 2, "no rank ended"
    assert run.stop().code == (1 if by_torchrun else 75)  # torchrun exits 1 for every failure
    assert step_of(run.checkpoints()[-1]) == run.step()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_of_a_start_prints_one_line(
    tmp_path: Path, digits: Path, number: int, seed: int, full: bool
) -> None:
    draw = random.Random(seed + number)
    run = job(tmp_path / "run", digits, "data.workers=0", nproc=2)
    for longest in (0, 0.1, 0.5) if full else (0.1,):
        before = run.step()
        run.start().wait_until(run.ranks, "the first rank")
        time.sleep(draw.uniform(0, longest))
        result = run.stop(number, code=75)
        made = f": step {run.step()} is saved" if run.step() > before else " before a step was made"
        assert f"asked to stop{made}" in result.error
        run.wait_gone(1)


def test_a_signal_anywhere_in_a_start_exits_75(tmp_path: Path, digits: Path, seed: int, full: bool) -> None:
    """Stop a start while it reads its checkpoint, and at other instants.

    There, the exception that a handler raised became "is not a checkpoint", exit code 4.
    """
    draw = random.Random(seed)
    run = job(tmp_path / "run", digits, "data.workers=0", "train.epochs=100", nproc=1)
    stop = "inner(*words); os.kill(os.getpid(), signal.SIGTERM); return"
    run.prelude = before_each("pipeline.record.folder:RunFolder.hold", stop)
    assert run.run().code == 75
    assert not run.folder.exists(), "a run without a step leaves no folder"
    run.prelude = ""
    run.arguments.append("train.max_steps=1")
    run.finished().arguments.pop()
    for instant in range(30 if full else 6):
        call = ("operate.resume.decode_state", "operate.start.find", "train.session.build")[instant % 3]
        timer = f"threading.Timer({draw.uniform(0, 0.08)}, os.kill, (os.getpid(), signal.SIGTERM))"
        run.prelude = before_each(f"pipeline.{call}", f"{timer}.start()")
        assert "asked to stop" in run.run(code=75).error
    assert not (run.folder / "failure.json").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_command_line_is_imported_exits_75(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "pipeline", "train", "digits", "--nproc", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        wait_until(lambda: has_signal(process.pid, "SigCgt", signal.SIGTERM), "handler")
        process.send_signal(number)
        _, error = process.communicate()
    assert process.returncode == 75
    assert (error.count("\n"), "the same command again" in error) == (1, True)


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_second_ctrl_c_ends_the_wait_for_mlflow(tmp_path: Path, digits: Path, nproc: int) -> None:
    words = ("data.workers=0", f"track.uri=sqlite:///{tmp_path}/mlflow.db")
    run = job(tmp_path / "run", digits, *words, nproc=nproc)
    run.env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "1000"  # so long would a wait after one signal take
    run.start().wait_for_step(2)
    (sender,) = (pid for pid in run.processes() if " sync " in command_line(pid))
    run.wait_until(lambda: has_signal(sender, "SigIgn", signal.SIGHUP), "sender that outlives a terminal")
    kill(sender, signal.SIGSTOP)
    run.send(signal.SIGINT)
    run.wait_until(lambda: "sending what" in run.log(), "wait for MLflow")
    result = run.stop(signal.SIGINT, code=75)
    assert f"step {run.step()} is saved" in result.error
    run.clean()


@pytest.mark.parametrize("end", ["saves", "stop"])
def test_a_run_folder_that_is_removed_during_the_run_is_named(tmp_path: Path, digits: Path, end: str) -> None:
    every = "2 steps" if end == "saves" else "1000 steps"
    words = (f"checkpoint.every={every}", "data.workers=0", "train.epochs=100")
    run = job(tmp_path / "run", digits, *words, nproc=1).start().wait_for_step(3)
    run.folder.rename(tmp_path / "elsewhere")
    result = run.stop(code=4) if end == "stop" else run.wait(code=4)
    assert f"run.dir={run.folder} was removed or renamed" in result.error
    assert "disk" not in result.err


def test_a_stop_waits_for_slow_steps_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopRequest()
    watched = Watchdog(3000, tmp_path / "stacks", 0, stop)

    def end(error: RunError) -> NoReturn:
        raise error

    def pass_time(seconds: int) -> None:
        ticks = iter([*[False] * seconds, True])
        monkeypatch.setattr(watched, "_stopped", SimpleNamespace(wait=lambda _: next(ticks)))
        watched._watch()

    monkeypatch.setattr(watched, "_end_process", end)
    pass_time(45)  # a step
    watched.beat()
    stop._received.append(signal.SIGTERM)
    pass_time(60)  # a step that takes longer
    with watched.allow_pause():
        pass_time(140)  # a save
    with pytest.raises(TemporaryError, match="rank 0 was asked to stop, made no progress for 121 s"):
        pass_time(200)  # a hang


@pytest.mark.fault("A8")
def test_a_second_start_exits_75_and_names_the_holder(tmp_path: Path, digits: Path) -> None:
    run = job(tmp_path / "run", digits, "data.workers=0", "train.epochs=100", nproc=2)
    run.start().wait_for_step(2)
    for arguments in ([], ["--nproc", "2"]):
        # it does not wait for the first, which trains on
        second = quick("train", *run.arguments, f"run.dir={run.folder}", *arguments, timeout=120, code=75)
        assert f"held by process {run.ranks()[0]}" in second.error
    kill(run.ranks()[1], signal.SIGTERM)
    assert run.wait().code == 75, "the first run continues until it is stopped"


def has_signal(pid: int, kind: str, number: int) -> bool:
    """Return True if a process ignores (SigIgn) or handles (SigCgt) a signal."""
    numbers = Path(f"/proc/{pid}/status").read_text().partition(f"{kind}:")[2].split()[0]
    return bool(int(numbers, 16) & 1 << number - 1)


def _wait_for(phase: str, run: Job, draw: random.Random, before: int) -> None:
    """Wait until the run, which started after step `before`, is in the phase."""
    match phase:
        case "first batch":
            run.wait_until(lambda: len(run.ranks()) == run.nproc, "all ranks")
            run.wait_until(lambda: (run.folder / "trace.jsonl").exists(), "start")
        case "training":
            run.wait_for_step(before + draw.randint(2, 15))
            time.sleep(draw.uniform(0, 0.2))
        case "save":
            run.wait_until(run.is_saving, "save", pause=0.0005)
        case "validation":
            run.wait_for_step((before // EPOCH + 1) * EPOCH)
            time.sleep(draw.uniform(0.1, 0.5))
