"""Every error message that names a remedy is followed to the letter, and the remedy works."""

import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import forked
import pytest
from harness import children, environment, free_port, kill, variable, wait_until
from object_store import Bucket
from place import SMALL, Place

from pipeline.record.checkpoint_files import step_of

DIVERGE = "optimizer.lr=1e6 optimizer.momentum=0 optimizer.nesterov=false train.max_steps=4"
HELD = ("run.dir=runs/held", "train.epochs=1000")
LONG = "train.epochs=1000 evaluate.every=1000_epochs"
TUNE = "model.init=runs/done"


def corrupt_images(place: Place) -> None:
    """Make 12 of 16 images undecodable without changing their sizes."""
    for path in sorted((place.path / "images/train").glob("*/*.jpg"))[:12]:
        path.with_suffix(".good").write_bytes(path.read_bytes())
        path.write_bytes(b"\0" * path.stat().st_size)


def repair_images(place: Place) -> None:
    for path in (place.path / "images").rglob("*.good"):
        path.rename(path.with_suffix(".jpg"))


FIRST_IMAGE = "images/train/class-0000/0000000.jpg"


def remove_image(place: Place) -> None:
    (place.path / FIRST_IMAGE).rename(place.path / "kept.jpg")


def put_image_back(place: Place) -> None:
    (place.path / "kept.jpg").rename(place.path / FIRST_IMAGE)


def damage_checkpoints(place: Place) -> None:
    for path in place.checkpoints():
        shutil.copy(path, place.path / path.name)
        path.write_bytes(b"x")


def restore_checkpoints(place: Place) -> None:
    for path in place.path.glob("step-*.pt"):
        shutil.copy(path, place.path / "runs/done/checkpoints")


def make_other_images(place: Place) -> None:
    place.run("data", "make", "synthetic", "other", "--images", "16", "--classes", "4", "--side", "32")


def start_holder(place: Place, *more: str) -> None:
    """Start another process that trains in the folder; the test kills it at its end."""
    words = ["digits", *SMALL, *HELD, "train.max_steps=2000", *more]
    outputs = place.path / "held.out", place.path / "held.err"
    command = ["pipeline", "train", *words]
    place.holder = forked.server().start(command, environment(), outputs, cwd=place.path)
    wait_until(lambda: place.events("held", "started"), "start of the holder")


def stop_holder(place: Place) -> None:
    """Stop the other process, which saves its step and exits with 75."""
    assert place.holder
    kill(place.holder.pid, signal.SIGTERM)
    assert place.holder.wait(30) == 75


def lose_images(place: Place) -> None:
    """Remove the images once the other process has saved a checkpoint; it exits with 75."""
    assert place.holder
    wait_until(lambda: place.checkpoints("held"), "checkpoint")
    (place.path / "images").rename(place.path / "away")
    assert place.holder.wait(60) == 75
    (place.path / "away").rename(place.path / "images")


def kill_rank(place: Place) -> None:
    """Kill a process of the other run once it has saved a checkpoint; the run exits with 1."""
    assert place.holder
    wait_until(lambda: place.checkpoints("held"), "checkpoint")
    (rank,) = (pid for pid in children(place.holder.pid) if variable(pid, "RANK") == "1")
    kill(rank, signal.SIGKILL)
    assert place.holder.wait(60) == 1


@dataclass(frozen=True)
class Advice:
    """A start that fails with `code` and `says`, the remedy, and the start that then works."""

    code: int
    words: str
    says: str
    then: str
    do: Callable[[Place], object] = lambda _: None
    before: Callable[[Place], object] = lambda _: None

    def __str__(self) -> str:
        return f"{self.code} {self.says}"


RESUME = "run.dir=runs/done train.max_steps=2"  # resumes the existing run
ROWS = [
    Advice(2, "run.exact=true exact.shards=3", "exact.shards that work are 1, 2, 4, 8",
           "run.exact=true exact.shards=4"),
    Advice(2, f"{TUNE} model.arch=resnet18", "model.arch to its own",
             f"{TUNE} model.arch=shufflenet_v2_x0_5"),
    Advice(2, "model.arch=squeezenet1_1 augment.size=8", "raise augment.size",
           "model.arch=squeezenet1_1 augment.size=32"),
    Advice(2, "track.required=true track.uri=http://127.0.0.1:PORT", "with track.required=false",
           "track.required=false track.uri=http://127.0.0.1:PORT"),
    Advice(2, "data.root=other", "make one with 'pipeline data make synthetic other'", "data.root=other",
           make_other_images),
    Advice(2, "run.dir=runs/done optimizer.lr=0.3", "restore these keys", RESUME),
    Advice(2, "run.dir=runs/done optimizer.lr=0.3", "start again with run.resume=never",
           "run.dir=runs/done optimizer.lr=0.3 run.resume=never"),
    Advice(2, RESUME, "restore it", RESUME, put_image_back, remove_image),
    Advice(2, RESUME, "start again with run.resume=never", f"{RESUME} run.resume=never", before=remove_image),
    Advice(2, "run.resume=nowhere", "auto | never | a checkpoint", "run.resume=runs/done"),
    Advice(3, f"run.dir=runs/nan {DIVERGE}", "lower optimizer.lr",
           "run.dir=runs/nan train.max_steps=4 run.resume=never"),
    Advice(4, RESUME, "raise data.max_bad", f"{RESUME} data.max_bad=0.9", before=corrupt_images),
    Advice(4, RESUME, "resume with run.resume=runs/done", f"{RESUME} run.resume=runs/done",
           repair_images, corrupt_images),
    Advice(4, RESUME, "restore one from a copy", RESUME, restore_checkpoints, damage_checkpoints),
    Advice(4, RESUME, "start again with run.resume=never", f"{RESUME} run.resume=never",
           before=damage_checkpoints),
    Advice(75, f"run.dir=runs/held {LONG}", "wait for it, stop it", f"run.dir=runs/held {LONG}",
           stop_holder, lambda place: start_holder(place, "evaluate.every=1000 epochs")),
]  # fmt: skip


def damage_mirror(place: Place) -> None:
    """Damage all checkpoints in the bucket, and lose the disk."""
    assert place.bucket
    for name in place.bucket.names("run/checkpoints/"):
        place.bucket.write(name, b"x")
    shutil.rmtree(place.path / "runs/mirrored")


AGAIN = "start again with run.resume=never and another checkpoint.mirror"
ANOTHER = "run.dir=runs/mirrored checkpoint.mirror=MIRROR/other run.resume=never"
BAD = "run.dir=runs/bad checkpoint.mirror=MIRROR"
MIRRORED = "run.dir=runs/mirrored checkpoint.mirror=MIRROR/run"
MIRROR_ROWS = [
    Advice(4, f"{BAD}/bad", AGAIN, f"{BAD}/other run.resume=never", repair_images, corrupt_images),
    Advice(2, f"{MIRRORED} optimizer.lr=0.3", AGAIN, f"{ANOTHER} optimizer.lr=0.3"),
    Advice(2, MIRRORED, AGAIN, ANOTHER, before=remove_image),
    Advice(2, f"{MIRRORED} run.resume=never", "give another prefix", ANOTHER),
    Advice(4, MIRRORED, AGAIN, ANOTHER, before=damage_mirror),
]  # fmt: skip


def follow(place: Place, row: Advice, words: Callable[[str], list[str]]) -> None:
    """Assert that the request is refused with the advice, and that a run that follows it ends.

    `doctor` says the same: by then, it also knows what the training has found.
    """
    node = {} if "track.required" in row.words else {"PET_NPROC_PER_NODE": "1"}  # the checks of a start
    row.before(place)
    code, err = place.train(*words(row.words))
    assert code == row.code, err
    assert row.says in err
    if code != 75:
        code, err = place.doctor(*words(row.words), **node)
        assert code == row.code, err
    row.do(place)
    for command in (place.doctor, place.train):
        code, err = command(*words(row.then), **node)
        assert code == 0, err


def words_of(text: str, **values: str) -> list[str]:
    for name, value in values.items():
        text = text.replace(name, value)
    return [word.replace("_epochs", " epochs") for word in text.split()]


def some(rows: list[Advice], every: int, mark: pytest.MarkDecorator) -> list[Any]:
    """Return the rows as parameters, of which each push tries one in `every`."""
    return [row if at % every == 1 else pytest.param(row, marks=mark) for at, row in enumerate(rows)]


@pytest.mark.parametrize("row", some(MIRROR_ROWS, 3, pytest.mark.long), ids=str)
def test_the_remedy_for_a_run_with_a_mirror_works(place: Place, bucket: Bucket, row: Advice) -> None:
    """The run that follows it is another one: none of the old records come back."""
    place.bucket = bucket

    def words(text: str) -> list[str]:
        return words_of(text, MIRROR=bucket.place)

    assert place.train(*words(MIRRORED))[0] == 0
    (created,) = place.events("mirrored", "created")
    follow(place, row, words)
    run = row.then.split()[0].rpartition("/")[2]
    assert place.events(run, "created")[0]["run"] != created["run"]
    assert place.events(run, "started")[0]["step"] == 0


@pytest.mark.parametrize("row", some(ROWS, 6, pytest.mark.full), ids=str)
def test_the_remedy_in_an_error_message_works(place: Place, row: Advice) -> None:
    port = str(free_port())
    try:
        follow(place, row, lambda text: words_of(text, PORT=port))
    finally:
        if place.holder:
            kill(place.holder.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("resume", "end"),
    [("never", stop_holder), pytest.param("runs/done", stop_holder, marks=pytest.mark.full),
     pytest.param("never run.timeout=8", lose_images, marks=pytest.mark.full),
     pytest.param("never --nproc 2", kill_rank, marks=pytest.mark.full)],
)  # fmt: skip
def test_the_remedy_in_the_line_of_an_interrupted_run_works(
    place: Place, resume: str, end: Callable[[Place], None]
) -> None:
    """The same command would apply run.resume again, and discard what was saved since."""
    try:
        start_holder(place, *f"run.resume={resume}".split())
        end(place)
    finally:
        assert place.holder
        kill(place.holder.pid, signal.SIGKILL)
    line = (place.path / "held.err").read_text().splitlines()[-1]
    remedy = "run.resume=auto" if resume.startswith("never") else "run.resume=runs/held"
    assert f"the same command with {remedy} " in line
    saved = step_of(place.checkpoints("held")[-1])
    code, err = place.train(*HELD, f"train.max_steps={saved + 1}", remedy)
    assert code == 0, err
    assert [row["step"] for row in place.events("held", "started")][1:] == [saved]
