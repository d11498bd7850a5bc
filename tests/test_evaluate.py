"""Validation counts every image once, with the same integers at any number of processes."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import scipy.special
import torch
from evaluate_worlds import assert_same_together, evaluate, evaluate_alone, make_model
from harness import SMALL, Job, MakeJob, Result, quick, save_checkpoint
from object_store import Bucket
from sklearn import metrics
from sklearn.calibration import calibration_curve
from streams import make_trainer, prepare
from torch import Tensor, nn

from pipeline.addons.datasets.holdout import HoldOut
from pipeline.addons.datasets.manifest import scan
from pipeline.addons.datasets.write_pack import pack
from pipeline.addons.models.eval_batches import EvalBatches
from pipeline.addons.models.trained import weights_digest
from pipeline.addons.report.evaluations import most_confident_mistakes
from pipeline.addons.run.receipt import best_checkpoint
from pipeline.addons.store.bucket import Store
from pipeline.config.sections import Model
from pipeline.model.normalise import Normalise
from pipeline.train.evaluation import LOSS_UNIT, MAX_LOSS, NO_PREDICTION, Evaluation

WORLDS = {1: (1, 2), 7: (1, 3), 48: (1, 4), 97: (1, 2, 3, 4), 1000: (1, 3)}


@pytest.fixture(scope="module")
def trained(job: MakeJob) -> Job:
    return job("train.epochs=1", "evaluate.batch=16", nproc=2).finished()


def evaluate_run(run: Path, *overrides: str, world: int = 1, code: int = 0) -> Result:
    processes = ["--nproc", str(world)] if world > 1 else []
    return quick("evaluate", str(run), *overrides, *processes, code=code)


@pytest.mark.fault("E3")
@pytest.mark.parametrize("size", [1, *(pytest.param(size, marks=pytest.mark.full) for size in [*WORLDS][1:])])
def test_every_image_is_counted_once(trained: Job, digits: Path, tmp_path: Path, size: int) -> None:
    for image in sorted(digits.glob("*/*/*.png"), key=lambda path: path.name)[:size]:
        target = tmp_path / "val" / image.parent.name / image.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(image, target)
    root = f"data.root={tmp_path}"
    (line,) = {evaluate_run(trained.folder, root, world=world).out for world in WORLDS[size]}
    assert line.startswith("done ")
    assert f" images={size}/{size} " in line


def test_evaluate_and_a_second_train_print_the_done_line_of_train(trained: Job) -> None:
    expected = trained.output()
    weights = weights_digest(trained.contents()["model"])
    for world in (1, 3):
        result = evaluate_run(trained.folder, world=world)
        assert (result.out, result.done["weights"]) == (expected, weights)
    before = (trained.folder / "journal.jsonl").read_bytes()
    assert trained.run().out == expected
    assert (trained.folder / "journal.jsonl").read_bytes() == before


class FixedLogits(nn.Module):
    """Returns the same logits for every image except the first two of each batch."""

    def __init__(self, logits: list[float], first_two: list[list[float]] | None = None) -> None:
        super().__init__()
        self.logits, self.first_two = torch.tensor(logits), torch.tensor(first_two or [logits] * 2)

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([self.first_two, self.logits.expand(len(images) - 2, -1)])


@pytest.mark.fault("J4")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_images_whose_logits_are_not_finite_are_counted_and_wrong(digits: Path, bad: float) -> None:
    finite = evaluate(digits, FixedLogits([0.0] * 10)).evaluation
    result = evaluate(digits, FixedLogits([0.0] * 10, [[bad] + [0.0] * 9, [bad] * 10]))
    found, predictions = result.evaluation, result.predictions
    bad_images = 2 * math.ceil(found.images / 48)
    assert (found.images, found.not_finite) == (finite.images, bad_images), "every image is counted"
    assert "loss" not in found.figures
    assert 0 <= found.loss_sum < finite.loss_sum
    assert (predictions.predicted == NO_PREDICTION).sum() == found.not_finite
    correct, total = predictions.count_correct(10)
    assert (correct.sum(), total.sum()) == (found.correct1, found.images), "the figures show the same counts"
    assert NO_PREDICTION not in predictions.predicted[most_confident_mistakes(predictions, 1000)]


def test_no_benchmark_chooses_kernels_of_validation(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "benchmark", True)
    monkeypatch.setattr(cudnn, "deterministic", False)
    model = FixedLogits([0.0] * 10)
    settings = []
    model.register_forward_hook(lambda *_: settings.append((cudnn.benchmark, cudnn.deterministic)))
    evaluate(digits, model)
    assert set(settings) == {(False, True)}
    assert (cudnn.benchmark, cudnn.deterministic) == (True, False), "training goes on to benchmark"


def test_the_figures_are_those_of_scikit_learn_at_any_world_size(digits: Path) -> None:
    result, alone, logits = evaluate_alone(digits)
    for size in (2, 3, 4):
        assert_same_together(digits, size, alone)
    labels, probabilities = result.predictions.labels, scipy.special.softmax(logits.double().numpy(), axis=1)
    predicted, confidence = probabilities.argmax(1), probabilities.max(1)
    is_correct = predicted == labels
    # the mean distance over the bins, weighted by their images: both functions leave out empty bins
    accuracy, mean = calibration_curve(is_correct, confidence, n_bins=15)
    weights = np.histogram(confidence, np.linspace(0, 1, 16))[0]
    nll = metrics.log_loss(labels, probabilities)
    expected = {
        "ece": (np.abs(accuracy - mean) * weights[weights > 0]).sum() / len(labels),
        "nll": nll,
        "balanced_accuracy": metrics.balanced_accuracy_score(labels, predicted),
        "correct1": is_correct.sum(),
        "correct5": metrics.top_k_accuracy_score(labels, probabilities, k=5, normalize=False),
        "loss_sum": nll * len(labels) * LOSS_UNIT,
    }
    assert (weights > 0).sum() > 8
    for name, value in expected.items():
        assert alone[name] == pytest.approx(value, abs=1 if name == "loss_sum" else 1e-9), name
    recalls = metrics.recall_score(labels, predicted, average=None)
    assert list(alone["by_class"].values()) == pytest.approx(recalls.tolist(), abs=1e-9)


def test_the_logits_of_mirror_images_are_averaged(digits: Path) -> None:
    model = make_model()
    plain, flipped = (evaluate(digits, model, f"evaluate.flip={word}") for word in ("false", "true"))
    config, _, source = prepare(digits, 1)
    pixels = EvalBatches(source.val, config)[0].images
    inputs = Normalise(torch.device("cpu"), Model())(pixels)
    expected = ((model(inputs) + model(inputs.flip(-1))) / 2).softmax(1).amax(1)
    found = torch.from_numpy(flipped.predictions.confidence[: len(pixels)])
    assert torch.allclose(found, expected.double(), atol=1e-6)
    assert not np.array_equal(plain.predictions.confidence, flipped.predictions.confidence)
    assert flipped.evaluation.figures["top1_plain"] == plain.evaluation.top1
    assert "top1_plain" not in plain.evaluation.figures


def test_no_loss_is_too_large_for_the_sum(digits: Path) -> None:
    found = evaluate(digits, FixedLogits([-3e38] * 9 + [3e38])).evaluation
    assert found.not_finite == 0
    assert 0.8 * MAX_LOSS < found.figures["loss"] < MAX_LOSS, "nearly every image has the largest loss"


def test_the_best_model_has_finite_logits_and_of_equals_the_lower_loss(digits: Path, tmp_path: Path) -> None:
    state = make_trainer(digits, "model.arch=squeezenet1_1").state
    broken = Evaluation(1, 10, 10, correct1=9, correct5=9, loss_sum=0, not_finite=1)
    assert not state.add_evaluation(broken)
    losses = {1: 9, 2: 8, 3: 8, 4: 9}  # step: sum
    found = [at for at, loss in losses.items() if state.add_evaluation(Evaluation(at, 10, 10, 5, 5, loss))]
    assert found == [1, 2]
    assert not state.add_evaluation(broken)
    state.step = broken.step
    state.forget_best()
    assert state.best is None, "not even when the best is chosen again"

    rows = [{"step": step, "top1": 0.5, "loss": loss} for step, loss in losses.items()]
    (tmp_path / "receipt.json").write_text(json.dumps({"evaluations": rows}))
    (tmp_path / "checkpoints").mkdir()
    for step in losses:
        (tmp_path / f"checkpoints/step-{step:08d}.{'0' * 16}.pt").touch()
    assert best_checkpoint(str(tmp_path)).name.startswith("step-00000002."), "as predict finds it"


@pytest.mark.fault("J4")
def test_a_run_reports_a_non_finite_validation(job: MakeJob) -> None:
    run = job("optimizer.lr=1e6", "optimizer.momentum=0", "optimizer.nesterov=false", "data.workers=0",
              "schedule.name=constant", "schedule.warmup=0", "train.max_steps=1")  # fmt: skip
    trained = run.run()
    for result in (trained, evaluate_run(run.folder, world=2)):
        assert result.done == trained.done
        assert re.search(r"the logits of \d+ of 120 images are not finite", result.err), result.err
    assert "(best)" not in trained.err
    assert "best     none: no validation had finite logits" in trained.err
    assert not run.journal("val/loss")
    receipt, journal = ((run.folder / name).read_text() for name in ("receipt.json", "journal.jsonl"))
    assert "NaN" not in receipt + journal, "it is not valid JSON"
    assert [row["loss"] for row in json.loads(receipt)["evaluations"]] == [None]
    assert re.search('"not_finite": ?120', journal)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    """Return 120 images in class folders, without train/ and val/."""
    return shutil.copytree(digits / "val", tmp_path_factory.mktemp("plain") / "images")


def plain_job(folder: Path, source: str, root: Path) -> Job:
    words = [*SMALL, "data.workers=0", "train.max_steps=1", "schedule.warmup=0"]
    return Job(folder, ["digits", f"data.source={source}", f"data.root={root}", *words]).finished()


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory, plain: Path) -> Job:
    return plain_job(tmp_path_factory.mktemp("plain_run") / "run", "folder", plain)


def count_and_description(run: Path, *words: str) -> tuple[str, str]:
    result = evaluate_run(run, *words)
    return result.done["images"], result.err.partition(" on ")[2].splitlines()[0]


def test_held_out_images_are_evaluated(plain_run: Job, plain: Path, digits: Path, tmp_path: Path) -> None:
    size = len(scan(plain, HoldOut()).val)
    moved, other = (shutil.copytree(plain, tmp_path / name) for name in ("moved", "other"))
    next((other / "3").iterdir()).unlink()
    for root, count, description in (
        (plain, size, f"the {size} held-out images of {plain}"),
        (moved, size, f"the {size} held-out images of {moved}"),
        (other, 119, f"all 119 images of {other}"),
        (digits, 120, f"the 120 images of {digits}/val"),
        (digits / "train", 1437, f"all 1,437 images of {digits}/train"),
    ):
        images, line = count_and_description(plain_run.folder, f"data.root={root}")
        assert images == f"{count}/{count}"
        assert description in line


@pytest.mark.usefixtures("jpegtran")
def test_a_pack_holds_out_the_same(plain: Path, plain_run: Job, tmp_path: Path, bucket: Bucket) -> None:
    half, tenth = tmp_path / "half", f"{bucket.place}/tenth"
    pack(plain, half, "lossless", 0.5)
    pack(plain, Store(tenth), "raw=8", 0.1)
    pack_run = plain_job(tmp_path / "run", "pack", half)
    small, large = (len(scan(plain, HoldOut(share)).val) for share in (0.1, 0.5))
    half_pack, tenth_pack = (("data.source=pack", f"data.root={root}") for root in (half, tenth))
    refused = evaluate_run(plain_run.folder, *half_pack, code=2)
    assert "the images of the training with another split" in refused.error
    found = count_and_description(plain_run.folder, *tenth_pack)
    assert found == (f"{small}/{small}", f"the {small} validation images of the pack {tenth}")
    save_checkpoint(tmp_path / "no-split", {**plain_run.contents(), "split": 5}, 1)
    count = f"{large}/{large}"
    assert count_and_description(tmp_path / "no-split", *half_pack)[0] == count
    assert evaluate_run(pack_run.folder, world=2).done["images"] == count, "rank 0 tells the others"
    found = count_and_description(pack_run.folder, "data.source=folder", f"data.root={plain}")
    assert found == (count, f"the {large} held-out images of {plain}")


def test_an_override_or_checkpoint_that_does_not_fit_is_one_line(plain_run: Job, tmp_path: Path) -> None:
    for words in ("model.arch=resnet50", "data.source=synthetic data.num_classes=20", "data.val_split=0.5"):
        assert words.split("=")[0] in evaluate_run(plain_run.folder, *words.split(), code=2).error
    for number, (name, value, says) in enumerate((
        ("model", {"fc.weight": torch.zeros(1)}, "are not those of a timm/test_efficientnet with 10 classes"),
        ("config", None, "'config'"), ("classes", 5, "'classes'"), ("config", "recipe: [", "YAML"),
    )):  # fmt: skip
        save_checkpoint(tmp_path / str(number), {**plain_run.contents(), name: value}, 7)
        refused = quick("evaluate", str(tmp_path / str(number)))
        assert refused.code in (2, 4)
        assert says in refused.error
