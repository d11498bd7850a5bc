"""Figures of a run, drawn from its folder alone, for `report/` and for MLflow.

Promise: training never draws. matplotlib is imported inside the functions, which run in a process
beside the training (MLflow's sender) or after it (`pipeline report`). A figure that cannot be drawn
does not keep the others from being drawn.
"""

import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.addons.report import evaluations
from pipeline.addons.report.evaluations import SavedEvaluation
from pipeline.errors import one_line, shorten
from pipeline.record.folder import RunFolder
from pipeline.record.journal import read
from pipeline.record.predictions import CONFIDENCE_UNIT

_CURVES = (("loss", "loss"), ("top-1 accuracy", "top1"), ("learning rate", "lr"))
"""(title, metric) of each plot: train/METRIC and val/METRIC."""
_MAX_NUMBERS = 20  # classes whose confusion matrix has room for numbers
_MAX_NAMES = 30  # classes whose names fit on an axis
_MAX_BARS = 40  # classes in the bar chart
_MAX_MATRIX = 200  # classes in the confusion matrix; of more, the most confused ones
_NAME_CHARACTERS = 24  # of a class's name
_CAPTION_CHARACTERS = 14  # of a class's name below a small image, beside other words
_TITLE_CHARACTERS = 70
_SHEET_COLUMNS = 8
_TILE_INCHES = 1.4


def draw_report(folder: RunFolder, log: Callable[[str], None]) -> list[Path]:
    """Draw every figure that the folder has data for into `report/`, and return the files.

    Each is drawn in a temporary folder, so that `report/` changes only after a check of the lock.
    """
    report = folder.report
    report.mkdir(exist_ok=True)
    draws: dict[str, Callable[[Path], None]] = {"curves": partial(draw_curves, journal=folder.journal)}
    if (report / "data" / evaluations.AUGMENTED_FILE).exists():
        draws["augmentation"] = partial(draw_augmentation, report=report)
    if saved := evaluations.saved_evaluations(report):
        draws |= {name: partial(draw_evaluation, name, saved[-1]) for name in EVALUATION_FIGURES}
    paths = []
    for name, draw in draws.items():
        path = report / f"{name}.png"
        try:
            with tempfile.TemporaryDirectory() as scratch:
                drawn = Path(scratch) / path.name
                draw(drawn)
                if drawn.exists():  # without mistakes there is no figure of them
                    folder.write(path, drawn.read_bytes())
        except Exception as error:  # whatever is damaged: the rest is drawn
            log(f"{path.name} cannot be drawn: {one_line(error, 300) or type(error).__name__}")
        else:
            paths += [path] if path.exists() else []
    return paths


def draw_curves(path: Path, journal: Path) -> None:
    """Draw loss, top-1 accuracy and learning rate by step, and mark where the run resumed."""
    from matplotlib.ticker import MaxNLocator

    points: dict[str, dict[int, float]] = defaultdict(dict)
    resumes: set[int] = set()
    last = 0
    for row, _ in read(journal):
        for key, value in row.get("metrics", {}).items():
            points[key][row["step"]] = value
        if row.get("event") == "started":
            resumes |= {row["step"]} if row["resumed"] else set()
            last = row["step"]
        last = max(last, row.get("step", 0))
    figure = _figure(10, 3)
    for axes, (title, metric) in zip(figure.subplots(1, len(_CURVES)), _CURVES, strict=True):
        for split, label in (("train", "training"), ("val", "validation")):
            # steps after the last one were discarded by a restart, and are not trained again yet
            curve = [point for point in sorted(points[f"{split}/{metric}"].items()) if point[0] <= last]
            if curve:
                axes.plot(*zip(*curve, strict=True), marker=".", linewidth=1.2, label=label)
        for number, step in enumerate(sorted(resumes)):
            label = "" if number else "resumed"
            axes.axvline(step, color="gray", linestyle="--", linewidth=0.8, label=label, zorder=1)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def draw_augmentation(path: Path, report: Path) -> None:
    """Draw the first training images as augmentation changed them."""
    pixels, captions = evaluations.load_augmented(report)
    tiles = list(map(Tile, pixels, map(drawn_name, captions)))
    draw_contact_sheet(path, tiles, "the first training images, as the model sees them")


def draw_evaluation(name: str, saved: Path, path: Path) -> None:
    """Draw the figure `name` of the evaluation in `saved`. Raises ValueError if that is damaged."""
    step = evaluations.step_of_evaluation(saved)
    EVALUATION_FIGURES[name](path, evaluations.load_evaluation(saved), f"step {step:,}")


def draw_confusion(path: Path, evaluation: SavedEvaluation, title: str) -> None:
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
    norm = PowerNorm(1 if has_numbers else 0.5, 0, 1)
    figure.colorbar(
        axes.imshow(shares, cmap="Blues", norm=norm), label="share of the true class's images", shrink=0.8
    )
    part = f" of the worst {len(shown)} of {num_classes:,} classes" if len(shown) < num_classes else ""
    axes.set_title(f"confusion matrix{part}, {title}\n{images[shown].sum():,} images", fontsize=10)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    ticks = range(0, len(shown), -(-len(shown) // _MAX_NAMES))
    names = [drawn_name(evaluation.classes[shown[tick]], int(shown[tick])) for tick in ticks]
    axes.set_xticks(ticks, names, rotation=90, **_style(7))
    axes.set_yticks(ticks, names, **_style(7))
    if has_numbers:
        for row, column in np.argwhere(numbers):
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(
                column, row, f"{numbers[row, column]:,}", ha="center", va="center", color=colour, fontsize=8
            )
    figure.savefig(path, dpi=120)


def draw_classes(path: Path, evaluation: SavedEvaluation, title: str) -> None:
    """Draw the accuracy of each class that has images; of many classes the worst ones."""
    num_classes = len(evaluation.classes)
    recalls = evaluation.predictions.lowest_recalls(num_classes, num_classes)
    shown = recalls[:_MAX_BARS][::-1]
    figure = _figure(6.5, 0.9 + 0.2 * len(shown))
    axes = figure.subplots()
    bars = axes.barh(range(len(shown)), [correct / images for _, correct, images in shown])
    axes.bar_label(bars, [f"{correct:,}/{images:,}" for _, correct, images in shown], padding=3, fontsize=7)
    axes.set_yticks(
        range(len(shown)), [drawn_name(evaluation.classes[row[0]], row[0]) for row in shown], **_style(7)
    )
    axes.set_xlim(0, 1.15)
    axes.set_xlabel("correct images / images of the class", fontsize=8)
    part = (
        f"the worst {len(shown)} of {len(recalls):,} classes" if len(shown) < len(recalls) else "each class"
    )
    if len(recalls) < num_classes:
        part += f" with images ({len(recalls):,} of {num_classes:,})"
    axes.set_title(f"top-1 accuracy of {part}, {title}", fontsize=10)
    figure.savefig(path, dpi=120)


def draw_reliability(path: Path, evaluation: SavedEvaluation, title: str) -> None:
    """Draw the accuracy of each bin of confidences beside its mean confidence, and its images."""
    images, correct, confidence = evaluation.predictions.calibration()
    used = np.flatnonzero(images)
    centres, width = (used + 0.5) / len(images), 0.9 / len(images)
    accuracy = correct[used] / images[used]
    figure = _figure(5, 5)
    above, below = figure.subplots(2, 1, height_ratios=(3, 1), sharex=True)
    above.plot((0, 1), (0, 1), color="gray", linestyle="--", linewidth=0.8, label="calibrated")
    above.bar(centres, accuracy, width=width, label="accuracy")
    mean_confidence = confidence[used] / CONFIDENCE_UNIT / images[used]
    above.plot(
        mean_confidence, accuracy, "o", color="tab:orange", markersize=4, label="at its mean confidence"
    )
    above.set_ylabel("correct images / images", fontsize=8)
    above.set_ylim(0, 1.02)
    above.legend(fontsize=8, loc="upper left")
    error = evaluation.predictions.calibration_error()
    number = "" if error is None else f"\nexpected calibration error {error:.4f}, {len(images)} bins"
    above.set_title(f"reliability diagram, {title}{number}", fontsize=10)
    below.bar(centres, images[used], width=width, color="gray")
    below.set_yscale("log")
    below.set_ylabel("images (log)", fontsize=8)
    below.set_xlabel("confidence: the probability of the predicted class", fontsize=8)
    below.set_xlim(0, 1)
    figure.savefig(path, dpi=120)


def draw_mistakes(path: Path, evaluation: SavedEvaluation, title: str) -> None:
    """Draw the most confident mistakes, or write no file if there are none."""
    tiles = []
    for pixels, *labels, confidence in evaluations.shown_mistakes(evaluation):
        predicted, true = (
            drawn_name(evaluation.classes[label], label, _CAPTION_CHARACTERS) for label in labels
        )
        tiles.append(Tile(pixels, f"predicted {predicted} ({confidence:.2f})\ntrue {true}"))
    if tiles:
        draw_contact_sheet(path, tiles, f"most confident mistakes (probability of the wrong class), {title}")


class Tile(NamedTuple):
    pixels: NDArray[np.uint8]
    """[3, H, W]."""
    caption: str


def draw_contact_sheet(file: Path | BinaryIO, tiles: list[Tile], title: str = "") -> None:
    """Write images in a grid, each with its caption below, as a PNG file. Raises OSError."""
    columns = min(_SHEET_COLUMNS, max(4, len(tiles)))  # narrower ones have no room for the title
    rows = -(-len(tiles) // columns)
    figure = _figure(columns * _TILE_INCHES, rows * (_TILE_INCHES + 0.25) + 0.3)
    if title:
        figure.suptitle(drawn_name(title, width=_TITLE_CHARACTERS), **_style(9))
    cells = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in cells:
        axes.axis("off")
    for axes, tile in zip(cells, tiles, strict=False):
        axes.imshow(tile.pixels.transpose(1, 2, 0))
        axes.text(0.5, -0.04, tile.caption, transform=axes.transAxes, ha="center", va="top", **_style(6))
    figure.savefig(file, dpi=120)


EVALUATION_FIGURES: dict[str, Callable[[Path, SavedEvaluation, str], None]]
EVALUATION_FIGURES = {
    "confusion": draw_confusion, "classes": draw_classes, "reliability": draw_reliability, "mistakes": draw_mistakes,
}  # fmt: skip
"""The figures of one evaluation: name -> function of (file to write, evaluation, end of title)."""


def drawn_name(name: str, label: int | None = None, width: int = _NAME_CHARACTERS) -> str:
    """Return a name as it is drawn: at most `width` characters, all of which the font has.

    A class whose name has others is drawn as `class 3`, by its label; other text is escaped.
    """
    name = " ".join(name.split())
    if not _drawable().issuperset(name):
        name = ascii(name)[1:-1] if label is None else f"class {label}"
    return shorten(name, width)


def _style(size: float) -> dict[str, Any]:
    return {"fontsize": size, "fontfamily": "DejaVu Sans", "parse_math": False}  # a class may be called $5


@cache
def _drawable() -> frozenset[str]:
    """Return the characters of DejaVu Sans, which is part of matplotlib."""
    from matplotlib.font_manager import FontProperties, findfont
    from matplotlib.ft2font import FT2Font

    return frozenset(map(chr, FT2Font(findfont(FontProperties("DejaVu Sans"))).get_charmap()))


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure((width, height), layout="constrained")
