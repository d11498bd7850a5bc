"""Figures of a run are drawn from its folder alone, whatever its classes are called."""

import json
import resource
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image

from pipeline.addons.report import figures
from pipeline.addons.report.figures import EVALUATION_FIGURES, Tile, draw_contact_sheet
from pipeline.cli.main import main
from pipeline.record.folder import RunFolder
from pipeline.record.predictions import Predictions, SavedEvaluation, load_evaluation, save_augmented, save_evaluation

CLASSES = ["$5", "$10", "naïve cat"]


def make_predictions() -> Predictions:
    """Return predictions for seven images, one of which cannot be decoded."""
    return Predictions(
        np.array([0, 1, 2, 2, 1, -1, 0], np.int32),
        np.array([0, 2, 2, 1, 0, 1, 2], np.int32),
        np.array([0.9, 0.4, 0.8, 0.95, 0.6, 0.99, 0.6], np.float32),
    )


def test_mistakes_are_sorted_by_confidence_and_confusion_counts_each_image_once() -> None:
    predictions = make_predictions()
    assert predictions.most_confident_mistakes(3).tolist() == [3, 4, 6], (
        "most confident first, equal ones in order; a bad image is no mistake"
    )
    assert predictions.confusion_matrix(np.arange(3)).tolist() == [[1, 0, 1], [1, 0, 1], [0, 1, 1]]
    # class 0 has one false negative and one false positive
    assert predictions.most_confused_classes(3, 2).tolist() == [1, 2]
    assert predictions.confusion_matrix(np.array([1, 2])).tolist() == [[0, 1], [1, 1]]
    assert [numbers.tolist() for numbers in predictions.count_correct(3)] == [[1, 0, 1], [2, 2, 2]]


def test_each_class_has_a_recall_of_its_own_by_a_name_that_mlflow_takes() -> None:
    classes = ["a/b", "a:b", "a_b_0", "..", ".", "c.d", "plain"]
    labels = np.arange(len(classes), dtype=np.int32)
    recalls = Predictions(labels, labels, np.ones(len(classes))).recalls(classes)
    assert list(recalls) == ["a_b_0_0", "a_b_1", "a_b_0", ".._3", "._4", "c.d", "plain"]


def test_twenty_thousand_classes_are_drawn_in_little_memory(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels, predicted = rng.integers(0, 20_000, (2, 100_000), np.int32)
    evaluation = SavedEvaluation(
        Predictions(labels, predicted, np.ones(100_000, np.float32)), [f"class {label}" for label in range(20_000)],
        np.empty(0, np.int64), np.empty((0, 3, 8, 8), np.uint8),
    )  # fmt: skip
    data_kib = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0])
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    # a confusion matrix of all classes has 3 GiB
    resource.setrlimit(resource.RLIMIT_DATA, ((data_kib << 10) + (256 << 20), limits[1]))
    try:
        for name in ("confusion", "classes", "reliability"):
            EVALUATION_FIGURES[name](tmp_path / f"{name}.png", evaluation, "step 1")
            assert (tmp_path / f"{name}.png").exists()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


def test_the_figures_need_only_the_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFolder(tmp_path)
    predictions = make_predictions()
    pixels = np.zeros((2, 3, 8, 8), np.uint8)
    save_evaluation(run, 12, SavedEvaluation(predictions, CLASSES, predictions.most_confident_mistakes(2), pixels))
    save_augmented(run, pixels, CLASSES[:2])
    saved = load_evaluation(run.report / "data" / "step-00000012.npz")
    assert saved.classes == CLASSES
    assert saved.mistakes.tolist() == [3, 4]
    rows = [{"time": 1, "step": step, "metrics": {"train/loss": 1 / step, "val/top1": 0.5}} for step in (1, 2, 3)]
    (tmp_path / "journal.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["report", str(tmp_path)]) == 0
    line = capsys.readouterr().out
    for name in ("curves", "confusion", "classes", "reliability", "mistakes", "augmentation"):
        with Image.open(run.report / f"{name}.png") as image:
            assert min(image.size) > 100
        assert f"{name}.png" in line
    path = run.report / "data" / "step-00000012.npz"
    path.write_bytes(path.read_bytes()[:100])
    assert main(["report", str(tmp_path)]) == 0
    assert "confusion.png cannot be drawn: step-00000012.npz is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"labels": np.zeros(70 << 20, np.int32)}, "it would unpack to 293,6"),
        ({"labels": np.full(10, 2**31 - 1, np.int32)}, "labels beyond its 3 classes"),  # 16 GiB of counts
        ({"predicted": np.full(10, -2, np.int32)}, "labels beyond its 3 classes"),
        ({"predicted": np.zeros(11, np.int32)}, "not those of an evaluation"),
        ({"confidence": np.zeros(10, "U8")}, "not those of an evaluation"),
        ({"confidence": np.full(10, np.nan)}, r"confidences outside 0\.\.1"),
        ({"classes": np.zeros(2_000_000, "V0").view("U0")}, "elements of no size"),
        ({"classes": np.zeros(2_000_000, "U1")}, "not those of an evaluation"),
        ({"classes": np.array([{}])}, "Object arrays cannot be loaded"),
        ({"shown": np.zeros(65, int), "pixels": np.zeros((65, 3, 1, 1), np.uint8)}, "65 mistakes"),
        ({"pixels": np.zeros((2, 3, 8, 8), np.uint8)}, r"1 mistakes and pixels of shape \(2, 3, 8, 8\)"),
        ({"shown": np.array([99])}, ""),
    ],
)
def test_a_hostile_evaluation_is_one_line_and_costs_no_memory(
    changed: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = np.arange(10, dtype=np.int32) % len(CLASSES)
    arrays = {
        "labels": labels, "predicted": labels, "confidence": np.ones(10, np.float32), "classes": np.array(CLASSES),
        "shown": np.array([3]), "pixels": np.zeros((1, 3, 8, 8), np.uint8),
    } | changed  # fmt: skip
    path = tmp_path / "report" / "data" / "step-00000012.npz"
    path.parent.mkdir(parents=True)
    np.savez_compressed(path, **arrays)
    (tmp_path / "journal.jsonl").write_text("")
    data_kib = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0])
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, ((data_kib << 10) + (512 << 20), limits[1]))
    try:
        if says:
            with pytest.raises(ValueError, match=f"step-00000012.npz is damaged .*{says}"):
                load_evaluation(path)
        assert main(["report", str(tmp_path)]) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mistakes.png")]
    assert "mistakes.png cannot be drawn: " in line


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


def test_curves_show_a_single_point_an_outlier_and_where_the_run_resumed(tmp_path: Path, drawn: list[Any]) -> None:
    journal = tmp_path / "journal.jsonl"
    rows = [{"time": 1, "step": step, "metrics": {"train/loss": 0.3, "train/lr": 0.1}} for step in range(1, 10)]
    rows += [{"time": 1, "step": step, "metrics": {"val/loss": loss}} for step, loss in ((5, 44.2), (9, 0.2))]
    rows += [{"time": 1, "step": 9, "metrics": {"val/top1": 0.5}}]
    rows += [{"time": 1, "event": "started", "step": step, "resumed": step > 0} for step in (0, 5)]
    journal.write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures.draw_curves(tmp_path / "curves.png", journal)
    loss, top1, rate = drawn[0].axes
    assert [axes.get_yscale() for axes in (loss, top1, rate)] == ["log", "linear", "linear"]
    curves = [line for axes in (loss, top1, rate) for line in axes.lines if line.get_label() != "resumed"]
    assert all(line.get_marker() == "." for line in curves)
    resumed = [line.get_xdata()[0] for line in loss.lines if line.get_label() == "resumed"]
    assert resumed == [5]
    assert not figures.spans_decades([44.2, 0.0, 0.1, 0.1]), "there is no logarithm of 0"
    assert not figures.spans_decades([2.3, 1.1, 0.5, 0.3]), "an ordinary loss"


def test_figures_say_what_their_numbers_are(tmp_path: Path, drawn: list[Any]) -> None:
    predictions = make_predictions()
    evaluation = SavedEvaluation(
        predictions, CLASSES, predictions.most_confident_mistakes(2), np.zeros((2, 3, 8, 8), np.uint8)
    )
    for draw in EVALUATION_FIGURES.values():
        draw(tmp_path / "figure.png", evaluation, "step 12")
    confusion, classes, reliability, mistakes = map(drawn_texts, drawn)
    assert {"true class", "predicted class", "1", *CLASSES} <= set(confusion)
    assert "confusion matrix, step 12\n6 images, counted in the cells" in confusion
    assert {"0/2", "1/2", *CLASSES} <= set(classes)
    assert {"calibrated", "reliability diagram, step 12\nexpected calibration error 0.4750, 15 bins"} <= set(
        reliability
    )
    assert {"predicted $10 (0.95)\ntrue naïve cat", "predicted $5 (0.60)\ntrue $10"} <= set(mistakes)


def test_names_that_no_font_has_are_drawn_as_labels_and_long_ones_are_cut(tmp_path: Path, drawn: list[Any]) -> None:
    predictions = make_predictions()
    classes = ["日本", "W" * 40, "i" * 200]
    evaluation = SavedEvaluation(
        predictions, classes, predictions.most_confident_mistakes(2), np.zeros((2, 3, 8, 8), np.uint8)
    )
    for draw in EVALUATION_FIGURES.values():
        draw(tmp_path / "figure.png", evaluation, "step 12")
    tile = Tile(np.zeros((3, 8, 8), np.uint8), figures.drawn_name("W" * 80, label=1))
    draw_contact_sheet(tmp_path / "figure.png", [tile] * 8, "a/long/path/日本/" * 30)
    fonts = figures._families("日本")
    name = "class 0" if fonts == ["DejaVu Sans"] else "日本"
    confusion, bars, *_ = map(drawn_texts, drawn)
    assert name in confusion
    assert name in bars
    for figure in (drawn[3], drawn[4]):
        figure.draw_without_rendering()
        boxes = [text.get_window_extent() for axes in figure.axes for text in axes.texts]
        for left, right in pairwise(sorted(boxes, key=lambda box: box.x0)):
            assert left.x1 <= right.x0
    assert drawn[4]._suptitle.get_window_extent().width <= drawn[4].bbox.width
    other = sorted(figures._characters("STIXGeneral") - figures._characters("DejaVu Sans"))[0]
    assert figures.drawn_name(other) == other, "another installed font has it"
