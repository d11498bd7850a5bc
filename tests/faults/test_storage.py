"""Full or read-only disks, differing listings and a jumping clock never change the weights."""

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from harness import SLOW, Job, kill, pipeline, quick, read_rows
from place import SMALL as PLACE
from place import Place

from faults.ledger import Notes
from pipeline.record.checkpoint_files import read_verified, step_of


def job(folder: Path, digits: Path, *more: str, nproc: int = 1) -> Job:
    words = ["digits", f"data.root={digits}", *SLOW, "train.epochs=2", "data.workers=0", "checkpoint.keep=2",
             "train.max_steps=40", "checkpoint.every=3 steps", "evaluate.every=1000 steps"]  # fmt: skip
    return Job(folder, [*words, *more], nproc=nproc)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Job:
    return job(tmp_path_factory.mktemp("uninterrupted") / "run", digits).finished()


@pytest.mark.full
@pytest.mark.fault("C1", "C5", ci=1, long=10)
def test_a_run_survives_a_full_disk_if_space_is_freed_and_otherwise_exits_4(
    small_disk: Path, digits: Path, uninterrupted: Job, seed: int, notes: Notes
) -> None:
    size = uninterrupted.checkpoints()[0].stat().st_size

    def resize(checkpoints: float) -> None:
        kib = int(checkpoints * size) // 1024 + 256
        subprocess.run(["mount", "-o", f"remount,size={kib}k", str(small_disk)], check=True)

    resize(2.5)
    run = job(small_disk / "run", digits)
    run.prelude = "from pipeline.record import checkpoint; checkpoint.MAX_FAILING_S = 1"
    result = run.run(code=4)
    assert "saves failed 5 times in a row" in result.error
    assert result.err.count("No space left on device") >= 5, "one warning for each failed save"
    assert [step_of(path) for path in run.checkpoints()] == [3, 6]
    assert all(read_verified(path) for path in run.checkpoints())
    notes.note("C1")
    resize(4)  # the newest two, the best, a temporary file
    run.arguments.append(f"run.resume={run.folder}")
    assert run.run_in_forks().out == uninterrupted.output()
    assert "No space left" not in run.log()
    notes.note("C5")

    resize(2.5)
    second = job(small_disk / "second", digits)
    shutil.rmtree(run.folder)
    second.start()
    second.wait_until(lambda: second.log().count("No space left on device") > 5, "failed saves")
    resize(4)
    assert second.wait().out == uninterrupted.output()
    assert second.trace() == uninterrupted.trace(), "no step is lost"
    notes.note("C1")


@pytest.mark.fault("C1")
def test_a_failure_that_a_full_disk_does_not_keep_is_not_promised(small_disk: Path, digits: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=32m", str(small_disk)], check=True)
    words = ("train.max_steps=30", "checkpoint.every=1000 steps", "run.timeout=12")
    run, filler = job(small_disk / "run", digits, *words), small_disk / "filler"

    def fill_disk() -> None:
        with open(filler, "wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))

    run.start().wait_for_step(1)
    fill_disk()
    kill(run.ranks()[0], signal.SIGTERM)
    result = run.wait(code=75)  # the same command resumes from an earlier step
    assert "asked to stop: step" in result.error
    filler.unlink()
    run.start().wait_for_step(1)
    fill_disk()
    result = run.wait(code=4)
    assert "the last checkpoint, of step 30, could not be saved" in result.error
    assert result.err.count("checkpoint of step 30 was not saved") == 2, "it is tried again"
    assert "now fails at once" not in result.err
    filler.unlink()
    assert run.run_in_forks().done["step"] == "30"


@pytest.mark.fault("C1", "C3")
@pytest.mark.parametrize(
    ("row", "pages", "code", "says"),  # pages left: none for the lock; one for it, none for what follows
    [("C3", 0, 2, "{} is read-only"), ("C1", 0, 4, "No space left"), ("C1", 1, 4, "No space left")],
)
def test_a_run_folder_that_cannot_be_written_is_refused_in_one_line(
    small_disk: Path, digits: Path, row: str, pages: int, code: int, says: str, notes: Notes
) -> None:
    if row == "C3":
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    else:
        (small_disk / "filler").write_bytes(bytes((16 - pages) << 12))
    run = job(small_disk / "run", digits)
    result = quick(*run.train_words(), "--nproc", "2", timeout=100, code=code)
    assert f"{run.folder} cannot be written: {says.format(small_disk)}" in result.error
    notes.note(row)


def test_a_long_path_of_temporary_files_is_no_obstacle_and_nothing_stays_there(place: Place) -> None:
    temporary = place.path / ("t" * 100)  # the path of a socket ends at 107 characters
    temporary.mkdir()
    words = ["train", "digits", *PLACE, "data.workers=1", "run.dir=runs/new", "--nproc", "2"]
    assert pipeline(*words, cwd=place.path, TMPDIR=str(temporary)).code == 0
    assert {name.partition("_")[0] for name in os.listdir(temporary)} <= {"torchinductor"}, "torch's cache"


@pytest.mark.full
@pytest.mark.fault("C4", ci=1, long=10)
def test_ranks_that_list_folders_differently_train_the_same(tmp_path: Path, digits: Path, seed: int) -> None:
    """Simulate a network file system that shows another machine's files late."""
    late = (str(digits), str(tmp_path / "other"))
    partial_listing = f"""\
import os
scandir, listdir = os.scandir, os.listdir
class EverySecond:
    def __init__(self, path): self.inner = scandir(path)
    def __enter__(self): return self
    def __exit__(self, *_): self.inner.close()
    def __iter__(self): return iter(list(self.inner)[::-2])
def is_late(path):
    return os.environ.get("RANK", "0") != "0" and str(path).startswith({late})
os.scandir = lambda path=".": EverySecond(path) if is_late(path) else scandir(path)
os.listdir = lambda path=".": listdir(path)[::-2] if is_late(path) else listdir(path)
"""
    lines = set()
    for name, prelude in (("same", ""), ("other", partial_listing)):
        run = job(tmp_path / name, digits, "train.max_steps=8", "data.source=folder", nproc=2)
        run.prelude = prelude
        assert run.run().code == 0, run.log()
        run.arguments.append("train.max_steps=12")
        lines.add(run.run().out)
    assert len(lines) == 1


@pytest.mark.fault("J3", ci=1, long=5)
def test_a_run_waits_for_data_out_of_reach_and_then_exits_75(tmp_path: Path, digits: Path, seed: int) -> None:
    words = ("data.source=folder", "data.workers=4", "evaluate.every=9 steps", "run.timeout=20")
    expected = job(tmp_path / "uninterrupted", digits, *words, nproc=2).finished()
    root, away = shutil.copytree(digits, tmp_path / "data"), tmp_path / "away"
    run = job(tmp_path / "run", root, *words, nproc=2).start().wait_for_step(1 + seed)
    root.rename(away)
    run.wait_until(lambda: "waiting for it" in run.log(), "warning about the data")
    time.sleep(3)
    away.rename(root)
    run.wait_for_step(run.step() + 3)
    assert 1 <= run.log().count("the data is out of reach") <= 4, "at most once a loader"
    root.rename(away)
    result = run.wait(code=75)  # before run.timeout, which ends with 1
    assert result.error.startswith(f"the data is out of reach ({root}/")
    assert "give the same command again" in result.error
    assert f"data.root={root} is missing or empty" in run.run(code=75).error
    away.rename(root)
    assert run.run_in_forks().out == expected.output()
    assert run.trace() == expected.trace()
    assert all(row.get("event") != "bad image" for row in read_rows(run.folder / "journal.jsonl"))


@pytest.mark.full
@pytest.mark.fault("I2")
@pytest.mark.parametrize("hours", [1, -1])
def test_clock_jumps_change_nothing(tmp_path: Path, digits: Path, uninterrupted: Job, hours: int) -> None:
    """Change only Python's clock: torch's timeouts use a monotonic clock, which never jumps."""
    run = job(tmp_path / "run", digits, "run.timeout=20")
    run.prelude = f"""\
import os, time
real, real_ns = time.time, time.time_ns
def jump():
    try:
        return {3600 * hours} if os.path.getsize("{tmp_path}/run/trace.jsonl") > 5000 else 0
    except OSError:
        return 0
time.time = lambda: real() + jump()
time.time_ns = lambda: real_ns() + jump() * 10**9
"""
    assert run.run().out == uninterrupted.output()
    rows = read_rows(run.folder / "journal.jsonl")
    assert max(row["time"] for row in rows) - min(row["time"] for row in rows) > 3_000_000, "the clock jumped"
    metrics = [item for row in rows for item in row.get("metrics", {}).items()]
    assert all(value >= 0 for key, value in metrics if key.startswith("time/"))
