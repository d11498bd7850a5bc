"""Validation counts every image once: the same integers at any number of processes."""

import json
import shutil
from pathlib import Path

import pytest
from harness import SMALL, Job, Result, pipeline, read_rows

from pipeline.record.checkpoint import decode, read_verified, weights_digest

SIZES = (1, 7, 48, 97, 1000)
WORLDS = [
    (1, (1, 2)),
    *(pytest.param(size, (1, world), marks=pytest.mark.full) for size, world in ((7, 3), (48, 4), (1000, 3))),
    *(pytest.param(size, (1, 2, 3, 4), marks=pytest.mark.long) for size in SIZES),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Job:
    run = Job(
        tmp_path_factory.mktemp("trained") / "run",
        ["digits", f"data.root={digits}", *SMALL, "train.epochs=3", "evaluate.batch=16"],
        nproc=2,
    )
    assert run.run().code == 0
    return run


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> dict[int, Path]:
    """Image folders with so many validation images, taken from all the digits."""
    pictures = sorted(digits.glob("*/*/*.png"), key=lambda path: path.name)
    folders = {}
    for size in SIZES:
        root = tmp_path_factory.mktemp("held-out") / str(size)
        for picture in pictures[:size]:
            target = root / "val" / picture.parent.name / picture.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(picture, target)
        folders[size] = root
    return folders


def evaluate(run: Job, world: int, *overrides: str) -> Result:
    return pipeline("evaluate", str(run.folder), *overrides, *(["--nproc", str(world)] if world > 1 else []))


@pytest.mark.fault("E3")
@pytest.mark.parametrize(("size", "worlds"), WORLDS)
def test_every_image_is_counted_once_at_any_world_size(
    trained: Job, held_out: dict[int, Path], size: int, worlds: tuple[int, ...]
) -> None:
    lines = {evaluate(trained, world, f"data.root={held_out[size]}").out for world in worlds}
    assert len(lines) == 1, lines
    (line,) = lines
    assert f" images={size}/{size} " in line
    assert line.startswith("done ")


def test_evaluate_says_what_train_said_and_the_digest_is_that_of_the_file(trained: Job) -> None:
    said = trained.folder.with_suffix(".out").read_text()
    path = trained.checkpoints()[-1]
    contents = decode(read_verified(path), path)
    for world in (1, 3):
        result = evaluate(trained, world)
        assert result.out == said
        assert result.done["weights"] == weights_digest(contents["model"])
    # 48 does not divide by 7, and need not
    assert evaluate(trained, 1, "batch.global=7", "evaluate.batch=360").done["top1"] == said.split("top1=")[1][:6]


def test_a_train_command_on_a_finished_run_says_its_line_again(trained: Job) -> None:
    before = (trained.folder / "journal.jsonl").read_bytes()
    assert trained.run().out == f"{trained.folder.with_suffix('.out').read_text()}"
    assert (trained.folder / "journal.jsonl").read_bytes() == before


@pytest.mark.full
def test_a_run_killed_before_its_last_word_says_it_at_the_next_start(trained: Job, tmp_path: Path) -> None:
    shutil.copytree(trained.folder, tmp_path / "run")
    run = Job(tmp_path / "run", trained.arguments, nproc=2)
    journal = run.folder / "journal.jsonl"
    *before, last = journal.read_text().splitlines(keepends=True)
    assert '"ended"' in last
    journal.write_text("".join(before))
    assert run.run().out == trained.folder.with_suffix(".out").read_text()
    rows = read_rows(journal)
    assert (rows[-1]["event"], rows[-1]["status"]) == ("ended", "FINISHED")
    assert [row for row in rows if "metrics" in row] == [row for row in map(json.loads, before) if "metrics" in row]


@pytest.mark.full
def test_what_cannot_be_evaluated_is_said_in_one_line(trained: Job, tmp_path: Path, digits: Path) -> None:
    nothing = pipeline("evaluate", str(tmp_path))
    assert (nothing.code, "holds no checkpoint" in nothing.error) == (4, True)
    path = trained.checkpoints()[-1]
    renamed = tmp_path / "model.pt"
    shutil.copy(path, renamed)
    assert "give it its name back" in pipeline("evaluate", str(renamed)).error
    damaged = tmp_path / path.name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    refused = pipeline("evaluate", str(damaged))
    assert (refused.code, f"{path.name} is damaged" in refused.error) == (4, True)
    shutil.copytree(digits, tmp_path / "other")
    (tmp_path / "other/val/3").rename(tmp_path / "other/val/three")
    assert "does not know: three" in evaluate(trained, 1, f"data.root={tmp_path / 'other'}").error
