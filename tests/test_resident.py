"""Images that live on the training device; test_stream compares each batch with the loader's."""

import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from harness import SMALL, Job, assert_same, kill, plan_of, refused
from streams import make_trainer, train_batches
from torchvision.transforms import v2

from pipeline.addons.datasets.resident_images import load_images
from pipeline.addons.datasets.resident_limits import resident_bytes
from pipeline.config.sections import Augment
from pipeline.data.augment import MEAN_COLOUR, SampleKey, draw_erasing
from pipeline.plan import DataSize
from pipeline.randomness import derive
from pipeline.record.terminal import SILENT

SHIFTS = ("augment.size=32", "augment.pad=4")


def test_the_boxes_that_are_erased_are_torchvisions() -> None:
    erasing = v2.RandomErasing(0.5, value=MEAN_COLOUR)
    boxes = set()
    for sample in range(300):
        size, key = (8, 32, 224)[sample % 3], SampleKey(1, sample, sample % 2)
        top, left, height, width = box = draw_erasing(size, Augment(erase=0.5), 7, key)
        image = torch.zeros((3, size, size), dtype=torch.uint8)
        image[:, top : top + height, left : left + width] = torch.tensor(MEAN_COLOUR)[:, None, None]
        torch.manual_seed(derive(7, "policy", *(key if key.view else key[:2])))
        assert torch.equal(image, erasing(torch.zeros_like(image)))
        boxes.add(box)
    assert 100 < len(boxes) < 200


def test_a_run_has_the_loaders_trace_and_weights_also_after_a_kill(tmp_path: Path, digits: Path) -> None:
    arguments = ["digits", *SMALL, *SHIFTS, f"data.root={digits}", "train.epochs=1", "augment.erase=0.3",
                 "evaluate.every=10 steps", "evaluate.batch=70", "checkpoint.every=5 steps"]  # fmt: skip
    loader = Job(tmp_path / "loader", [*arguments, "data.resident=off"], nproc=2)
    loader.run_in_forks()
    run = Job(tmp_path / "run", arguments, nproc=2).start().wait_for_step(12)
    kill(run.ranks()[0], signal.SIGKILL)
    run.wait()
    assert "decoded the training images: 4.2 MiB on cpu" in run.run().err
    assert_same(run, loader)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("bad", "one of them cannot be decoded"), ("slow", "the storage is slow"), ("stopped", "")],
)
def test_the_loader_reads_what_is_not_resident(tmp_path: Path, digits: Path, kind: str, reason: str) -> None:
    root = shutil.copytree(digits, tmp_path / "images")
    if kind == "bad":
        next((root / "train").rglob("*.png")).write_text("text")
    data, lines = train_batches(root, *SHIFTS), list[str]()
    config = data.config.replacing("run", timeout=0) if kind == "slow" else data.config
    assert load_images(data, config, torch.device("cpu"), lines.append, lambda: kind == "stopped") is None
    assert lines == ([f"the loader reads the training images: {reason}"] if reason else [])


def test_validation_images_are_decoded_once(digits: Path, tmp_path: Path) -> None:
    root = shutil.copytree(digits, tmp_path / "images")
    sorted((root / "val").rglob("*.png"))[70].write_text("text")
    results = []
    for mode in ("off", "auto"):
        trainer = make_trainer(root, f"data.resident={mode}", "evaluate.batch=50", "data.workers=1")
        evaluator = trainer.evaluator
        stopping = iter([False, False, True])
        assert evaluator.evaluate(1, SILENT, lambda stopping=stopping: next(stopping)) is None
        results += [evaluator.evaluate(1, SILENT, lambda: False) for _ in range(2)]
    shutil.rmtree(root)
    results.append(evaluator.evaluate(1, SILENT, lambda: False))
    first = results[0]
    assert len(first.bad_images) == 1
    assert [result and (result.evaluation, result.bad_images) for result in results] == [
        (first.evaluation, first.bad_images)
    ] * 5


@pytest.mark.parametrize(
    ("words", "reason"),
    [("", ""),
     ("data.resident=off", "data.resident=off"),
     ("augment.pad=0", "augment.pad=0 crops and resizes each image anew"),
     ("augment.policy=augmix", "augment.policy=augmix changes colours and shapes"),
     ("augment.first_size=16 augment.growth=[1epoch,2epochs]", "augment.first_size changes their size"),
     ("augment.size=64", "585.9 MiB of pixels exceed 256.0 MiB"),
     ("train.max_steps=5", "the run is shorter than an epoch")],
)  # fmt: skip
def test_the_plan_says_why_images_are_not_resident(words: str, reason: str) -> None:
    request, size = (*SHIFTS, *words.split()), DataSize(50_000, 10_000, 10)
    config, plan = plan_of(*request, data=size)
    assert plan.not_resident == reason
    assert reason or resident_bytes(config, plan, "cpu") == 60_000 * 3 * 32 * 32
    on = partial(plan_of, *request, "data.resident=on", data=size)
    if "augment" in reason:
        assert f"is not possible: {reason}" in refused(on)
    else:
        assert not on()[1].not_resident
