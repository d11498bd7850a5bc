"""Every error message that names a remedy is followed to the letter, and the remedy works."""

import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import forked
import pytest
from harness import children, environment, free_port, kill, variable, wait_until
from place import SMALL, Place

from pipeline.record.checkpoint_files import step_of

DIVERGE = "optimizer.lr=1e6 optimizer.momentum=0 optimizer.nesterov=false train.max_steps=4"
HELD = ("run.dir=runs/held", "train.epochs=1000")
LONG = "train.epochs=1000 evaluate.every=1000_epochs"
RESUME = "run.dir=runs/done train.max_steps=2"
TUNE = "model.init=runs/done"


def damage(pattern: str) -> Callable[[Place], None]:
    """Return what makes files unreadable without changing their sizes, and keeps copies."""

    def overwrite(place: Place) -> None:
        for path in place.path.glob(pattern):
            shutil.copy(path, f"{path}.kept")
            path.write_bytes(bytes(path.stat().st_size))

    return overwrite


def remove_image(place: Place) -> None:
    image = place.path / "images/train/class-0000/0000000.jpg"
    image.rename(f"{image}.kept")


def restore(place: Place) -> None:
    """Put back all that was damaged or removed."""
    for path in place.path.rglob("*.kept"):
        path.rename(path.with_suffix(""))


def start_holder(place: Place, *more: str) -> None:
    """Start another process that trains in the folder; the test kills it at its end."""
    command = ["pipeline", "train", "digits", *SMALL, *HELD, "train.max_steps=2000", *more]
    outputs = place.path / "held.out", place.path / "held.err"
    place.holder = forked.server().start(command, environment(), outputs, cwd=place.path)
    wait_until(lambda: place.events("held", "started"), "start of the holder")


def end_holder(place: Place, how: str = "SIGTERM") -> None:
    """End the other process in one of three ways, once it has saved a checkpoint."""
    wait_until(lambda: place.checkpoints("held"), "checkpoint")
    images, away = place.path / "images", place.path / "away"
    if how == "SIGTERM":
        kill(place.holder.pid, signal.SIGTERM)
    elif how == "lost rank":
        (rank,) = (pid for pid in children(place.holder.pid) if variable(pid, "RANK") == "1")
        kill(rank, signal.SIGKILL)
    else:
        images.rename(away)
    assert place.holder.wait(60) == (1 if how == "lost rank" else 75)
    if away.exists():
        away.rename(images)


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


BAD_IMAGES = damage("images/train/class-000[0-2]/*.jpg")  # 12 of 16
BAD_CHECKPOINTS = damage("runs/done/checkpoints/*.pt")
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
           lambda place: place.make_images("other")),
    Advice(2, "run.dir=runs/done optimizer.lr=0.3", "restore these keys", RESUME),
    Advice(2, "run.dir=runs/done optimizer.lr=0.3", "start again with run.resume=never",
           "run.dir=runs/done optimizer.lr=0.3 run.resume=never"),
    Advice(2, RESUME, "restore it", RESUME, restore, remove_image),
    Advice(2, RESUME, "start again with run.resume=never", f"{RESUME} run.resume=never", before=remove_image),
    Advice(2, "run.resume=nowhere", "auto | never | a checkpoint", "run.resume=runs/done"),
    Advice(3, f"run.dir=runs/nan {DIVERGE}", "lower optimizer.lr",
           "run.dir=runs/nan train.max_steps=4 run.resume=never"),
    Advice(4, RESUME, "raise data.max_bad", f"{RESUME} data.max_bad=0.9", before=BAD_IMAGES),
    Advice(4, RESUME, "resume with run.resume=runs/done", f"{RESUME} run.resume=runs/done",
           restore, BAD_IMAGES),
    Advice(4, RESUME, "restore one from a copy", RESUME, restore, BAD_CHECKPOINTS),
    Advice(4, RESUME, "start again with run.resume=never", f"{RESUME} run.resume=never",
           before=BAD_CHECKPOINTS),
    Advice(75, f"run.dir=runs/held {LONG}", "wait for it, stop it", f"run.dir=runs/held {LONG}",
           end_holder, lambda place: start_holder(place, "evaluate.every=1000 epochs")),
]  # fmt: skip


def damage_mirror(place: Place) -> None:
    """Damage all checkpoints in the bucket, and lose the disk."""
    for name in place.bucket.names("run/checkpoints/"):
        place.bucket.write(name, b"x")
    shutil.rmtree(place.path / "runs/mirrored")


AGAIN = "start again with run.resume=never and another checkpoint.mirror"
ANOTHER = "run.dir=runs/mirrored checkpoint.mirror=MIRROR/other run.resume=never"
BAD = "run.dir=runs/bad checkpoint.mirror=MIRROR"
MIRRORED = "run.dir=runs/mirrored checkpoint.mirror=MIRROR/run"
MIRROR_ROWS = [
    Advice(4, f"{BAD}/bad", AGAIN, f"{BAD}/other run.resume=never", restore, BAD_IMAGES),
    Advice(2, f"{MIRRORED} optimizer.lr=0.3", AGAIN, f"{ANOTHER} optimizer.lr=0.3"),
    Advice(2, MIRRORED, AGAIN, ANOTHER, before=remove_image),
    Advice(2, f"{MIRRORED} run.resume=never", "give another prefix", ANOTHER),
    Advice(4, MIRRORED, AGAIN, ANOTHER, before=damage_mirror),
]  # fmt: skip


def some(rows: list[Advice], every: int, mark: pytest.MarkDecorator) -> list[Any]:
    """Return the rows as parameters, of which each push tries one in `every`."""
    return [row if at % every == 1 else pytest.param(row, marks=mark) for at, row in enumerate(rows)]


@pytest.fixture
def place(place: Place) -> Iterator[Place]:
    """Kill the other process in the folder at the end."""
    yield place
    if place.holder:
        kill(place.holder.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "row", [*some(ROWS, 6, pytest.mark.full), *some(MIRROR_ROWS, 3, pytest.mark.long)], ids=str
)
def test_the_remedy_of_an_error_works(place: Place, row: Advice, request: pytest.FixtureRequest) -> None:
    """`doctor` says the same: by then, it also knows what the training has found."""
    node = {} if "track.required" in row.words else {"PET_NPROC_PER_NODE": "1"}  # the checks of a start
    port, is_mirrored = str(free_port()), "MIRROR" in row.words

    def words(text: str) -> list[str]:
        mirror = place.bucket.place if place.bucket else ""
        text = text.replace("PORT", port).replace("MIRROR", mirror)
        return [word.replace("_epochs", " epochs") for word in text.split()]

    if is_mirrored:
        place.bucket = request.getfixturevalue("bucket")
        place.train(*words(MIRRORED))
        created = place.events("mirrored", "created")[0]["run"]
    row.before(place)
    assert row.says in place.train(*words(row.words), code=row.code)
    if row.code != 75:
        place.doctor(*words(row.words), code=row.code, **node)
    row.do(place)
    for command in (place.doctor, place.train):
        command(*words(row.then), **node)
    if is_mirrored:  # it is another run: none of the old records come back
        run = row.then.split()[0].rpartition("/")[2]
        assert place.events(run, "created")[0]["run"] != created
        assert place.events(run, "started")[0]["step"] == 0


@pytest.mark.parametrize(
    ("resume", "how"),
    [("never", "SIGTERM"), pytest.param("runs/done", "SIGTERM", marks=pytest.mark.full),
     pytest.param("never run.timeout=8", "lost images", marks=pytest.mark.full),
     pytest.param("never --nproc 2", "lost rank", marks=pytest.mark.full)],
)  # fmt: skip
def test_the_remedy_in_the_line_of_an_interrupted_run_works(place: Place, resume: str, how: str) -> None:
    """The same command would apply run.resume again, and discard what was saved since."""
    start_holder(place, *f"run.resume={resume}".split())
    end_holder(place, how)
    remedy = "run.resume=auto" if resume.startswith("never") else "run.resume=runs/held"
    assert f"the same command with {remedy} " in (place.path / "held.err").read_text().splitlines()[-1]
    saved = step_of(place.checkpoints("held")[-1])
    place.train(*HELD, f"train.max_steps={saved + 1}", remedy)
    assert [row["step"] for row in place.events("held", "started")][1:] == [saved]
