"""`doctor` and `train` agree: both refuse the same requests with the same exit code."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from harness import free_port
from object_store import Bucket
from place import Place

NODE = {"PET_NPROC_PER_NODE": "1"}
"""Makes `doctor` run only the checks of a start."""


def damage(place: Place) -> None:
    for path in (place.path / "runs/done/checkpoints").glob("step-*.pt"):
        path.write_bytes(b"x")


def remove_checkpoints(place: Place) -> None:
    for path in place.checkpoints():
        path.unlink()


def remove_image(place: Place) -> None:
    next((place.path / "images/train").glob("*/*.jpg")).unlink()


def flatten(place: Place) -> None:
    shutil.rmtree(place.path / "images/val")
    (place.path / "images/val").mkdir()
    (place.path / "images/val/1.jpg").write_bytes(b"x")


def diverge(place: Place) -> None:
    words = ("optimizer.lr=1e6", "optimizer.momentum=0", "optimizer.nesterov=false", "train.max_steps=4")
    assert place.train(*words)[0] == 3


@dataclass(frozen=True)
class Case:
    code: int
    words: str = ""
    before: Callable[[Place], object] = lambda _: None
    as_node: bool = True

    def __str__(self) -> str:
        return f"{self.code} {self.words or self.before.__name__}"


CASES = [
    # accepted
    Case(0, "run.exact=true exact.shards=4 augment.mixup=0.2 train.loss=bce"),
    Case(0, "train.precision=bf16 batch.accumulate=2 train.ema=0.9 model.channels_last=true"),
    Case(0, "model.init=runs/done model.freeze=backbone"),
    Case(0, "augment.first_size=32 augment.size=64 augment.growth=[0,1_epochs]"),
    Case(0, "run.dir=runs/done train.max_steps=2"), Case(0, "run.resume=runs/done"),
    Case(0, "run.dir=runs/done data.root=moved train.max_steps=2",
         lambda place: (place.path / "images").rename(place.path / "moved")),
    Case(0, "run.dir=runs/done run.resume=never", damage),
    Case(0, "run.dir=runs/done run.resume=never", remove_checkpoints),
    Case(0, "model.arch=squeezenet1_1 model.batchnorm=average --nproc 2"),
    # refused from the configuration alone
    Case(2, "batch.global=9 batch.accumulate=2"), Case(2, "train.epoch=3"), Case(2, "track.required=true"),
    Case(2, "run.device=cuda"), Case(2, "data.root=nowhere"), Case(2, "data.root=s3://bucket/x"),
    Case(2, "model.batchnorm=sync --nproc 2"),
    # refused because of the model, which needs torch
    Case(2, "model.arch=resnet999"), Case(2, "model.arch=alexnet"), Case(2, "model.init=nowhere"),
    Case(2, "model.init=models:/nowhere@best"), Case(2, "model.init=runs/done model.arch=resnet18"),
    Case(2, "model.init=runs/done model.freeze=foo"),
    # refused because of the data
    Case(2, "", flatten), Case(2, "", lambda place: shutil.rmtree(place.path / "images/val/class-0000")),
    Case(2, "data.source=synthetic data.num_images=8 data.num_classes=10"),
    # refused because of the run's folder or its checkpoints
    Case(2, "run.dir=images/val/class-0000/0000000.jpg/run"), Case(2, "run.resume=nowhere"),
    Case(2, "run.dir=runs/done optimizer.lr=0.3"), Case(2, "run.dir=runs/done", remove_image),
    Case(2, "run.resume=runs/done model.arch=shufflenet_v2_x1_0"), Case(2, "run.dir=s3://bucket/x"),
    Case(4, "run.dir=runs/done", damage), Case(4, "run.dir=runs/done", remove_checkpoints),
    Case(3, "optimizer.lr=1e6 optimizer.momentum=0 optimizer.nesterov=false train.max_steps=4", diverge),
    Case(2, "track.uri=http://127.0.0.1:PORT track.required=true", as_node=False),
    Case(2, "track.uri=sqlite:////proc/x.db track.required=true"),
]  # fmt: skip


def lose_disk(place: Place) -> None:
    shutil.rmtree(place.path / "runs/mirrored")


def lose_images(place: Place) -> None:
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


MIRRORED = [
    Case(0), Case(0, "train.max_steps=2", lose_disk), Case(0, "run.resume=runs/mirrored", lose_disk),
    Case(2, "optimizer.lr=0.3", lose_disk), Case(0, "train.max_steps=2", damage_local),
    Case(2, "run.resume=never", lose_disk), Case(2, "run.dir=runs/done"), Case(4, "", damage_all),
    Case(4, "", expire), Case(75, "--nproc 2", lose_images),
]  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [case if at % 5 == 4 else pytest.param(case, marks=pytest.mark.long) for at, case in enumerate(MIRRORED)],
    ids=str,
)
def test_doctor_and_train_refuse_the_same_mirrors(place: Place, bucket: Bucket, case: Case) -> None:
    place.bucket = bucket
    mirror = f"checkpoint.mirror={bucket.place}/run"
    assert place.train("run.dir=runs/mirrored", mirror)[0] == 0
    case.before(place)
    words = ["run.dir=runs/mirrored", mirror, *case.words.split()]
    processes = [{"--nproc": "--world"}.get(word, word) for word in words]
    code, err = place.doctor(*processes, **({} if "--nproc" in words else NODE))
    assert code == case.code, err
    assert "/tmp" not in err.replace(str(place.path), ""), "only the user's own places are named"
    code, err = place.train(*words)
    assert code == case.code, err


@pytest.mark.parametrize(
    "case",
    [case if at % 8 == 7 else pytest.param(case, marks=pytest.mark.full) for at, case in enumerate(CASES)],
    ids=str,
)
def test_doctor_and_train_refuse_the_same_requests(place: Place, case: Case) -> None:
    case.before(place)
    words = [
        word.replace("_epochs", " epochs").replace("PORT", str(free_port())) for word in case.words.split()
    ]
    processes = [{"--nproc": "--world"}.get(word, word) for word in words]
    code, err = place.doctor(*processes, **(NODE if case.as_node and "--nproc" not in words else {}))
    assert code == case.code, err
    code, err = place.train(*words)
    assert code == case.code, err
