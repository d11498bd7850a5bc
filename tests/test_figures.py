"""Figures of a run are drawn from its folder alone, whatever its classes are called."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image

from pipeline.addons.report import figures
from pipeline.addons.report.evaluations import (
    SavedEvaluation,
    confusion_matrix,
    most_confident_mistakes,
    most_confused_classes,
    most_frequent_confusions,
    save_augmented,
    save_evaluation,
)
from pipeline.addons.report.figures import EVALUATION_FIGURES
from pipeline.cli.main import main
from pipeline.record.folder import RunFolder
from pipeline.record.predictions import Predictions

CLASSES = ["$5", "$10", "naïve cat"]


def make_predictions() -> Predictions:
    """Return predictions for seven images, one of which cannot be decoded."""
    return Predictions(
        np.array([0, 1, 2, 2, 1, -1, 0], np.int32),
        np.array([0, 2, 2, 1, 0, 1, 2], np.int32),
        np.array([0.9, 0.4, 0.8, 0.95, 0.6, 0.99, 0.6], np.float32),
    )


def evaluation(classes: list[str] = CLASSES) -> SavedEvaluation:
    predictions = make_predictions()
    pixels = np.zeros((2, 3, 8, 8), np.uint8)
    return SavedEvaluation(predictions, classes, most_confident_mistakes(predictions, 2), pixels)


def test_mistakes_are_sorted_by_confidence_and_confusion_counts_each_image_once() -> None:
    predictions = make_predictions()
    assert most_confident_mistakes(predictions, 3).tolist() == [3, 4, 6], (
        "most confident first, equal ones in order; a bad image is no mistake"
    )
    assert confusion_matrix(predictions, np.arange(3)).tolist() == [[1, 0, 1], [1, 0, 1], [0, 1, 1]]
    # class 0 has one false negative and one false positive
    assert most_confused_classes(predictions, 3, 2).tolist() == [1, 2]
    assert confusion_matrix(predictions, np.array([1, 2])).tolist() == [[0, 1], [1, 1]]
    assert most_frequent_confusions(predictions, 1) == [(0, 2, 1)]
    assert [numbers.tolist() for numbers in predictions.count_correct(3)] == [[1, 0, 1], [2, 2, 2]]


def test_each_class_has_a_recall_of_its_own_by_a_name_that_mlflow_takes() -> None:
    classes = ["a/b", "a:b", "a_b_0", "..", ".", "c.d", "plain"]
    labels = np.arange(len(classes), dtype=np.int32)
    recalls = Predictions(labels, labels, np.ones(len(classes))).recalls(classes)
    assert list(recalls) == ["a_b_0_0", "a_b_1", "a_b_0", ".._3", "._4", "c.d", "plain"]


@contextmanager
def little_memory(mib: int) -> Iterator[None]:
    data_kib = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0])
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, ((data_kib << 10) + (mib << 20), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


def test_twenty_thousand_classes_are_drawn_in_little_memory(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels, predicted = rng.integers(0, 20_000, (2, 100_000), np.int32)
    many = SavedEvaluation(
        Predictions(labels, predicted, np.ones(100_000, np.float32)), [f"class {label}" for label in range(20_000)],
        np.empty(0, np.int64), np.empty((0, 3, 8, 8), np.uint8),
    )  # fmt: skip
    with little_memory(256):  # a confusion matrix of all classes has 3 GiB
        for name, draw in EVALUATION_FIGURES.items():
            draw(tmp_path / f"{name}.png", many, "step 1")
            assert (tmp_path / f"{name}.png").exists() == (name != "mistakes")


def test_the_figures_need_only_the_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFolder(tmp_path)
    save_evaluation(run, 12, evaluation())
    save_augmented(run, evaluation().pixels, CLASSES[:2])
    rows = [
        {"time": 1, "step": step, "metrics": {"train/loss": 1 / step, "val/top1": 0.5}} for step in (1, 2, 3)
    ]
    (tmp_path / "journal.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["report", str(tmp_path)]) == 0
    line = capsys.readouterr().out
    for name in ("curves", "confusion", "classes", "reliability", "mistakes", "augmentation"):
        with Image.open(run.report / f"{name}.png") as image:
            assert min(image.size) > 100
        assert f"{name}.png" in line


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"labels": np.zeros(70 << 20, np.int32)},
        {"labels": np.full(10, 2**31 - 1, np.int32)},  # 16 GiB of counts
        {"predicted": np.full(10, -2, np.int32)},
        {"predicted": np.zeros(11, np.int32)},
        {"confidence": np.full(10, np.nan)},
        {"classes": np.zeros(2_000_000, "V0").view("U0")},
        {"classes": np.array([{}])},
        {"shown": np.zeros(65, int), "pixels": np.zeros((65, 3, 1, 1), np.uint8)},
        {"pixels": np.zeros((2, 3, 8, 8), np.uint8)},
        {"shown": np.array([99])},
    ],
)
def test_a_hostile_evaluation_is_one_line_and_costs_no_memory(
    changed: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = np.arange(10, dtype=np.int32) % len(CLASSES)
    arrays = {
        "labels": labels, "predicted": labels, "confidence": np.ones(10, np.float32), "classes": np.array(CLASSES),
        "shown": np.array([3]), "pixels": np.zeros((1, 3, 8, 8), np.uint8),
    } | changed  # fmt: skip
    path = tmp_path / "report" / "data" / "step-00000012.npz"
    path.parent.mkdir(parents=True)
    np.savez_compressed(path, **arrays)
    if not changed:
        path.write_bytes(path.read_bytes()[:100])
    (tmp_path / "journal.jsonl").write_text("")
    with little_memory(512):
        assert main(["report", str(tmp_path)]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mistakes.png")]
    assert "mistakes.png cannot be drawn: " in line
    assert ("step-00000012.npz is damaged" in line) == ("shown" not in changed or "pixels" in changed)


def test_a_folder_of_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "is not the folder of a run that has started" in capsys.readouterr().err


def drawn_texts(figure: Any) -> list[str]:
    """Return all texts of a figure that are not empty."""
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list to which each figure is added that a test draws."""
    kept: list[Any] = []
    make = figures._figure
    monkeypatch.setattr(figures, "_figure", lambda *size: kept.append(make(*size)) or kept[-1])
    return kept


def test_curves_show_a_single_point_and_where_the_run_resumed(tmp_path: Path, drawn: list[Any]) -> None:
    rows: list[dict[str, Any]]
    rows = [{"time": 1, "event": "started", "step": step, "resumed": step > 0} for step in (0, 5)]
    rows += [{"time": 1, "step": step, "metrics": {"train/loss": 0.3}} for step in range(1, 10)]
    rows += [{"time": 1, "step": 9, "metrics": {"val/top1": 0.5}}]
    (tmp_path / "journal.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures.draw_curves(tmp_path / "curves.png", tmp_path / "journal.jsonl")
    loss, top1, _ = drawn[0].axes
    assert [[line.get_label() for line in axes.lines][:2] for axes in (loss, top1)] == [
        ["training", "resumed"], ["validation", "resumed"],
    ]  # fmt: skip
    assert top1.lines[0].get_marker() == "."
    assert top1.lines[1].get_xdata()[0] == 5


def test_figures_say_what_their_numbers_are_and_draw_any_name(tmp_path: Path, drawn: list[Any]) -> None:
    for draw in EVALUATION_FIGURES.values():
        draw(tmp_path / "figure.png", evaluation(["$5", "日本", "i" * 200]), "step 12")
    confusion, classes, reliability, mistakes = map(drawn_texts, drawn)
    names = {"$5", "class 1", "i" * 23 + "…"}
    assert {"true class", "predicted class", "1", *names} <= set(confusion)
    assert "confusion matrix, step 12\n6 images" in confusion
    assert {"0/2", "1/2", *names} <= set(classes)
    assert "reliability diagram, step 12\nexpected calibration error 0.4750, 15 bins" in reliability
    assert {"predicted class 1 (0.95)\ntrue iiiiiiiiiiiii…", "predicted $5 (0.60)\ntrue class 1"} <= set(
        mistakes
    )
