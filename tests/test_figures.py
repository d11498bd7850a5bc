"""Figures of a run are drawn from its folder alone, whatever its classes are called."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image

from pipeline.addons.report import evaluations, figures
from pipeline.addons.report.evaluations import SavedEvaluation, save_evaluation
from pipeline.addons.report.figures import EVALUATION_FIGURES
from pipeline.addons.report.predictions import Predictions
from pipeline.cli.main import main
from pipeline.record.folder import RunFolder

# seven images, one of which cannot be decoded
PREDICTIONS = Predictions(
    np.array([0, 1, 2, 2, 1, -1, 0], np.int32),
    np.array([0, 2, 2, 1, 0, 1, 2], np.int32),
    np.array([0.9, 0.4, 0.8, 0.95, 0.6, 0.99, 0.6], np.float32),
)


def evaluation(predictions: Predictions, classes: list[str]) -> SavedEvaluation:
    return SavedEvaluation(predictions, classes, np.empty(0, np.int64), np.empty((0, 3, 8, 8), np.uint8))


def test_mistakes_are_sorted_by_confidence_and_confusion_counts_each_image_once() -> None:
    # most confident first, equal ones in order; a bad image is no mistake
    assert evaluations.most_confident_mistakes(PREDICTIONS, 3).tolist() == [3, 4, 6]
    matrix = evaluations.confusion_matrix(PREDICTIONS, np.arange(3))
    assert matrix.tolist() == [[1, 0, 1], [1, 0, 1], [0, 1, 1]]
    # class 0 has one false negative and one false positive
    assert evaluations.most_confused_classes(PREDICTIONS, 3, 2).tolist() == [1, 2]
    assert evaluations.confusion_matrix(PREDICTIONS, np.array([1, 2])).tolist() == [[0, 1], [1, 1]]
    assert evaluations.most_frequent_confusions(PREDICTIONS, 1) == [(0, 2, 1)]
    assert [numbers.tolist() for numbers in PREDICTIONS.count_correct(3)] == [[1, 0, 1], [2, 2, 2]]


def test_the_figures_need_only_the_run_folder_and_a_damaged_evaluation_keeps_no_other_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "is not the folder of a run that has started" in capsys.readouterr().err
    run = RunFolder(tmp_path)
    save_evaluation(run, 12, evaluation(PREDICTIONS, ["a", "b", "c"]))
    run.journal.write_text('{"time": 1, "step": 3, "metrics": {"train/loss": 0.5, "val/top1": 0.5}}\n')
    assert main(["report", str(tmp_path)]) == 0
    for name in ("curves", *EVALUATION_FIGURES):
        with Image.open(run.report / f"{name}.png") as image:
            assert min(image.size) > 100

    saved = run.report / "data" / "step-00000012.npz"
    whole = saved.read_bytes()
    for damage in (lambda: saved.write_bytes(whole[:100]), lambda: np.savez(saved, labels=np.array([{}]))):
        damage()
        capsys.readouterr()
        assert main(["report", str(tmp_path)]) == 0
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == len(EVALUATION_FIGURES)
        assert all("cannot be drawn: step-00000012.npz is damaged" in line for line in lines)


def test_figures_say_what_their_numbers_are_with_any_name_and_number_of_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[Any] = []
    make = figures._figure
    monkeypatch.setattr(figures, "_figure", lambda *size: drawn.append(make(*size)) or drawn[-1])
    for draw in EVALUATION_FIGURES.values():
        draw(evaluation(PREDICTIONS, ["$5", "日本", "i" * 200]), "step 12")
    confusion, classes, reliability = [{text.get_text() for text in figure.findobj(Text)} for figure in drawn]
    names = {"$5", "class 1", "i" * 23 + "…"}
    assert {"true class", "predicted class", "1", *names} <= confusion
    assert {"0/2", "1/2", *names} <= classes
    assert any("expected calibration error 0.4750, 15 bins" in text for text in reliability)

    labels, predicted = np.random.default_rng(0).integers(0, 20_000, (2, 100_000), np.int32)
    many = Predictions(labels, predicted, np.ones(100_000, np.float32))
    for draw in EVALUATION_FIGURES.values():
        assert draw(evaluation(many, [f"class {label}" for label in range(20_000)]), "step 1")


def test_each_class_has_a_recall_of_its_own_by_a_name_that_mlflow_takes() -> None:
    classes = ["a/b", "a:b", "..", ".", "c.d", "plain"]
    labels = np.arange(len(classes), dtype=np.int32)
    recalls = Predictions(labels, labels, np.ones(len(classes))).by_class(classes)
    assert list(recalls) == [f"recall/{name}" for name in ("a_b_0", "a_b_1", ".._2", "._3", "c.d", "plain")]
