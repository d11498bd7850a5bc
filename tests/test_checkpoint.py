"""A damaged checkpoint is never loaded; a resume changes only what is allowed to change."""

import errno
import io
import os
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.ledger import Notes
from harness import MakeJob
from test_security import Payload

from pipeline.config.load import load
from pipeline.errors import StorageError, TemporaryError
from pipeline.operate.resume import find
from pipeline.record.checkpoint import CheckpointWriter
from pipeline.record.checkpoint_contents import decode
from pipeline.record.checkpoint_files import list_checkpoints, newest_verified, read_verified, step_of
from pipeline.record.folder import RunFolder


def contents(step: int) -> dict[str, Any]:
    return {"step": step, "model": {"weight": torch.full((64, 64), float(step))}}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Return the folder of a run without files."""
    folder = RunFolder(tmp_path / "run")
    folder.checkpoints.mkdir(parents=True)
    return folder


def write(run: RunFolder, *steps: int, keep: int = 2, best: int | None = None) -> list[Path]:
    """Write a checkpoint of each step, and return those that are then there, newest first."""
    writer = CheckpointWriter(run, keep, pytest.fail, on_saved=print)
    for step in steps:
        writer.save(contents(step), step, best)
    writer.wait()
    return list_checkpoints(run.checkpoints)


@pytest.mark.fault("C2")
def test_every_damaged_checkpoint_is_named_and_skipped(run: RunFolder, notes: Notes, full: bool) -> None:
    count, pages = (200, 100) if full else (50, 5)
    path = write(run, 1, 2)[0]
    content = path.read_bytes()
    rng = random.Random(7)
    damages = [content[: rng.randrange(len(content))] for _ in range(count)] + [b""]
    for _ in range(count):
        flipped = bytearray(content)
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        damages.append(bytes(flipped))
    for start in rng.sample(range(len(content) - 4096), pages):
        damages.append(content[:start] + bytes(4096) + content[start + 4096 :])
    for damaged in damages:
        path.write_bytes(damaged)
        lines: list[str] = []
        assert step_of(newest_verified(run.checkpoints, lines.append)[0]) == 1
        assert [path.name in line for line in lines] == [True]
    notes.note("C2", times=len(damages))


@pytest.mark.parametrize("call", ["read_bytes", "iterdir", "stat"])
def test_lost_storage_is_no_damage(run: RunFolder, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    failing, real = [run.path, run.checkpoints, write(run, 1, 2)[0]], getattr(Path, call)

    def fail(path: Path, **options: Any) -> Any:
        if path in failing:
            raise OSError(errno.ESTALE, "stale", str(path))
        return real(path, **options)

    monkeypatch.setattr(Path, call, fail)
    with pytest.raises(TemporaryError, match="is out of reach"):
        find(load("digits", [f"run.dir={run.path}", f"run.resume={run.path}"]), run, None, pytest.fail)


def saved(value: object) -> bytes:
    torch.save({"format": 1, "model": value}, file := io.BytesIO())
    return file.getvalue()


@pytest.mark.fault("H2")
def test_a_malicious_file_is_not_executed(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="not a checkpoint"):
        decode(saved(Payload(tmp_path / "executed")), "evil.pt")
    assert not (tmp_path / "executed").exists()


def test_a_checkpoint_that_would_unpack_to_more_than_its_size_is_refused() -> None:
    stored, deflated = saved({"weight": torch.zeros(8 << 20)}), io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(stored)) as old, zipfile.ZipFile(deflated, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name), zipfile.ZIP_DEFLATED)
    with pytest.raises(StorageError, match=r"bomb.pt is not a checkpoint: .* unpack to 33,55\d,\d+ b"):
        decode(deflated.getvalue(), "bomb.pt")
    assert decode(stored, "stored.pt")["format"] == 1


def test_an_archive_in_which_torch_could_find_another_directory_is_refused() -> None:
    good, other = (saved(torch.full((4,), value)) for value in (1.0, 2.0))
    assert decode(good, "good.pt")["model"].tolist() == [1] * 4
    two = good + other  # of the same length, so the offsets of the second lead into the first
    with zipfile.ZipFile(io.BytesIO(two)) as python:
        assert python.infolist()[0].header_offset == len(good)
    assert torch.load(io.BytesIO(two))["model"].tolist() == [1] * 4
    start = int.from_bytes(good[-50:-42], "little")
    compressed = good[: start + 10] + b"\x08" + good[start + 11 :]
    comment = good[:-2] + b"\1\0!"
    record = good[:-34] + b"\0" + good[-33:]
    for bad in (two, good[:64] + good, comment, record, compressed):
        with pytest.raises(StorageError, match=r"bad.pt is not a checkpoint: its directory is not laid out"):
            decode(bad, "bad.pt")


def test_only_the_newest_and_the_best_are_kept(run: RunFolder) -> None:
    write(run, 1, 2, 3)
    assert [step_of(path) for path in write(run, 4, 5, 6, 7, best=3)] == [7, 6, 3]
    assert not [path for path in run.checkpoints.iterdir() if path.name.startswith(".")]


def test_a_checkpoint_is_synced_before_it_is_renamed(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run, 1)
    done = []

    def record(name: str) -> None:
        real = getattr(os, name)

        def call(target: Any, *more: Any) -> Any:
            path = Path(f"/proc/self/fd/{target}").resolve() if isinstance(target, int) else Path(target)
            done.append((name, "folder" if path == run.checkpoints else path.name[:6]))
            return real(target, *more)

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "rename", "unlink"):
        record(name)
    write(run, 2, keep=1)
    assert done == [("fsync", ".step-"), ("rename", ".step-"), ("fsync", "folder"), ("unlink", "step-0")]


def test_a_checkpoint_is_not_changed_by_the_next_step(run: RunFolder) -> None:
    state = contents(1)
    writer = CheckpointWriter(run, keep=2, log=pytest.fail, on_saved=print)
    writer.save(state, 1, None)
    state["model"]["weight"].zero_()
    writer.wait()
    (path,) = list_checkpoints(run.checkpoints)
    assert decode(read_verified(path), path)["model"]["weight"][0, 0] == 1


@pytest.mark.fault("C2")
def test_the_last_good_checkpoint_is_used_and_without_any_it_is_exit_4(job: MakeJob) -> None:
    run = job("train.epochs=2", "checkpoint.every=4 steps", "train.max_steps=12").finished()
    run.arguments[-1] = "train.max_steps=16"
    newest = run.checkpoints()[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    result = run.run()
    assert f"{newest.name} is damaged" in result.err
    assert "step-00000008" in next(line for line in result.err.splitlines() if "resuming from" in line)
    assert result.done["step"] == "16"
    assert [row["step"] for row in run.trace()] == list(range(1, 17))
    assert next(run.folder.glob("before-*")).joinpath(newest.name).exists(), "nothing is deleted"
    for path in run.checkpoints():
        path.write_bytes(b"")
    for _ in range(2):
        assert run.run(code=4).error.startswith("none of the 2 checkpoints")


@pytest.mark.fault("I1")
def test_a_non_finite_loss_stops_all_ranks_and_the_next_start_too(job: MakeJob) -> None:
    run = job("optimizer.lr=1e6", "schedule.warmup=0", "checkpoint.every=1 steps", nproc=2)
    first = run.run(code=3)
    assert "the loss is" in first.error or "not finite" in first.error
    for path in run.checkpoints():
        weights = run.contents(step_of(path))["model"].values()
        assert all(bool(torch.isfinite(tensor).all()) for tensor in weights if tensor.is_floating_point())
    second = run.run()
    assert (second.code, second.error) == (3, first.error)
    assert "creating" not in second.err, "it fails before it trains"
    run.arguments += [f"run.resume={run.folder}", "train.max_steps=1"]
    assert run.run().code == 0
