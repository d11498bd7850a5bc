"""Figures of a run, drawn from its folder alone, for `report/` and for MLflow.

Promise: training never draws. matplotlib is imported inside the functions, which run in a process
beside the training (MLflow's sender) or after it (`pipeline report`). A figure that cannot be drawn
does not keep the others from being drawn.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.record import predictions
from pipeline.record.folder import RunFolder
from pipeline.record.journal import read
from pipeline.record.predictions import SavedEvaluation

_CURVES = (
    ("loss", ("train/loss", "val/loss")),
    ("top-1", ("train/top1", "val/top1")),
    ("learning rate", ("train/lr",)),
)
_MAX_NAMES = 30  # classes whose names fit on an axis
_NAME_STYLE: dict[str, Any] = {"fontsize": 7, "parse_math": False}  # a class may be called $5
_MAX_BARS = 40  # classes in the bar chart
# classes up to which the whole confusion matrix is drawn: a cell takes 75 bytes beside the training
_FULL_MATRIX = 1000
_SHEET_COLUMNS = 8
_TILE_INCHES = 1.3
_PARTIAL_MATRIX = 200  # classes in the matrix if there are more


def draw_report(folder: RunFolder, log: Callable[[str], None]) -> list[Path]:
    """Draw every figure that the folder has data for into `report/`, and return the files."""
    report = folder.report
    report.mkdir(exist_ok=True)
    draws: dict[str, Callable[[Path], None]] = {"curves": partial(draw_curves, journal=folder.journal)}
    if (report / "data" / predictions.AUGMENTED_FILE).exists():
        draws["augmentation"] = partial(draw_augmentation, report=report)
    evaluations = predictions.saved_evaluations(report)
    if evaluations:
        draws |= {name: partial(draw_evaluation, name, evaluations[-1]) for name in EVALUATION_FIGURES}
    paths = []
    for name, draw in draws.items():
        path = report / f"{name}.png"
        try:
            draw(path)
        except (OSError, ValueError, KeyError) as error:
            log(f"{path.name} cannot be drawn: {error}")
        else:
            paths += [path] if path.exists() else []  # without mistakes there is no figure of them
    return paths


def draw_curves(path: Path, journal: Path) -> None:
    """Draw loss, top-1 accuracy and learning rate by step."""
    points: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row, _ in read(journal):
        for key, value in row.get("metrics", {}).items():
            points[key].append((row["step"], value))
    figure = _figure(10, 3)
    for axes, (title, keys) in zip(figure.subplots(1, len(_CURVES)), _CURVES, strict=True):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        for key in keys:
            if points[key]:
                axes.plot(*zip(*points[key], strict=True), marker="." if key.startswith("val/") else "", label=key)
        if axes.lines:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def draw_augmentation(path: Path, report: Path) -> None:
    """Draw the first training images as augmentation changed them."""
    pixels, captions = predictions.load_augmented(report)
    draw_contact_sheet(path, list(map(Tile, pixels, captions)), "the first training images, as the model sees them")


def draw_evaluation(name: str, saved: Path, path: Path) -> None:
    """Draw the figure `name` of the evaluation in `saved`. Raises ValueError if that is damaged."""
    step = predictions.step_of_evaluation(saved)
    EVALUATION_FIGURES[name](path, predictions.load_evaluation(saved), f"step {step:,}")


def draw_confusion(path: Path, evaluation: SavedEvaluation, title: str) -> None:
    """Draw the confusion matrix as shares of each class; of many classes the most confused ones."""
    num_classes = len(evaluation.classes)
    count = _PARTIAL_MATRIX if num_classes > _FULL_MATRIX else num_classes
    shown = evaluation.predictions.most_confused_classes(num_classes, count)
    _, images = evaluation.predictions.count_correct(num_classes)
    shares = evaluation.predictions.confusion_matrix(shown) / np.maximum(1, images[shown, None])
    figure = _figure(6, 5.5)
    axes = figure.subplots()
    figure.colorbar(axes.imshow(shares, cmap="Blues", vmin=0, vmax=1), label="share of the class")
    is_partial = len(shown) < num_classes
    part = f" of the worst {len(shown)} of {num_classes:,} classes" if is_partial else ""
    axes.set_title(f"confusion{part}, {title}", fontsize=10)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    if num_classes <= _MAX_NAMES or is_partial:
        ticks = range(0, len(shown), -(-len(shown) // _MAX_NAMES))
        names = [evaluation.classes[shown[tick]] for tick in ticks]
        axes.set_xticks(ticks, names, rotation=90, **_NAME_STYLE)
        axes.set_yticks(ticks, names, **_NAME_STYLE)
    figure.savefig(path, dpi=120)


def draw_classes(path: Path, evaluation: SavedEvaluation, title: str) -> None:
    """Draw the accuracy of each class; of many classes the worst ones."""
    correct, images = evaluation.predictions.count_correct(len(evaluation.classes))
    accuracy = correct / np.maximum(1, images)
    order = np.argsort(accuracy, kind="stable")[:_MAX_BARS][::-1]
    figure = _figure(6, 0.6 + 0.2 * len(order))
    axes = figure.subplots()
    axes.barh(range(len(order)), accuracy[order])
    axes.set_yticks(range(len(order)), [evaluation.classes[label] for label in order], **_NAME_STYLE)
    axes.set_xlim(0, 1)
    part = f"the worst {len(order)} of {len(accuracy):,} classes" if len(order) < len(accuracy) else "each class"
    axes.set_title(f"top-1 of {part}, {title}", fontsize=10)
    figure.savefig(path, dpi=120)


def draw_mistakes(path: Path, evaluation: SavedEvaluation, title: str) -> None:
    """Draw the most confident mistakes, or write no file if there are none."""
    if not len(evaluation.mistakes):
        return
    classes, all_images = evaluation.classes, evaluation.predictions
    tiles = []
    for image, pixels in zip(evaluation.mistakes, evaluation.pixels, strict=True):
        predicted, label = classes[all_images.predicted[image]], classes[all_images.labels[image]]
        tiles.append(Tile(pixels, f"{predicted} {all_images.confidence[image]:.2f}\nis {label}"))
    draw_contact_sheet(path, tiles, f"most confident mistakes, {title}")


class Tile(NamedTuple):
    pixels: NDArray[np.uint8]
    """[3, H, W]."""
    caption: str


def draw_contact_sheet(path: Path, tiles: list[Tile], title: str = "") -> None:
    """Write images in a grid, each with its caption below, as a PNG file. Raises OSError."""
    columns = min(_SHEET_COLUMNS, len(tiles))
    rows = -(-len(tiles) // columns)
    figure = _figure(columns * _TILE_INCHES, rows * (_TILE_INCHES + 0.35) + 0.4)
    if title:
        figure.suptitle(title, fontsize=9)
    cells = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in cells:
        axes.axis("off")
    for axes, tile in zip(cells, tiles, strict=False):
        axes.imshow(tile.pixels.transpose(1, 2, 0))
        below = {"transform": axes.transAxes, "ha": "center", "va": "top"}
        axes.text(0.5, -0.04, tile.caption, fontsize=6, parse_math=False, **below)
    figure.savefig(path, dpi=120)


EVALUATION_FIGURES: dict[str, Callable[[Path, SavedEvaluation, str], None]]
EVALUATION_FIGURES = {"confusion": draw_confusion, "classes": draw_classes, "mistakes": draw_mistakes}
"""The figures of one evaluation: name -> function of (file to write, evaluation, end of title)."""


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure((width, height), layout="constrained")
