"""Several labels a picture: scikit-learn's figures at any number of processes, and exact runs."""

import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluate_worlds import assert_same_together, evaluate, evaluate_alone
from harness import SMALL, Job, quick, read_rows
from numpy.typing import NDArray
from sklearn import metrics
from torch.nn import functional

from pipeline.addons.datasets.sources import open_source
from pipeline.addons.models import class_weights
from pipeline.addons.models.eval_batches import EvalBatches
from pipeline.addons.models.several_labels import class_figures, class_matrix
from pipeline.addons.report.evaluations import last_evaluation
from pipeline.addons.report.page import render_page
from pipeline.addons.run.receipt import best_checkpoint
from pipeline.config.load import load
from pipeline.config.sections import Train
from pipeline.data.batch import NO_LABEL
from pipeline.data.mix import draw_mix, own_label_weights, swap_partners
from pipeline.model.loss import Targets, classification_loss
from pipeline.record.folder import RunFolder
from pipeline.train.evaluation import CONFIDENCE_UNIT

Keys = tuple[str, ...]
NAMES = ["big", "even", "four", "odd", "one", "prime", "round", "three", "two", "void"]


def labels_of(digit: int) -> list[str]:
    groups = {"prime": (2, 3, 5, 7), "round": (0, 6, 8, 9), "big": (5, 6, 7, 8, 9), "one": (1,),
              "two": (2,), "three": (3,), "four": (4,)}  # fmt: skip
    return ["odd" if digit % 2 else "even", *(name for name, digits in groups.items() if digit in digits)]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Keys:
    """Return the keys of a table of the digits, each with 2 to 4 of 10 labels, void in no val/."""
    path = tmp_path_factory.mktemp("table") / "labels.csv"
    rows = ["path,label,split"]
    for image in sorted(digits.glob("*/*/*.png")):
        split, digit, name = image.parts[-3:]
        more = ["void"] if split == "train" and name < "0002" else []
        rows.append(f"{split}/{digit}/{name},{';'.join(labels_of(int(digit)) + more)},{split}")
    path.write_text("\n".join(rows))
    return ("data.source=table", f"data.table={path}", f"data.root={digits}")


def job(folder: Path, table: Keys, world: int, *more: str) -> Job:
    words = ["digits", *table, *SMALL, "run.exact=true", "run.deterministic=false", "train.max_steps=12",
             "evaluate.every=6 steps", "checkpoint.every=4 steps", "augment.mixup=0.4", "augment.cutmix=1",
             "data.workers=2", "train.class_weights=sqrt", "train.label_smoothing=0.1"]  # fmt: skip
    return Job(folder, [*words, *more], nproc=world)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, table: Keys) -> Job:
    return job(tmp_path_factory.mktemp("alone") / "run", table, 1, "track.report=true").finished()


@pytest.mark.parametrize(
    ("positive", "levels"),
    [(np.arange(50) < 0, 9), (np.arange(1) < 1, 9), (np.arange(1) < 0, 9), (np.arange(50) < 50, 9),
     (np.arange(400) % 7 == 3, 5), (np.arange(400) == 3, 1000), (np.arange(5000) % 2 == 1, 1 << 30),
     (np.arange(20) % 3 == 1, 1)],
)  # fmt: skip
def test_the_figures_of_a_class_are_those_of_scikit_learn(positive: NDArray[np.bool_], levels: int) -> None:
    units = np.random.default_rng(0).integers(0, levels, len(positive)) * (CONFIDENCE_UNIT // levels)
    precision, f1, threshold = class_figures(positive, units)
    if not positive.any():
        assert (precision, f1, threshold) == (0, 0, 0.5)
        return
    shares = units / CONFIDENCE_UNIT
    assert precision == pytest.approx(metrics.average_precision_score(positive, shares), abs=1e-9)
    assert f1 == pytest.approx(metrics.f1_score(positive, shares >= threshold), abs=1e-9)
    precisions, recalls, _ = metrics.precision_recall_curve(positive, shares)
    best = 2 * precisions * recalls / np.maximum(1e-12, precisions + recalls)
    assert f1 == pytest.approx(best.max(), abs=1e-9), "no other threshold is better"


def test_the_figures_are_those_of_scikit_learn(digits: Path, table: Keys) -> None:
    result, found, logits = evaluate_alone(digits, *table)
    for size in (2, 4):
        assert_same_together(digits, size, found, *table)
    source = open_source(load("digits", [*table]))
    assert list(source.classes) == NAMES
    targets = class_matrix(source)[source.val.labels]
    shares = np.rint(logits.double().sigmoid().numpy() * CONFIDENCE_UNIT) / CONFIDENCE_UNIT
    seen = targets.any(0)
    assert seen.tolist() == [True] * 9 + [False]
    assert found["classes"] == 9
    logits, labels = logits.double(), torch.from_numpy(targets).double()
    nll = functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    expected = {
        "map": metrics.average_precision_score(targets[:, seen], shares[:, seen], average="macro"),
        "f1": metrics.f1_score(targets[:, seen], (shares >= found["thresholds"])[:, seen], average="macro"),
        "nll": nll.item() / len(targets),
        "correct1": metrics.accuracy_score(targets, shares >= 0.5, normalize=False),
    }  # fmt: skip
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-9), name
    each = metrics.average_precision_score(targets[:, seen], shares[:, seen], average=None)
    assert list(found["by_class"].values()) == pytest.approx(each.tolist(), abs=1e-9)
    assert found["thresholds"][9] == 0.5
    assert result.predictions.images.tolist() == targets.sum(0).tolist()


def test_a_missing_target_is_wrong(digits: Path, table: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    class Perfect(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            rows = 20 * targets[self.first : self.first + len(images)].float() - 10
            self.first += len(images)
            rows[:2] *= torch.tensor([[1.0], [torch.nan]])  # the second image of each batch
            return rows

    source = open_source(load("digits", [*table]))
    targets = torch.from_numpy(class_matrix(source)[source.val.labels])
    model, batches = Perfect(), -(-len(source.val) // 48)
    model.first = 0  # type: ignore[assignment]
    load_one = EvalBatches._load
    monkeypatch.setattr(
        EvalBatches, "_load",
        lambda self, key, *more: NO_LABEL if key.sample == 0 else load_one(self, key, *more),
    )  # fmt: skip
    found = evaluate(digits, model, *table).evaluation
    assert (found.images, found.total, found.not_finite) == (len(source.val), len(source.val), batches)
    assert found.correct1 == len(source.val) - batches - 1
    assert "loss" not in found.figures
    assert found.map < 1, "the positives of an image without a finite logit come last"


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_torchs_also_of_a_mix_and_of_one_label(smoothing: float) -> None:
    source = torch.Generator().manual_seed(0)
    logits, target = torch.randn(16, 10, generator=source), torch.rand(16, 10, generator=source) < 0.3
    options, weights = Train(label_smoothing=smoothing), torch.rand(10, generator=source) * 5
    own = own_label_weights(draw_mix(load("digits", ["augment.cutmix=1"]).augment, 1, 7, 0, 16), 32, 48)
    labels = target.float()
    mixed = own[:, None] * labels + (1 - own[:, None]) * swap_partners(labels)
    smooth = (1 - smoothing) * mixed + smoothing * mixed.mean(1, keepdim=True)
    found = classification_loss(logits, Targets(labels, swap_partners(labels), own), options, weights)
    summed = functional.binary_cross_entropy_with_logits(logits, smooth, pos_weight=weights, reduction="sum")
    torch.testing.assert_close(found, summed / 16)
    one = torch.arange(16) % 10
    found = classification_loss(logits, Targets(functional.one_hot(one, 10).float()), options)
    of_one_label = Train(label_smoothing=smoothing, loss="bce")
    torch.testing.assert_close(found, classification_loss(logits, Targets(one), of_one_label))


def test_balanced_weights_are_negatives_by_positives(table: Keys) -> None:
    config = load("digits", [*table, "train.class_weights=balanced"])
    source = open_source(config)
    positives = class_matrix(source)[source.train.labels].sum(0)
    found = class_weights.tensor(config, source, torch.device("cpu"))
    assert found.tolist() == pytest.approx((len(source.train) - positives) / positives)


@pytest.mark.parametrize("worlds", [(2, 4), pytest.param((4, 1, 2), marks=pytest.mark.full)])
def test_a_killed_run_resumes(tmp_path: Path, table: Keys, alone: Job, worlds: tuple[int, ...]) -> None:
    run, share = job(tmp_path / "run", table, worlds[0]), 12 // len(worlds)
    for number, run.nproc in enumerate(worlds[:-1]):
        run.start().kill_at(random.Random(number).randint(number * share + 1, (number + 1) * share))
    run.nproc = worlds[-1]
    assert run.run_in_forks().out == alone.output()
    assert run.trace() == alone.trace()
    prefixes = ("train/loss", "train/subset", "val/")
    assert sorted(run.journal(*prefixes)) == sorted(alone.journal(*prefixes))


def test_all_that_a_run_leaves_knows_several_labels(alone: Job, digits: Path, tmp_path: Path) -> None:
    line, run, folder = alone.output(), str(alone.folder), RunFolder(alone.folder)
    final = dict((key, value) for step, key, value in alone.journal("val/") if step == 12)
    assert f" map={final['val/map']:.4f} images=120/120 " in line
    assert {"val/f1", "val/subset", "val/loss", "val/nll", "val/ap/even", "val/ap/prime"} <= set(final)
    assert not {"val/top1", "val/top5", "val/ece", "val/balanced_accuracy", "val/ap/void"} & set(final)
    assert alone.journal("train/subset")
    assert not alone.journal("train/top1")
    contents = alone.contents()
    assert contents["several_labels"] is True
    assert len(contents["evaluation"]["thresholds"]) == 10
    (receipt,) = (row for row in json.loads(folder.receipt.read_text())["evaluations"] if row["step"] == 12)
    assert receipt["map"] == final["val/map"]
    best = max(read_rows(folder.journal), key=lambda row: row.get("map", -1))
    assert f"step-{best['step']:08d}." in best_checkpoint(run).name

    assert quick("evaluate", run).out == line
    thresholds = dict(zip(contents["classes"], contents["evaluation"]["thresholds"], strict=True))
    images = sorted(map(str, (digits / "val/3").iterdir()))[:4]
    for row in json.loads(quick("predict", run, *images, "--json").out)["predictions"]:
        shares = [answer["probability"] for answer in row["top"]]
        assert sum(shares) != pytest.approx(1, abs=0.05), "each is a probability of its own"
        assert all(answer["threshold"] == thresholds[answer["class"]] for answer in row["top"])
    assert "no probability differs" in quick("export", run, "--to", "safetensors").out
    page = render_page(folder)
    assert "Average precision of each class" in page
    assert not re.search('id="(confusion|mistakes|left-out)"', page)
    assert last_evaluation(folder.report).predictions.images.sum() > 120
    assert not (folder.report / "confusion.png").exists()

    for digit, name in enumerate(("one", "two", "three"), 1):  # sets of one label for this model
        shutil.copytree(digits / f"val/{digit}", tmp_path / name)
    assert " map=" in quick("evaluate", run, "data.source=folder", f"data.root={tmp_path}").out
