"""Figures of a run, drawn from its folder alone, for `report/` and for MLflow.

Promise: training never draws. matplotlib is imported inside the functions, which run in a process
beside the training (MLflow's sender) or after it (`pipeline report`). A figure that cannot be drawn
does not keep the others from being drawn.
"""

import io
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.addons.report import evaluations
from pipeline.addons.report.evaluations import SavedEvaluation
from pipeline.addons.report.predictions import ClassPrecisions
from pipeline.errors import one_line
from pipeline.record.folder import RunFolder
from pipeline.record.journal import read
from pipeline.train.evaluation import CONFIDENCE_UNIT

_MAX_NUMBERS = 20  # classes whose confusion matrix has room for numbers
_MAX_NAMES = 30  # classes whose names fit on an axis
_MAX_BARS = 40  # classes in the bar chart
_MAX_MATRIX = 200  # classes in the confusion matrix; of more, the most confused ones
_NAMES = {"fontsize": 7, "fontfamily": "DejaVu Sans", "parse_math": False}  # a class may be called $5


def draw_report(folder: RunFolder, log: Callable[[str], None]) -> list[Path]:
    """Draw every figure that the folder has data for into `report/`, and return the files."""
    folder.report.mkdir(exist_ok=True)
    draws: dict[str, Callable[[], bytes]] = {"curves": lambda: draw_curves(folder.journal)}
    if saved := evaluations.saved_evaluations(folder.report):
        draws |= {name: partial(draw_evaluation, name, saved[-1]) for name in EVALUATION_FIGURES}
    paths = {name: folder.report / f"{name}.png" for name in draws}
    for name, draw in draws.items():
        try:
            if png := draw():
                folder.write(paths[name], png)
        except Exception as error:  # whatever is damaged: the rest is drawn
            log(f"{name}.png cannot be drawn: {one_line(error, 300) or type(error).__name__}")
    return [path for path in paths.values() if path.exists()]


def draw_curves(journal: Path) -> bytes:
    """Draw loss, top-1 or mAP, and learning rate by step, and mark where the run resumed."""
    points: dict[str, dict[int, float]] = defaultdict(dict)
    resumes: list[int] = []
    last = 0
    for row, _ in read(journal):
        for key, value in row.get("metrics", {}).items():
            points[key][row["step"]] = value
        if row.get("event") == "started":
            resumes += [row["step"]] if row["resumed"] else []
            last = row["step"]
        last = max(last, row.get("step", 0))
    figure = _figure(10, 3)
    accuracy = ("mean average precision", "map") if points["val/map"] else ("top-1 accuracy", "top1")
    curves = ("loss", "loss"), accuracy, ("learning rate", "lr")  # of train/METRIC and val/METRIC
    for axes, (title, metric) in zip(figure.subplots(1, len(curves)), curves, strict=True):
        for split, label in (("train", "training"), ("val", "validation")):
            # steps after the last one were discarded by a restart, and are not trained again yet
            curve = [point for point in sorted(points[f"{split}/{metric}"].items()) if point[0] <= last]
            if curve:
                axes.plot(*zip(*curve, strict=True), marker=".", linewidth=1.2, label=label)
        for number, step in enumerate(resumes):
            label = "" if number else "resumed"
            axes.axvline(step, color="gray", linestyle="--", linewidth=0.8, label=label, zorder=1)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    return _png(figure)


def draw_evaluation(name: str, saved: Path) -> bytes:
    """Draw the figure `name` of the evaluation in `saved`. Raises ValueError if that is damaged.

    With several labels a picture it is b"", but for the figure of each class.
    """
    step, evaluation = evaluations.step_of_evaluation(saved), evaluations.load_evaluation(saved)
    if name != "classes" and isinstance(evaluation.predictions, ClassPrecisions):
        return b""
    return EVALUATION_FIGURES[name](evaluation, f"step {step:,}")


def draw_confusion(evaluation: SavedEvaluation, title: str) -> bytes:
    """Draw the confusion matrix as shares of each class; of many classes the most confused ones.

    The cells of a small matrix have the numbers of images. In a large one, colours grow with the
    square root of the share, so that a few mistakes can be seen.
    """
    from matplotlib.colors import PowerNorm

    predictions, num_classes = evaluation.predictions, len(evaluation.classes)
    shown = evaluations.most_confused_classes(predictions, num_classes, _MAX_MATRIX)
    _, images = predictions.count_correct(num_classes)
    numbers = evaluations.confusion_matrix(predictions, shown)
    shares = numbers / np.maximum(1, images[shown, None])
    has_numbers = len(shown) <= _MAX_NUMBERS
    figure = _figure(6.5, 6)
    axes = figure.subplots()
    colours = axes.imshow(shares, cmap="Blues", norm=PowerNorm(1 if has_numbers else 0.5, 0, 1))
    figure.colorbar(colours, label="share of the true class's images", shrink=0.8)
    part = f" of the worst {len(shown)} of {num_classes:,} classes" if len(shown) < num_classes else ""
    axes.set_title(f"confusion matrix{part}, {title}\n{images[shown].sum():,} images", fontsize=10)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    ticks = range(0, len(shown), -(-len(shown) // _MAX_NAMES))
    names = [drawn_name(evaluation.classes[shown[tick]], int(shown[tick])) for tick in ticks]
    axes.set_xticks(ticks, names, rotation=90, **_NAMES)
    axes.set_yticks(ticks, names, **_NAMES)
    if has_numbers:
        for row, column in np.argwhere(numbers):
            style = {"color": "white" if shares[row, column] > 0.5 else "black", "fontsize": 8}
            axes.text(column, row, f"{numbers[row, column]:,}", ha="center", va="center", **style)
    return _png(figure)


def draw_classes(evaluation: SavedEvaluation, title: str) -> bytes:
    """Draw the accuracy of each class that has images; of many classes the worst ones.

    With several labels a picture it is the average precision.
    """
    found = evaluation.predictions
    if isinstance(found, ClassPrecisions):
        images, shares, texts = found.images, found.precisions, [f"{count:,}" for count in found.images]
        name, axis = "average precision", "average precision, and images of the class"
    else:
        correct, images = found.count_correct(len(evaluation.classes))
        shares = correct / np.maximum(1, images)
        texts = [f"{right:,}/{count:,}" for right, count in zip(correct, images, strict=True)]
        name, axis = "top-1 accuracy", "correct images / images of the class"
    known = np.flatnonzero(images)
    shown = known[np.argsort(shares[known], kind="stable")][:_MAX_BARS][::-1].tolist()
    figure = _figure(6.5, 0.9 + 0.2 * len(shown))
    axes = figure.subplots()
    bars = axes.barh(range(len(shown)), shares[shown])
    axes.bar_label(bars, [texts[label] for label in shown], padding=3, fontsize=7)
    names = [drawn_name(evaluation.classes[label], label) for label in shown]
    axes.set_yticks(range(len(shown)), names, **_NAMES)
    axes.set_xlim(0, 1.15)
    axes.set_xlabel(axis, fontsize=8)
    part = f"the worst {len(shown)} of {len(known):,} classes" if len(shown) < len(known) else "each class"
    axes.set_title(f"{name} of {part}, {title}", fontsize=10)
    return _png(figure)


def draw_reliability(evaluation: SavedEvaluation, title: str) -> bytes:
    """Draw the accuracy of each bin of confidences beside its mean confidence, and its images."""
    images, correct, confidence = evaluation.predictions.calibration()
    used = np.flatnonzero(images)
    centres, width = (used + 0.5) / len(images), 0.9 / len(images)
    accuracy = correct[used] / images[used]
    mean_confidence = confidence[used] / CONFIDENCE_UNIT / images[used]
    figure = _figure(5, 5)
    above, below = figure.subplots(2, 1, height_ratios=(3, 1), sharex=True)
    above.plot((0, 1), (0, 1), color="gray", linestyle="--", linewidth=0.8, label="calibrated")
    above.bar(centres, accuracy, width=width, label="accuracy")
    style = {"color": "tab:orange", "markersize": 4, "label": "at its mean confidence"}
    above.plot(mean_confidence, accuracy, "o", **style)
    above.set_ylabel("correct images / images", fontsize=8)
    above.legend(fontsize=8, loc="upper left")
    error = evaluation.predictions.calibration_error()
    number = "" if error is None else f"\nexpected calibration error {error:.4f}, {len(images)} bins"
    above.set_title(f"reliability diagram, {title}{number}", fontsize=10)
    below.bar(centres, images[used], width=width, color="gray")
    below.set_yscale("log")
    below.set_ylabel("images (log)", fontsize=8)
    below.set_xlabel("confidence: the probability of the predicted class", fontsize=8)
    return _png(figure)


EVALUATION_FIGURES = {"confusion": draw_confusion, "classes": draw_classes, "reliability": draw_reliability}
"""The figures of one evaluation: functions of it and of the end of a title that return a PNG."""


def drawn_name(name: str, label: int) -> str:
    """Return the name of a class as it is drawn, in characters that the font has.

    A class whose name has others is drawn as `class 3`, by its label.
    """
    line = " ".join(name.split())
    if not _drawable().issuperset(line):
        return f"class {label}"
    return line if len(line) <= 24 else f"{line[:23]}…"


@cache
def _drawable() -> frozenset[str]:
    """Return the characters of DejaVu Sans, which is part of matplotlib."""
    from matplotlib.font_manager import FontProperties, findfont
    from matplotlib.ft2font import FT2Font

    return frozenset(map(chr, FT2Font(findfont(FontProperties("DejaVu Sans"))).get_charmap()))


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure((width, height), layout="constrained")


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120)
    return buffer.getvalue()
