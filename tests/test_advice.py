"""`doctor` and `train` refuse the same requests, and the remedy in an error message works.

Each remedy is followed to the letter.
"""

import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import Job, free_port, kill
from object_store import Bucket
from place import SMALL, Place

from pipeline.record.checkpoint_files import step_of

NODE = {"PET_NPROC_PER_NODE": "1"}
"""Makes `doctor` run only the checks of a start."""
DIVERGE = "optimizer.lr=1e6 optimizer.momentum=0 optimizer.nesterov=false train.max_steps=4"
LONG = "train.epochs=1000 evaluate.every=1000_epochs"
TUNE = "model.init=runs/done"


def corrupt_images(place: Place) -> None:
    """Make 12 of 16 images undecodable without changing their sizes."""
    for path in images(place)[:12]:
        path.with_suffix(".good").write_bytes(path.read_bytes())
        path.write_bytes(b"\0" * path.stat().st_size)


def repair_images(place: Place) -> None:
    for path in (place.path / "images").rglob("*.good"):
        path.rename(path.with_suffix(".jpg"))


def images(place: Place) -> list[Path]:
    return sorted((place.path / "images/train").glob("*/*.jpg"))


def remove_image(place: Place) -> None:
    images(place)[0].rename(place.path / "kept.jpg")


def put_image_back(place: Place) -> None:
    (place.path / "kept.jpg").rename(place.path / "images/train/class-0000/0000000.jpg")


def damage_checkpoints(place: Place) -> None:
    for path in place.checkpoints():
        shutil.copy(path, place.path / path.name)
        path.write_bytes(b"x")


def restore_checkpoints(place: Place) -> None:
    for path in place.path.glob("step-*.pt"):
        shutil.copy(path, place.path / "runs/done/checkpoints")


def remove_checkpoints(place: Place) -> None:
    for path in place.checkpoints():
        path.unlink()


def flatten(place: Place) -> None:
    shutil.rmtree(place.path / "images/val")
    (place.path / "images/val").mkdir()
    (place.path / "images/val/1.jpg").write_bytes(b"x")


def diverge(place: Place) -> None:
    assert place.train(*DIVERGE.split())[0] == 3


def make_other_images(place: Place) -> None:
    place.run("data", "make", "synthetic", "other", "--images", "16", "--classes", "4", "--side", "32")


def pack(place: Place) -> None:
    place.run("data", "pack", "images", "packed", "--level", "raw=64")


def start_holder(place: Place) -> None:
    """Start another process that trains in the folder; the test kills it at its end."""
    start_training(place, "checkpoint.every=1000 epochs", "evaluate.every=1000 epochs")


def start_training(place: Place, *more: str, nproc: int = 1) -> None:
    words = ["digits", *SMALL, "train.epochs=1000", "train.max_steps=2000", *more]
    place.holder = Job(Path("runs/held"), words, nproc).start()
    place.holder.wait_for_start()


def stop_holder(place: Place) -> None:
    """Stop the other process, which saves its step and exits with 75."""
    end_holder(place, signal.SIGTERM)
    assert place.holder
    assert place.holder.wait().code == 75


def end_holder(place: Place, number: int = signal.SIGKILL) -> None:
    if place.holder and place.holder.process:
        kill(place.holder.process.pid, number)


def lose_images(place: Place) -> None:
    """Remove the images once the other process has saved a checkpoint; it exits with 75."""
    assert place.holder
    place.holder.wait_until(place.holder.checkpoints, "checkpoint")
    (place.path / "images").rename(place.path / "away")
    assert place.holder.wait().code == 75
    (place.path / "away").rename(place.path / "images")


def kill_rank(place: Place) -> None:
    """Kill a process of the other run once it has saved a checkpoint; the run exits with 1."""
    assert place.holder
    place.holder.wait_until(place.holder.checkpoints, "checkpoint")
    kill(place.holder.ranks()[1], signal.SIGKILL)
    assert place.holder.wait().code == 1


@dataclass(frozen=True)
class Request:
    """A request, the exit code of its checks and of its start, and a remedy that works."""

    code: int
    words: str = ""
    before: Callable[[Place], object] = lambda _: None
    says: str = ""
    """The remedy in the error line."""
    then: str = ""
    """The request that works after `do`."""
    do: Callable[[Place], object] = lambda _: None
    as_node: bool = True
    """Ask for a node's checks only."""
    is_checked: bool = True
    """The checks find the error before a start."""

    def __str__(self) -> str:
        return f"{self.code} {self.says or self.words or self.before.__name__}"


RESUME = "run.dir=runs/done train.max_steps=2"  # resumes the existing run
LATE: dict[str, Any] = {"is_checked": False}
REQUESTS = [
    # accepted
    Request(0, "run.exact=true exact.shards=4 augment.mixup=0.2 train.loss=bce"),
    Request(0, "train.precision=bf16 batch.accumulate=2 train.ema=0.9 model.channels_last=true"),
    Request(0, "model.init=runs/done model.freeze=backbone"),
    Request(0, "augment.first_size=32 augment.size=64 augment.growth=[0,1_epochs]"),
    Request(0, RESUME), Request(0, "run.resume=runs/done"),
    Request(0, "run.dir=runs/done data.root=moved train.max_steps=2",
            lambda place: (place.path / "images").rename(place.path / "moved")),
    Request(0, "run.dir=runs/done run.resume=never", damage_checkpoints),
    Request(0, "run.dir=runs/done run.resume=never", remove_checkpoints),
    Request(0, "model.arch=squeezenet1_1 model.batchnorm=average --nproc 2"),
    # refused because of the configuration alone
    Request(2, "train.epoch=3", says="did you mean train.epochs?", then="train.epochs=3"),
    Request(2, "batch.global=9 batch.accumulate=2", says="works is 8 or 10",
            then="batch.global=10 batch.accumulate=2"),
    Request(2, "run.exact=true exact.shards=3", says="exact.shards that work are 1, 2, 4, 8",
            then="run.exact=true exact.shards=4"),
    Request(2, "run.exact=true exact.shards=4 --nproc 3", says="worlds that work are 1, 2, 4",
            then="run.exact=true exact.shards=4 --nproc 2"),
    Request(2, "run.exact=true exact.shards=2 batch.accumulate=4", says="exact.shards that work are 4, 8",
            then="run.exact=true exact.shards=4 batch.accumulate=4"),
    Request(2, "run.exact=true exact.shards=4 model.batchnorm=sync", says="leave one of them out",
            then="run.exact=true exact.shards=4"),
    Request(2, "model.freeze=backbone", says="set model.init to pretrained",
            then=f"model.freeze=backbone {TUNE}"),
    Request(2, "run.device=cuda", says="use run.device=cpu", then="run.device=cpu"),
    Request(2, "track.required=true track.uri=http://127.0.0.1:PORT", says="with track.required=false",
            then="track.required=false track.uri=http://127.0.0.1:PORT", as_node=False),
    Request(2, "track.required=true"), Request(2, "track.uri=sqlite:////proc/x.db track.required=true"),
    Request(2, "data.root=s3://bucket/x"), Request(2, "model.batchnorm=sync --nproc 2"),
    # because of the model, which needs torch
    Request(2, f"{TUNE} model.arch=resnet18", says="model.arch to its own",
            then=f"{TUNE} model.arch=shufflenet_v2_x0_5"),
    Request(2, "model.arch=squeezenet1_1 augment.size=8", says="raise augment.size",
            then="model.arch=squeezenet1_1 augment.size=32"),
    Request(2, "model.arch=resnet999"), Request(2, "model.arch=alexnet"), Request(2, "model.init=nowhere"),
    Request(2, "model.init=models:/nowhere@best"), Request(2, f"{TUNE} model.freeze=foo"),
    # because of the data
    Request(2, "data.root=other", says="make one with 'pipeline data make synthetic other'",
            then="data.root=other", do=make_other_images),
    Request(2, "data.source=pack data.root=packed", says="make one with 'pipeline data pack SRC packed'",
            then="data.source=pack data.root=packed", do=pack),
    Request(2, "", flatten),
    Request(2, "", lambda place: shutil.rmtree(place.path / "images/val/class-0000")),
    Request(2, "data.source=synthetic data.num_images=8 data.num_classes=10"),
    # because of the run's folder or its checkpoints
    Request(2, "run.dir=runs/done optimizer.lr=0.3", says="restore these keys", then=RESUME),
    Request(2, "run.dir=runs/done optimizer.lr=0.3", says="start again with run.resume=never",
            then="run.dir=runs/done optimizer.lr=0.3 run.resume=never"),
    Request(2, RESUME, remove_image, "restore it", RESUME, put_image_back),
    Request(2, RESUME, remove_image, "start again with run.resume=never", f"{RESUME} run.resume=never"),
    Request(2, "run.resume=nowhere", says="auto | never | a checkpoint", then="run.resume=runs/done"),
    Request(2, "run.dir=images/val/class-0000/0000000.jpg/run"), Request(2, "run.dir=s3://bucket/x"),
    Request(2, "run.resume=runs/done model.arch=shufflenet_v2_x1_0"),
    Request(3, DIVERGE, diverge),
    Request(3, f"run.dir=runs/nan {DIVERGE}", says="lower optimizer.lr",
            then="run.dir=runs/nan train.max_steps=4 run.resume=never", **LATE),
    Request(4, RESUME, corrupt_images, "raise data.max_bad", f"{RESUME} data.max_bad=0.9", **LATE),
    Request(4, RESUME, corrupt_images, "resume with run.resume=runs/done", f"{RESUME} run.resume=runs/done",
            repair_images, **LATE),
    Request(4, RESUME, damage_checkpoints, "restore one from a copy", RESUME, restore_checkpoints),
    Request(4, RESUME, damage_checkpoints, "start again with run.resume=never", f"{RESUME} run.resume=never"),
    Request(4, "run.dir=runs/done", remove_checkpoints),
    Request(75, "run.dir=runs/held", start_holder, "wait for it, stop it", f"run.dir=runs/held {LONG}",
            stop_holder, **LATE),
]  # fmt: skip


def lose_disk(place: Place) -> None:
    shutil.rmtree(place.path / "runs/mirrored")


def lose_disk_and_images(place: Place) -> None:
    lose_disk(place)
    shutil.rmtree(place.path / "images")


def damage_local(place: Place) -> None:
    for path in place.checkpoints("mirrored"):
        path.write_bytes(b"x")


def damage_all(place: Place) -> None:
    assert place.bucket
    lose_disk(place)
    for name in place.bucket.names("run/checkpoints/"):
        place.bucket.write(name, b"x")


def expire(place: Place) -> None:
    """Delete the mirror's checkpoints, as a lifecycle rule does, and lose the disk."""
    assert place.bucket
    lose_disk(place)
    for name in place.bucket.names("run/checkpoints/"):
        place.bucket.delete(name)


AGAIN = "start again with run.resume=never and another checkpoint.mirror"
BAD = "run.dir=runs/bad checkpoint.mirror=MIRROR"
MIRRORED = "run.dir=runs/mirrored checkpoint.mirror=MIRROR/run"
ANOTHER = "run.dir=runs/mirrored checkpoint.mirror=MIRROR/other run.resume=never"
MIRRORS = [
    Request(0, MIRRORED, lose_disk), Request(0, f"{MIRRORED} train.max_steps=2", lose_disk),
    Request(0, f"{MIRRORED} run.resume=runs/mirrored", lose_disk),
    Request(0, f"{MIRRORED} train.max_steps=2", damage_local),
    Request(2, f"{MIRRORED} run.resume=never", lose_disk, "give another prefix", ANOTHER),
    Request(2, f"{MIRRORED} optimizer.lr=0.3", lose_disk), Request(2, f"{MIRRORED} run.dir=runs/done"),
    Request(2, f"{MIRRORED} optimizer.lr=0.3", says=AGAIN, then=f"{ANOTHER} optimizer.lr=0.3"),
    Request(2, MIRRORED, remove_image, AGAIN, ANOTHER), Request(4, MIRRORED, damage_all, AGAIN, ANOTHER),
    Request(4, MIRRORED, expire), Request(75, f"{MIRRORED} --nproc 2", lose_disk_and_images),
    Request(4, f"{BAD}/bad", corrupt_images, AGAIN, f"{BAD}/other run.resume=never", repair_images, **LATE),
]  # fmt: skip


def words_of(text: str, **values: str) -> list[str]:
    for name, value in values.items():
        text = text.replace(name, value)
    return [word.replace("_epochs", " epochs") for word in text.split()]


def check(place: Place, request: Request, **values: str) -> None:
    """Assert the exit codes of a request, and that a start that follows the advice ends."""
    request.before(place)
    words = words_of(request.words, **values)
    if request.is_checked:
        processes = [{"--nproc": "--world"}.get(word, word) for word in words]
        as_node = request.as_node and "--nproc" not in words
        code, err = place.doctor(*processes, **(NODE if as_node else {}))
        assert code == request.code, err
        assert "/tmp" not in err.replace(str(place.path), ""), "only the user's own places are named"
    code, err = place.train(*words)
    assert code == request.code, err
    assert request.says in err
    if request.then:
        request.do(place)
        code, err = place.train(*words_of(request.then, **values))
        assert code == 0, err


def some(requests: list[Request], mark: pytest.MarkDecorator) -> list[Any]:
    """Return the requests as parameters, of which each push tries one in six."""
    return [
        request if number % 6 == 5 else pytest.param(request, marks=mark)
        for number, request in enumerate(requests)
    ]


@pytest.mark.parametrize("asked", some(MIRRORS, pytest.mark.long), ids=str)
def test_doctor_and_train_agree_on_a_run_with_a_mirror_and_its_remedy_works(
    place: Place, bucket: Bucket, asked: Request
) -> None:
    """A run that follows the advice is another one: none of the old records come back."""
    place.bucket = bucket
    assert place.train(*words_of(MIRRORED, MIRROR=bucket.place))[0] == 0
    (created,) = place.events("mirrored", "created")
    check(place, asked, MIRROR=bucket.place)
    if asked.then:
        run = asked.then.split()[0].rpartition("/")[2]
        assert place.events(run, "created")[0]["run"] != created["run"]
        assert place.events(run, "started")[0]["step"] == 0


@pytest.mark.parametrize("asked", some(REQUESTS, pytest.mark.full), ids=str)
def test_doctor_and_train_agree_on_a_request_and_its_remedy_works(
    place: Place, asked: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.path)
    try:
        check(place, asked, PORT=str(free_port()))
    finally:
        end_holder(place)


@pytest.mark.parametrize(
    ("resume", "nproc", "end"),
    [("never", 1, stop_holder), pytest.param("runs/done", 1, stop_holder, marks=pytest.mark.full),
     pytest.param("never run.timeout=8", 1, lose_images, marks=pytest.mark.full),
     pytest.param("never", 2, kill_rank, marks=pytest.mark.full)],
)  # fmt: skip
def test_the_remedy_in_the_line_of_an_interrupted_run_works(
    place: Place, resume: str, nproc: int, end: Callable[[Place], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command would apply run.resume again, and discard what was saved since."""
    monkeypatch.chdir(place.path)
    try:
        start_training(place, *f"run.resume={resume}".split(), nproc=nproc)
        end(place)
    finally:
        end_holder(place)
    assert place.holder
    line = place.holder.log().splitlines()[-1]
    remedy = "run.resume=auto" if resume.startswith("never") else "run.resume=runs/held"
    assert f"the same command with {remedy} " in line
    saved = step_of(place.checkpoints("held")[-1])
    code, err = place.train("run.dir=runs/held", "train.epochs=1000", f"train.max_steps={saved + 1}", remedy)
    assert code == 0, err
    assert [row["step"] for row in place.events("held", "started")][1:] == [saved]
