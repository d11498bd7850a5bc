"""Disks that are full, read-only or seen differently, and a clock that jumps: said, outlived, and never in the bits."""

import errno
import fcntl
import os
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from harness import SHARING, SMALL, Job, pipeline, read_rows

from faults.ledger import Notes
from pipeline.errors import RequestError
from pipeline.record.checkpoint import read_verified, step_of
from pipeline.record.folder import RunFolder
from pipeline.record.mlflow.sync import _lock_sending


def job(folder: Path, digits: Path, *more: str, nproc: int = 1, **env: str) -> Job:
    words = ["digits", f"data.root={digits}", *SMALL, "train.epochs=2", "train.max_steps=40", "data.workers=0",
             "checkpoint.every=3 steps", "checkpoint.keep=2", "evaluate.every=1000 steps"]  # fmt: skip
    return Job(folder, [*words, *more], nproc=nproc, env=env)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> tuple[Job, int]:
    """The run that nothing happens to, and how many files its checkpoints ever were: looked at 50 times a second."""
    run = job(tmp_path_factory.mktemp("whole") / "run", digits)
    over = threading.Event()

    def most() -> int:
        seen = [0]
        while not over.wait(0.02):
            folder = run.folder / "checkpoints"
            seen.append(len(os.listdir(folder)) if folder.exists() else 0)
        return max(seen)

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(most)
        code = run.run().code
        over.set()
    assert code == 0
    return run, watching.result()


@pytest.fixture
def whole(watched: tuple[Job, int]) -> Job:
    return watched[0]


def last_line(run: Job) -> str:
    return run.folder.with_suffix(".out").read_text()


@pytest.mark.full
@pytest.mark.fault("C5")
def test_no_more_is_on_the_disk_than_is_kept_and_one_in_the_making(watched: tuple[Job, int]) -> None:
    assert 2 <= watched[1] <= 2 + 1 + 1  # the newest two, the best, the one in the making


@pytest.mark.full
@pytest.mark.fault("C1", ci=1, long=10)
def test_a_full_disk_is_outlived_if_room_comes_and_ends_the_run_if_not(
    small_disk: Path, digits: Path, whole: Job, seed: int, notes: Notes
) -> None:
    size = whole.checkpoints()[0].stat().st_size

    def resize(checkpoints: float) -> None:
        room = int(checkpoints * size) // 1024 + 256
        subprocess.run(["mount", "-o", f"remount,size={room}k", str(small_disk)], check=True)

    resize(2.5)
    run = job(small_disk / "run", digits)
    result = run.run()
    assert result.code == 4
    assert "5 saves in a row failed" in result.error
    assert result.err.count("No space left on device") == 5, "one warning a failed save"
    assert [step_of(path) for path in run.checkpoints()] == [3, 6]
    assert all(read_verified(path) for path in run.checkpoints())
    notes.note("C1")
    resize(4)
    run.arguments.append(f"run.resume={run.folder}")
    assert run.run().out == last_line(whole)

    resize(2.5)
    again = job(small_disk / "again", digits)
    subprocess.run(["rm", "-r", str(run.folder)], check=True)
    again.start()
    again.wait_until(lambda: "No space left on device" in again.log(), "failed save")
    resize(4)
    result = again.wait()
    assert result.out == last_line(whole)
    assert 1 <= result.err.count("No space left on device") < 5
    assert read_rows(again.folder / "trace.jsonl") == read_rows(whole.folder / "trace.jsonl"), "no step is lost"
    notes.note("C1")


@pytest.mark.fault("C3")
def test_a_run_folder_that_cannot_be_written_is_refused_in_seconds(small_disk: Path, digits: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    words = job(small_disk / "run", digits).arguments
    result = pipeline("train", *words, f"run.dir={small_disk / 'run'}")
    assert result.code == 2
    assert f"{small_disk / 'run'} cannot be written: {small_disk} is read-only" in result.error
    assert result.seconds < 5  # 0.7 s on an idle machine, without torch


@pytest.mark.fault("C1")
@pytest.mark.parametrize("pages", [0, 1], ids=["none for the lock", "one for the lock, none for what follows"])
def test_a_start_on_a_full_disk_is_one_line_and_exit_4_at_all(small_disk: Path, digits: Path, pages: int) -> None:
    (small_disk / "filler").write_bytes(bytes((16 - pages) << 12))
    words = job(small_disk / "run", digits).arguments
    result = pipeline("train", *words, f"run.dir={small_disk / 'run'}", "--nproc", "2", timeout=100)
    assert result.error == (
        f"run.dir={small_disk / 'run'} cannot be written: No space left on device: make room, or give another folder"
        " with run.dir=FOLDER"
    )
    assert result.code == 4


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_held_by_nobody_and_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def lockf(descriptor: int, kind: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    folder = RunFolder(tmp_path)
    for hold in (folder.hold, partial(_lock_sending, folder)):
        with pytest.raises(RequestError, match=f"run.dir={tmp_path} cannot be locked: {os.strerror(code)}: .* locks"):
            hold()
    assert not folder.is_held()


@pytest.mark.full
@pytest.mark.fault("C4", ci=1, long=10)
def test_ranks_that_see_other_folders_train_the_same(tmp_path: Path, digits: Path, seed: int) -> None:
    """As on a network's disk, where one machine may see late what another has written."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK', '0') != '0':\n"
        "    whole = os.scandir\n"
        "    class Some:\n"
        "        def __init__(self, path): self.inner = whole(path)\n"
        "        def __enter__(self): return self\n"
        "        def __exit__(self, *_): self.inner.close()\n"
        "        def __iter__(self): return iter(list(self.inner)[::-2])\n"
        f"    there = lambda path: str(path).startswith(({str(digits)!r}, {str(tmp_path / 'other')!r}))\n"
        "    os.scandir = lambda path='.': Some(path) if there(path) else whole(path)\n"
        "    every = os.listdir\n"
        "    os.listdir = lambda path='.': every(path)[::-2] if there(path) else every(path)\n"
    )
    words = ("train.max_steps=8", "data.source=folder")
    lines = set()
    for name, env in (("same", {}), ("other", {"PYTHONPATH": str(tmp_path)})):
        run = job(tmp_path / name, digits, *words, nproc=2, **env)
        assert run.run().code == 0, run.log()
        again = job(tmp_path / name, digits, *words[1:], "train.max_steps=12", nproc=2, **env)
        lines.add(again.run().out)
    assert len(lines) == 1


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Job:
    """Two processes with loader workers, from a folder that always stays where it is."""
    run = from_folder(tmp_path_factory.mktemp("fed") / "run", digits)
    assert run.run().code == 0
    return run


def from_folder(folder: Path, root: Path, *more: str) -> Job:
    return job(folder, root, "data.source=folder", "data.workers=4", "evaluate.every=9 steps", *more, nproc=2)


def blamed(run: Job) -> list[dict[str, object]]:
    return [row for row in read_rows(run.folder / "journal.jsonl") if row.get("event") == "bad image"]


@pytest.mark.full
@pytest.mark.fault("J3", ci=1, long=5)
@pytest.mark.parametrize("seconds", [5, pytest.param(60, marks=pytest.mark.long)])
def test_data_that_is_gone_for_a_while_is_waited_for(
    tmp_path: Path, digits: Path, fed: Job, seconds: int, seed: int
) -> None:
    root = shutil.copytree(digits, tmp_path / "data")
    run = from_folder(tmp_path / "run", root).start()
    run.wait_for_step(1 + seed)
    root.rename(tmp_path / "away")
    run.wait_until(lambda: "waiting for it" in run.log(), "word of the outage")
    time.sleep(seconds)
    (tmp_path / "away").rename(root)
    result = run.wait()
    assert result.out == last_line(fed)
    assert read_rows(run.folder / "trace.jsonl") == read_rows(fed.folder / "trace.jsonl")
    assert not blamed(run)
    assert 1 <= result.err.count("the data is out of reach") <= 4, "once for each rank's two loaders, at most"


@pytest.mark.full
@pytest.mark.fault("J3", ci=1, long=5)
def test_data_that_is_gone_for_good_ends_the_run_and_the_same_command_goes_on_once_it_is_back(
    tmp_path: Path, digits: Path, fed: Job, seed: int
) -> None:
    root = shutil.copytree(digits, tmp_path / "data")
    run = from_folder(tmp_path / "run", root, "run.timeout=8").start()
    run.wait_for_step(4 + seed)
    root.rename(tmp_path / "away")
    gone = time.monotonic()
    result = run.wait()
    assert time.monotonic() - gone < 15 * SHARING
    assert result.code == 75
    assert result.error.startswith(f"the data is out of reach ({root}/")
    assert result.error.endswith(": No such file or directory): give the same command again once it is back")
    again = run.run()
    assert (again.code, f"data.root={root} is not there" in again.error) == (75, True)
    (tmp_path / "away").rename(root)
    assert run.run().out == last_line(fed)
    assert read_rows(run.folder / "trace.jsonl") == read_rows(fed.folder / "trace.jsonl")
    assert not blamed(run)


@pytest.mark.full
@pytest.mark.fault("I2")
@pytest.mark.parametrize("hours", [1, -1])
def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, digits: Path, whole: Job, hours: int) -> None:
    """Python's clocks, that is: the machine's own is not ours to set. torch's time-outs go by a clock that never jumps."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "real, real_ns = time.time, time.time_ns\n"
        "def jump():\n"
        "    try:\n"
        f"        return {3600 * hours} if os.path.getsize('{tmp_path}/run/trace.jsonl') > 5000 else 0\n"
        "    except OSError:\n"
        "        return 0\n"
        "time.time = lambda: real() + jump()\n"
        "time.time_ns = lambda: real_ns() + jump() * 10**9\n"
    )
    run = job(tmp_path / "run", digits, "run.timeout=20", PYTHONPATH=str(tmp_path))
    result = run.run()
    assert result.out == last_line(whole)
    rows = read_rows(run.folder / "journal.jsonl")
    assert max(row["time"] for row in rows) - min(row["time"] for row in rows) > 3_000_000, "it did jump"
    assert all(value >= 0 for row in rows for key, value in row.get("metrics", {}).items() if key.startswith("time/"))
    assert "-" not in "".join(line.rpartition("data")[2] for line in result.err.splitlines() if " left" in line)
    assert time.monotonic() - run.started < 60
