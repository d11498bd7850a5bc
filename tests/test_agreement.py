"""`doctor` and `train` agree: what one refuses the other refuses, with the same exit code; and advice works."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from forked import Forked
from harness import free_port

SMALL = (
    "model.arch=shufflenet_v2_x0_5", "augment.size=32", "batch.global=8", "train.epochs=2", "train.max_steps=1",
    "schedule.warmup=0", "checkpoint.every=1 steps", "data.workers=0", "run.device=cpu", "run.threads=1",
    "track.uri=none", "track.report=false",
)  # fmt: skip
NODE = {"PET_NPROC_PER_NODE": "1"}
"""Has `doctor` make the checks of a start alone."""


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    server = Forked()
    yield server
    server.close()


@dataclass
class Place:
    """A folder with the data `images` (4 classes, 16 images to train), the finished run `done`, and what a case adds."""

    path: Path
    forked: Forked

    def train(self, *words: str, source: str = "folder") -> tuple[int, str]:
        """Exit code and standard error of `train digits`, with the small settings and then these words."""
        base = [*SMALL, f"data.source={source}", "data.root=images"]
        result = self.forked("train", "digits", *base, *words, cwd=self.path)
        return result.code, result.err

    def doctor(self, *words: str, **env: str) -> tuple[int, str]:
        base = [*SMALL, "data.source=folder", "data.root=images"]
        result = self.forked("doctor", "digits", *base, *words, cwd=self.path, **env)
        return result.code, result.err

    def run(self, *words: str) -> None:
        """Another command, which succeeds."""
        result = self.forked(*words, cwd=self.path)
        assert result.code == 0, result.err

    def checkpoint(self, run: str = "done") -> Path:
        return sorted((self.path / "runs" / run / "checkpoints").glob("step-*.pt"))[-1]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, forked: Forked) -> Path:
    place = Place(tmp_path_factory.mktemp("place"), forked)
    make = ("data", "make", "synthetic", "images", "--images", "16", "--classes", "4", "--side", "32")
    place.run(*make)
    assert place.train("run.dir=runs/done")[0] == 0
    return place.path


@pytest.fixture
def place(made: Path, forked: Forked, tmp_path: Path) -> Place:
    shutil.copytree(made, tmp_path / "place")
    return Place(tmp_path / "place", forked)


def damage(place: Place) -> None:
    for path in (place.path / "runs/done/checkpoints").glob("step-*.pt"):
        path.write_bytes(b"x")


def remove_image(place: Place) -> None:
    next((place.path / "images/train").glob("*/*.jpg")).unlink()


def flatten(place: Place) -> None:
    shutil.rmtree(place.path / "images/val")
    (place.path / "images/val").mkdir()
    (place.path / "images/val/1.jpg").write_bytes(b"x")


def spoil(place: Place) -> None:
    for path in list((place.path / "images/train").glob("*/*.jpg"))[:12]:
        path.write_bytes(b"\0" * path.stat().st_size)


def diverge(place: Place) -> None:
    assert (
        place.train("optimizer.lr=1e6", "optimizer.momentum=0", "optimizer.nesterov=false", "train.max_steps=4")[0] == 3
    )


@dataclass(frozen=True)
class Case:
    code: int
    words: str = ""
    before: Callable[[Place], object] = lambda _: None
    as_node: bool = True

    def __str__(self) -> str:
        return f"{self.code} {self.words or self.before.__name__}"


CASES = [
    # what can be trained
    Case(0), Case(0, "run.deterministic=true"), Case(0, "run.exact=true exact.shards=4"), Case(0, "train.ema=0.9"),
    Case(0, "optimizer.name=adamw optimizer.nesterov=false"), Case(0, "augment.mixup=0.2 train.loss=bce"),
    Case(0, "train.precision=bf16"), Case(0, "batch.accumulate=2"), Case(0, "model.batchnorm=average"),
    Case(0, "model.batchnorm=sync"), Case(0, "model.init=runs/done"), Case(0, "model.init=runs/done model.freeze=backbone"),
    Case(0, "model.channels_last=true"), Case(0, "augment.first_size=32 augment.size=64 augment.growth=[0,1_epochs]"),
    Case(0, "run.dir=runs/done"), Case(0, "run.dir=runs/done train.max_steps=2"), Case(0, "run.resume=runs/done"),
    Case(0, "run.dir=runs/done run.resume=never"), Case(0, "run.dir=runs/done data.max_bad=0.5 train.max_steps=2"),
    Case(0, "run.dir=runs/done run.timeout=600 train.max_steps=2"),
    Case(0, "run.dir=runs/done data.root=moved train.max_steps=2",
         lambda place: (place.path / "images").rename(place.path / "moved")),
    Case(0, "run.dir=runs/done run.resume=never", damage), Case(0, "model.arch=squeezenet1_1 model.batchnorm=average"),
    # what no file system, data or checkpoint has a part in
    Case(2, "batch.global=0"), Case(2, "batch.global=9 batch.accumulate=2"), Case(2, "batch.global=17"),
    Case(2, "train.epoch=3"), Case(2, "schedule.warmup=9_epochs"), Case(2, "optimizer.momentum=0"),
    Case(2, "augment.mixup=0.2 batch.global=5"), Case(2, "run.exact=true exact.shards=3"),
    Case(2, "run.exact=true train.precision=fp16"), Case(2, "parallel=stages"), Case(2, "track.required=true"),
    Case(2, "run.device=cuda"), Case(2, "data.source=pack"), Case(2, "data.root=nowhere"), Case(2, "train.clip=0"),
    Case(2, "model.batchnorm=sync --nproc 2"), Case(2, "batch.global=9 --nproc 2"),
    # the model, for which torch has to be imported
    Case(2, "model.arch=resnet999"), Case(2, "model.arch=vit_b_16"), Case(2, "model.arch=alexnet"),
    Case(2, "batch.global=1"), Case(2, "model.init=nowhere"), Case(2, "model.init=models:/nowhere@best"),
    Case(2, "model.init=images"), Case(2, "model.init=runs/done model.arch=resnet18"),
    Case(2, "model.init=runs/done model.freeze=foo"), Case(2, "model.freeze=backbone"),
    Case(2, "model.init=runs/done model.freeze=conv1,maxpool,stage2,stage3,stage4,conv5,fc"),
    # the data
    Case(2, "", flatten), Case(2, "", lambda place: shutil.rmtree(place.path / "images/val/class-0000")),
    Case(2, "", lambda place: (place.path / "images/val/class-0000").rename(place.path / "images/val/other")),
    # the run's folder, and what is in it
    Case(2, "run.dir=images/val/class-0000/0000000.jpg/run"), Case(2, "run.resume=nowhere"), Case(2, "run.resume=images"),
    Case(2, "run.dir=runs/done optimizer.lr=0.3"), Case(2, "run.dir=runs/done train.epochs=1"),
    Case(2, "run.dir=runs/done", remove_image), Case(2, "run.resume=runs/done model.arch=shufflenet_v2_x1_0"),
    Case(4, "run.dir=runs/done", damage), Case(4, "run.resume=runs/done", damage),
    Case(3, "optimizer.lr=1e6 optimizer.momentum=0 optimizer.nesterov=false train.max_steps=4", diverge),
    Case(2, "track.uri=http://127.0.0.1:PORT track.required=true", as_node=False),
]  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [case if at % 8 == 7 else pytest.param(case, marks=pytest.mark.full) for at, case in enumerate(CASES)],
    ids=str,
)
def test_doctor_and_train_refuse_the_same_requests(place: Place, case: Case) -> None:
    case.before(place)
    words = [word.replace("_epochs", " epochs").replace("PORT", str(free_port())) for word in case.words.split()]
    processes = [{"--nproc": "--world"}.get(word, word) for word in words]
    code, said = place.doctor(*processes, **(NODE if case.as_node and "--nproc" not in words else {}))
    assert code == case.code, said
    code, said = place.train(*words)
    assert code == case.code, said


def test_there_are_sixty_requests() -> None:
    assert len({str(case) for case in CASES}) >= 60
