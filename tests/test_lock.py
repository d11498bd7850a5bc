"""One start at a time writes in a run's folder, also if an earlier one is frozen and comes back."""

import errno
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import SMALL, Job, assert_each_sample_once, kill
from mlflow import MlflowClient

from pipeline.addons.deploy import takeover
from pipeline.addons.deploy.takeover import STALE_S, RefreshedLock
from pipeline.addons.report.commands import STARTED_BY_RUN
from pipeline.errors import TemporaryError
from pipeline.record.checkpoint import CheckpointWriter
from pipeline.record.folder import RunFolder
from pipeline.record.journal import Journal, read

HOLD = """\
import sys
from pathlib import Path
from pipeline.addons.deploy import takeover
from pipeline.errors import RunError
from pipeline.record.folder import RunFolder

takeover.REFRESH_S = 0.3
folder = RunFolder(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
try:
    folder.hold()
except RunError as error:
    print(error, file=sys.stderr)
    sys.exit(error.code)
print("held", flush=True)
sys.stdin.readline()
folder.check_ours()
(folder.path / "written").touch()
"""


class Holder:
    """A process that holds a folder's lock as rank 0 does, without torch."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        """Let it take the lock, or write if it has it."""
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def end(self) -> tuple[int, str]:
        """Let it continue, write and end; return its exit code and standard error."""
        self.process.send_signal(signal.SIGCONT)
        _, error = self.process.communicate("\n", timeout=30)
        return self.process.returncode, error


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    """Yield a process that holds the folder `tmp_path`/run."""
    holder = Holder(tmp_path / "run")
    holder.go()
    assert holder.line() == "held"
    yield holder
    holder.process.kill()
    holder.process.communicate()


def age(path: Path, seconds: float = 95) -> None:
    """Set back the time of a lock file, as if its holder had been stopped for `seconds` already."""
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


@contextmanager
def held(path: Path) -> Iterator[RunFolder]:
    folder = RunFolder(path)
    folder.hold()
    yield folder
    folder.release()


@pytest.mark.parametrize("age_s", [95, STALE_S - 10])
def test_a_lock_that_is_refreshed_is_not_taken_over(tmp_path: Path, holder: Holder, age_s: float) -> None:
    """A living holder keeps its lock, and so does a frozen one that has refreshed it lately."""
    run = tmp_path / "run"
    if age_s < STALE_S:
        holder.stop()
    age(run / "lock", age_s)
    started = time.monotonic()
    with pytest.raises(
        TemporaryError, match=rf"held by process {holder.process.pid} on .*, last refreshed \d+ s ago: "
    ):
        RunFolder(run).hold()
    assert time.monotonic() - started < 5
    assert {path.name for path in run.iterdir()} == {"lock", "checkpoints"}
    assert holder.end() == (0, "")
    assert (run / "written").exists(), "it continues as if nothing had happened"


def test_a_lock_is_taken_over_from_a_frozen_holder_which_then_writes_nothing(
    tmp_path: Path, holder: Holder, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    # it was frozen while it wrote two of these; another machine measures the disk with the third
    for name in (".receipt.json", "report/.index.html", ".doctor-x"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).touch()
    old = Journal(run / "journal.jsonl", pytest.fail)
    old.log_event("before")
    holder.stop()
    age(run / "lock")
    with held(run) as folder:
        taken = rf"took over run.dir={run} from process {holder.process.pid} on .*, last refreshed 9. s ago\n"
        assert re.fullmatch(taken, capsys.readouterr().err)
        new = Journal(folder.journal, pytest.fail)
        assert new.run_id == old.run_id
        old.log_event("what a frozen holder still writes goes to a file of its own")
        new.log_event("next")
        assert [row["event"] for row, _ in read(folder.journal)] == ["created", "before", "next"]
        code, error = holder.end()
        assert code == 75
        assert error.startswith(f"pipeline: run.dir={run} was taken over by process {os.getpid()} on ")
        assert not folder.report.joinpath(".index.html").exists()
        assert {path.name for path in run.iterdir()} == {
            "lock", "checkpoints", "report", ".doctor-x", "journal.jsonl",
        }  # fmt: skip
        folder.check_ours()
        with pytest.raises(TemporaryError, match=f"held by process {os.getpid()} "):
            in_another_process(lambda: RunFolder(run).hold())


def in_another_process(work: Callable[[], None]) -> None:
    """Do the work in a forked process, which has no lock of ours; raise its TemporaryError here."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        try:
            work()
        except TemporaryError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        line = pipe.read()
    os.waitpid(pid, 0)
    if line:
        raise TemporaryError(line)


def test_of_several_that_take_over_at_once_one_wins(tmp_path: Path, holder: Holder, full: bool) -> None:
    for _ in range(4 if full else 1):
        holder.stop()
        age(tmp_path / "run/lock")
        others = [Holder(tmp_path / "run") for _ in range(4)]
        for other in others:
            other.go()
        winners = [other for other in others if other.line() == "held"]
        assert len(winners) == 1, "exactly one holds the lock"
        for other in others:
            if other not in winners:
                assert other.end()[0] == 75
        assert holder.end()[0] == 75
        holder.process, winners[0].process = winners[0].process, holder.process


def test_a_process_beside_the_holder_notices_the_next_holder(tmp_path: Path) -> None:
    """Test the other ranks and the sender, which write on behalf of rank 0."""
    path = tmp_path / "lock"
    with held(tmp_path) as folder:
        other = RefreshedLock(path, "", "")
        other.join_holder()
        assert other.is_ours()
        folder.release()
        assert other.is_ours(), "nobody has taken the lock"
        path.write_text("process 1 on another since 2030-01-01 00:00:00\n")
        assert not other.is_ours()
        path.unlink()
        assert other.is_ours()
        path.mkdir()
        assert not other.is_ours(), "a lock that cannot be read is not ours"
        path.rmdir()


def test_a_holder_that_cannot_find_out_who_holds_its_lock_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(code: int) -> None:
        raise SystemExit(code)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with held(tmp_path / "run") as folder:
        with monkeypatch.context() as patched:
            patched.setattr(takeover.os, "stat", fail)
            patched.setattr(takeover.os, "_exit", end)
            with pytest.raises(SystemExit, match="75"):
                folder.check_ours()
        assert "its lock was lost or cannot be read" in capsys.readouterr().err
        with open(tmp_path / "run/lock", "r+b") as file:
            # an NFS server gives the lock of a silent client away; the next holder writes this file
            file.write(b"another process")
            file.flush()
            assert not folder.lock.is_ours()  # type: ignore[attr-defined]


def test_no_file_gets_its_name_once_the_folder_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    folder.receipt.write_text("old")

    def check() -> None:
        if any(tmp_path.rglob(".*")):
            raise OSError("in place of the end of the process")

    monkeypatch.setattr(folder, "check_ours", check)
    with pytest.raises(OSError, match="in place of"):
        folder.write(folder.receipt, b"new")
    assert folder.receipt.read_text() == "old"
    lines: list[str] = []
    writer = CheckpointWriter(folder, 2, lines.append, print)
    writer.save({}, 1, None)
    writer.wait()
    assert "in place of" in lines[0]
    assert not list(folder.checkpoints.iterdir())


def test_a_restart_copies_no_journal(tmp_path: Path) -> None:
    """A copy needs room on a disk that may be full, and the trace of a long run is large."""
    path, inodes = tmp_path / "journal.jsonl", set()
    for _ in range(2):
        with held(tmp_path):
            Journal(path, pytest.fail)
            inodes.add(path.stat().st_ino)
    assert len(inodes) == 1


FAILURE = """\
from pipeline.errors import StorageError
from pipeline.config.load import load
from pipeline.guards.signals import StopRequest
from pipeline.train.session import Session
from pipeline.world import World
with Session(load("digits", []), World(rank=1, size=2), folder, StopRequest())._saving_failure():
    raise StorageError("why")
"""
HANG = """\
import time
from pipeline.guards.signals import StopRequest
from pipeline.guards.watchdog import Watchdog
Watchdog(0, folder.path / "hang-rank-1.txt", 1, StopRequest(), folder.check_ours).start()
time.sleep(60)
"""
SENDING = """\
from pipeline.config.load import load
from pipeline.addons.mlflow.delivery import Delivery
Delivery(folder, load("digits", []), "http://127.0.0.1:9", 1).send_rows()
"""
REPORT = """\
import sys
from pathlib import Path
from pipeline.addons.report.commands import report
from pipeline.addons.report import figures

run = Path(sys.argv[1])

def draw(path, journal):
    path.write_bytes(b"a picture")
    (run / "new").write_text("process 2 on another since 2026-01-02 00:00:00")
    (run / "new").rename(run / "lock")

figures.draw_curves = draw
report(run)
"""


@pytest.mark.parametrize("is_of_run", [True, False])
def test_a_report_that_a_run_draws_ends_once_the_run_is_taken_over(tmp_path: Path, is_of_run: bool) -> None:
    (tmp_path / "lock").write_text("process 1 on one since 2026-01-01 00:00:00")
    (tmp_path / "journal.jsonl").touch()
    env = os.environ | ({STARTED_BY_RUN: "1"} if is_of_run else {})
    command = [sys.executable, "-c", REPORT, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == (75 if is_of_run else 0), done.stderr
    assert ("was taken over by process 2 on another" in done.stderr) == is_of_run
    assert any((tmp_path / "report").iterdir()) != is_of_run


@pytest.mark.parametrize(
    ("taken", "program"),
    [("lock", FAILURE), ("lock", HANG), ("lock", SENDING), ("mlflow.lock", SENDING)],
    ids=["failure", "hang", "sending for another", "sending beside another"],
)
def test_other_processes_of_a_run_that_was_taken_over_end_before_they_write(
    tmp_path: Path, taken: str, program: str
) -> None:
    (tmp_path / "lock").write_text("process 1 on one since 2026-01-01 00:00:00\n")
    prepare = (
        "import sys\n"
        "from pathlib import Path\n"
        "from pipeline.record.folder import RunFolder\n"
        "folder = RunFolder(Path(sys.argv[1]))\n"
        "folder.lock.join_holder()\n"
        "folder.sender_lock.take(0)\n"
        "new = folder.path / 'new'\n"
        "new.write_text('process 2 on another since 2026-01-02 00:00:00')\n"
        "new.rename(folder.path / sys.argv[2])\n"
    )
    command = [sys.executable, "-c", prepare + program, str(tmp_path), taken]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 75, done.stderr
    assert "was taken over by process 2 on another since 2026-01-02 00:00:00: " in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"lock", "mlflow.lock"}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Job:
    run = job(tmp_path_factory.mktemp("uninterrupted") / "run", digits)
    assert run.run().code == 0
    return run


def job(folder: Path, digits: Path, *more: str, nproc: int = 1) -> Job:
    words = ("train.epochs=2", f"data.workers={nproc}", "checkpoint.every=5 steps", *more)
    return Job(folder, ["digits", f"data.root={digits}", *SMALL, *words], nproc=nproc)


def contents(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return inode, time and bytes of each file but mlflow.lock, which its sender may refresh."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "mlflow.lock"]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        ("save", 0),
        *(pytest.param(phase, 1, marks=pytest.mark.full) for phase in ("save", "training", "two ranks")),
        *(
            pytest.param(phase, number, marks=pytest.mark.long)
            for phase in ("save", "training")
            for number in (2, 3)
        ),
    ],
)
def test_a_run_that_was_taken_over_in_training_writes_nothing_when_it_returns(
    tmp_path: Path, digits: Path, uninterrupted: Job, phase: str, number: int
) -> None:
    draw = random.Random(number)
    old = job(tmp_path / "run", digits, nproc=2 if phase == "two ranks" else 1).start()
    old.wait_for_step(draw.randint(6, 20))
    if phase == "save":
        old.wait_until(old.is_saving, "save", pause=0.0005)
    else:
        time.sleep(draw.uniform(0, 0.2))
    result = (new := taken_over(old, draw.randint(1, 10))).wait()
    assert result.code == 0
    assert_each_sample_once(new.trace(), 48)
    if phase != "two ranks":
        assert result.out == uninterrupted.output()
        assert new.trace() == uninterrupted.trace()


def taken_over(old: Job, steps: int) -> Job:
    """Freeze a run, have another start take it over and make `steps`; check what the old one does.

    Return the new run, which continues.
    """
    frozen = old.processes()
    for pid in frozen:
        kill(pid, signal.SIGSTOP)
    holder = old.ranks()[0]
    for path in old.folder.glob("*lock"):
        age(path)
    link = old.folder.with_name("new")  # so that the output of the two has files of its own
    link.symlink_to(old.folder)
    new = Job(link, old.arguments, nproc=old.nproc).start()
    new.wait_for_step(old.step() + steps)
    assert f"from process {holder} on " in new.log()
    for pid in new.processes():
        kill(pid, signal.SIGSTOP)
    time.sleep(0.1)  # their system calls end
    before = contents(old.folder)
    for pid in frozen:
        kill(pid, signal.SIGCONT)
    result = old.wait(30)
    assert result.code == 75, result.err
    assert f"was taken over by process {new.ranks()[0]} on " in result.err
    old.wait_gone(5)
    assert contents(old.folder) == before, "nothing is written"
    for pid in new.processes():
        kill(pid, signal.SIGCONT)
    return new


@pytest.mark.full
def test_a_run_that_was_paused_for_long_continues_if_nobody_took_it_over(
    tmp_path: Path, digits: Path, uninterrupted: Job
) -> None:
    run = job(tmp_path / "run", digits).start()
    run.wait_for_step(8)
    assert run.process
    kill(run.process.pid, signal.SIGSTOP)
    age(run.folder / "lock", 3600)
    kill(run.process.pid, signal.SIGCONT)
    assert run.wait().out == uninterrupted.output()
    assert run.trace() == uninterrupted.trace()
    assert len(run.starts()) == 1


@pytest.mark.full
def test_mlflow_gets_each_point_once_if_a_frozen_sender_is_replaced_and_returns(
    tmp_path: Path, digits: Path
) -> None:
    old = job(tmp_path / "run", digits, "track.uri=auto", "train.epochs=8").start()
    old.wait_until((tmp_path / "run/mlflow.json").exists, "first delivery")
    new = taken_over(old, 1)
    assert new.wait().code == 0, new.log()
    assert "not take everything" not in new.log()
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.info.status == "FINISHED"
    sent = [
        (m.step, m.key, m.value)
        for key in run.data.metrics
        for m in client.get_metric_history(run.info.run_id, key)
    ]
    assert sorted(sent) == sorted(new.journal(""))
