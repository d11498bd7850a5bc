"""One start at a time writes in a run's folder, also if an earlier one is frozen and comes back."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
from harness import SMALL, Job, contents_of, environment, freeze, kill
from mlflow import MlflowClient

from pipeline.addons.deploy import node
from pipeline.addons.deploy.takeover import STALE_S
from pipeline.errors import TemporaryError
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
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], text=True, **pipes)
        assert self.line() == "ready"

    def line(self) -> str:
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        """Let it take the lock."""
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


def test_a_lock_is_taken_over_from_a_frozen_holder_which_then_writes_nothing(
    tmp_path: Path, holder: Holder, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    by_holder = rf"by process {holder.process.pid} on .*, last refreshed \d+ s ago: "
    holder.stop()
    age(run / "lock", STALE_S - 10)
    with pytest.raises(TemporaryError, match=f"held {by_holder}"):
        RunFolder(run).hold()
    assert {path.name for path in run.iterdir()} == {"lock", "checkpoints"}
    # it was frozen while it wrote two of these; another machine measures the disk with the third
    for name in (".receipt.json", "report/.index.html", ".doctor-x"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).touch()
    old = Journal(run / "journal.jsonl", pytest.fail)
    old.log_event("before")
    age(run / "lock")
    folder = RunFolder(run)
    folder.hold()
    taken = rf"took over run.dir={run} from process {holder.process.pid} on .*, last refreshed \d+ s ago\n"
    assert re.fullmatch(taken, capsys.readouterr().err)
    new = Journal(folder.journal, pytest.fail)
    assert new.run_id == old.run_id
    old.log_event("what a frozen holder still writes goes to a file of its own")
    new.log_event("next")
    assert [row["event"] for row, _ in read(folder.journal)] == ["created", "before", "next"]
    code, error = holder.end()
    assert code == 75
    assert error.startswith(f"pipeline: run.dir={run} was taken over by process {os.getpid()} on ")
    left = {path.name for path in run.rglob("*")}
    assert left == {"lock", "checkpoints", "report", ".doctor-x", "journal.jsonl"}
    folder.check_ours()
    other = Holder(run)
    other.go()
    code, error = other.end()
    assert (code, f"held by process {os.getpid()} " in error) == (75, True)
    folder.release()


def test_the_preflight_waits_for_the_node_it_replaces(tmp_path: Path, digits: Path, holder: Holder) -> None:
    """That node may have lost only the API server, and the other nodes are with it."""
    words = ["pipeline", "doctor", "digits", f"data.root={digits}", f"run.dir={tmp_path / 'run'}"]
    env = node.environment(2, 1) | {"PET_RDZV_ENDPOINT": f"{socket.gethostname()}:29500"}
    sooner = "from pipeline.addons.ops import doctor; doctor.REFRESH_S = 0.2"
    files = tmp_path / "out", tmp_path / "err"
    files[1].touch()
    preflight = forked.server().start([*words, "track.uri=none"], environment(**env), files, sooner)
    while "is held by process" not in files[1].read_text():
        assert preflight.poll() is None, files[1].read_text()
        time.sleep(0.1)
    time.sleep(1)
    assert preflight.poll() is None
    assert holder.end()[0] == 0
    assert preflight.wait(60) == 0, files[1].read_text()


def test_of_several_that_take_over_at_once_one_wins(tmp_path: Path, holder: Holder) -> None:
    holder.stop()
    age(tmp_path / "run/lock")
    others = [Holder(tmp_path / "run") for _ in range(4)]
    for other in others:
        other.go()
    lines = [other.line() for other in others]
    assert sorted(lines) == ["", "", "", "held"]
    assert holder.end()[0] == 75, "the old holder writes nothing"
    assert [other.end()[0] for other in others] == [0 if line == "held" else 75 for line in lines]


def test_no_file_gets_its_name_once_the_folder_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    folder.receipt.write_text("old")

    def check() -> None:
        if any(tmp_path.rglob(".*")):
            raise OSError("in place of the end of the process")

    monkeypatch.setattr(folder, "check_ours", check)
    with pytest.raises(OSError, match="in place of"):
        folder.write(folder.receipt, b"new")
    assert folder.receipt.read_text() == "old"


PREPARE = """\
import sys, time
from pathlib import Path
from pipeline.addons.mlflow.delivery import Delivery
from pipeline.config.load import load
from pipeline.guards.signals import StopRequest
from pipeline.guards.watchdog import Watchdog
from pipeline.record.folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
folder.lock.join_holder()
folder.sender_lock.take(0)
new = folder.path / 'new'
new.write_text('process 2 on another since 2026-01-02 00:00:00')
new.rename(folder.path / sys.argv[2])
"""
HANG = """\
Watchdog(0, folder.path / "hang-rank-1.txt", 1, StopRequest(), folder.check_ours).start()
time.sleep(60)
"""
SENDING = 'Delivery(folder, load("digits", []), "http://127.0.0.1:9", 1).send_rows()'


@pytest.mark.parametrize(
    ("taken", "program"),
    [("lock", HANG), ("lock", SENDING), ("mlflow.lock", SENDING)],
    ids=["hang", "sending for another", "sending beside another"],
)
def test_all_processes_of_a_run_that_was_taken_over_end(tmp_path: Path, taken: str, program: str) -> None:
    (tmp_path / "lock").write_text("process 1 on one since 2026-01-01 00:00:00\n")
    command = [sys.executable, "-c", PREPARE + program, str(tmp_path), taken]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 75, done.stderr
    assert "was taken over by process 2 on another since 2026-01-02 00:00:00: " in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"lock", "mlflow.lock"}


@pytest.mark.parametrize("tracker", ["none", pytest.param("auto", marks=pytest.mark.full)])
def test_a_run_that_was_taken_over_in_a_save_writes_nothing_when_it_returns(
    tmp_path: Path, digits: Path, seed: int, tracker: str
) -> None:
    """faults/test_nodes.py has it for several nodes, at any instant."""
    draw, epochs = random.Random(seed), {"none": 2, "auto": 8}[tracker]
    words = ["digits", f"data.root={digits}", *SMALL, f"track.uri={tracker}", f"train.epochs={epochs}",
             "data.workers=1", "checkpoint.every=5 steps"]  # fmt: skip
    old = Job(tmp_path / "run", words).start().wait_for_step(draw.randint(6, 20))
    if tracker == "auto":
        old.wait_until((old.folder / "mlflow.json").exists, "first delivery")
    old.wait_until(old.is_saving, "save", pause=0.0005)
    frozen, holder = old.processes(), old.ranks()[0]
    freeze(frozen)
    for path in old.folder.glob("*lock"):
        age(path)
    link = old.folder.with_name("new")  # so that the output of the two has files of its own
    link.symlink_to(old.folder)
    new = Job(link, words).start().wait_for_step(old.step() + draw.randint(1, 10))
    assert f"from process {holder} on " in new.log()
    freeze(new.processes())
    before = contents_of(old.folder)
    for pid in frozen:
        kill(pid, signal.SIGCONT)
    assert f"was taken over by process {new.ranks()[0]} on " in old.wait(30, code=75).err
    old.wait_gone(5)
    assert contents_of(old.folder) == before, "nothing is written"
    for pid in new.processes():
        kill(pid, signal.SIGCONT)
    result = new.wait(code=0)
    new.assert_each_sample_once()
    if tracker == "none":
        uninterrupted = Job(tmp_path / "uninterrupted", words).finished()
        assert result.out == uninterrupted.output()
        assert new.trace() == uninterrupted.trace()
        return
    assert "not take everything" not in new.log()
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.info.status == "FINISHED"
    histories = [client.get_metric_history(run.info.run_id, key) for key in run.data.metrics]
    sent = [(point.step, point.key, point.value) for history in histories for point in history]
    assert sorted(sent) == sorted(new.journal(""))
