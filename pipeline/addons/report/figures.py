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

from pipeline.errors import one_line, shorten
from pipeline.record import predictions
from pipeline.record.folder import RunFolder
from pipeline.record.journal import read
from pipeline.record.predictions import SavedEvaluation

_CURVES = (("loss", "loss"), ("top-1 accuracy", "top1"), ("learning rate", "lr"))
"""(title, metric) of each plot: train/METRIC and val/METRIC."""
_STYLES = {"train": ("training", "tab:blue", 5), "val": ("validation", "tab:orange", 8)}
"""Label, colour and size of the markers of each curve: a marker shows a single point, too."""
_LOG_FROM = 30
"""Largest value / median from which an axis is logarithmic.

A linear axis would show half of the points in its lowest 3 %.
"""
_MAX_NUMBERS = 20  # classes whose confusion matrix has room for numbers
_MAX_NAMES = 30  # classes whose names fit on an axis
_FONT = "DejaVu Sans"  # part of matplotlib
_NAME_EMS = 15  # width of a name on an axis, in units of the font's size
_MISTAKE_EMS, _CAPTION_EMS = 7.5, 13  # of a name below a small image, beside other words or almost alone
_MAX_BARS = 40  # classes in the bar chart
# classes up to which the whole confusion matrix is drawn: a cell takes 75 bytes beside the training
_FULL_MATRIX = 1000
_PARTIAL_MATRIX = 200  # classes in the matrix if there are more
_SHEET_COLUMNS = 8
_TILE_INCHES = 1.4


def draw_report(folder: RunFolder, log: Callable[[str], None]) -> list[Path]:
    """Draw every figure that the folder has data for into `report/`, and return the files.

    Each is drawn in a temporary folder, so that `report/` changes only after a check of the lock.
    """
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
            with tempfile.TemporaryDirectory() as scratch:
                drawn = Path(scratch) / path.name
                draw(drawn)
                data = drawn.read_bytes() if drawn.exists() else b""
            if data:
                folder.write(path, data)
        except Exception as error:  # whatever is damaged: the rest is drawn
            log(f"{path.name} cannot be drawn: {one_line(error, 300) or type(error).__name__}")
        else:
            paths += [path] if path.exists() else []  # without mistakes there is no figure of them
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
        found = {name: sorted(points[f"{name}/{metric}"].items()) for name in _STYLES}
        # steps after the last one were discarded by a restart, and are not trained again yet
        curves = {name: shown for name in found if (shown := [point for point in found[name] if point[0] <= last])}
        for name, curve in curves.items():
            label, colour, size = _STYLES[name]
            axes.plot(*zip(*curve, strict=True), color=colour, marker=".", markersize=size, linewidth=1.2, label=label)
        is_log = spans_decades([value for curve in curves.values() for _, value in curve])
        axes.set_yscale("log" if is_log else "linear")
        axes.set_title(f"{title} (log scale)" if is_log else title, fontsize=10)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
        axes.grid(alpha=0.3)
        for number, step in enumerate(sorted(resumes)):
            label = "" if number else "resumed"
            axes.axvline(step, color="gray", linestyle="--", linewidth=0.8, label=label, zorder=1)
        if curves:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def spans_decades(values: list[float]) -> bool:
    """Return True if a linear axis would flatten the curve of these values."""
    return bool(values) and min(values) > 0 and max(values) > _LOG_FROM * float(np.median(values))


def draw_augmentation(path: Path, report: Path) -> None:
    """Draw the first training images as augmentation changed them."""
    pixels, captions = predictions.load_augmented(report)
    names = [drawn_name(caption, _CAPTION_EMS) for caption in captions]
    draw_contact_sheet(path, list(map(Tile, pixels, names)), "the first training images, as the model sees them")


def draw_evaluation(name: str, saved: Path, path: Path) -> None:
    """Draw the figure `name` of the evaluation in `saved`. Raises ValueError if that is damaged."""
    step = predictions.step_of_evaluation(saved)
    EVALUATION_FIGURES[name](path, predictions.load_evaluation(saved), f"step {step:,}")


def draw_confusion(path: Path, evaluation: SavedEvaluation, title: str) -> None:
    """Draw the confusion matrix as shares of each class; of many classes the most confused ones.

    The cells of a small matrix have the numbers of images. In a large one, colours grow with the
    square root of the share, so that a few mistakes can be seen.
    """
    from matplotlib.colors import PowerNorm

    num_classes = len(evaluation.classes)
    count = _PARTIAL_MATRIX if num_classes > _FULL_MATRIX else num_classes
    shown = evaluation.predictions.most_confused_classes(num_classes, count)
    _, images = evaluation.predictions.count_correct(num_classes)
    numbers = evaluation.predictions.confusion_matrix(shown)
    shares = numbers / np.maximum(1, images[shown, None])
    has_numbers = len(shown) <= _MAX_NUMBERS
    figure = _figure(6.5, 6)
    axes = figure.subplots()
    norm = PowerNorm(1 if has_numbers else 0.5, 0, 1)
    figure.colorbar(axes.imshow(shares, cmap="Blues", norm=norm), label="share of the true class's images", shrink=0.8)
    part = f" of the worst {len(shown)} of {num_classes:,} classes" if len(shown) < num_classes else ""
    meaning = ", counted in the cells" if has_numbers else ""
    axes.set_title(f"confusion matrix{part}, {title}\n{images[shown].sum():,} images{meaning}", fontsize=10)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    ticks = range(0, len(shown), -(-len(shown) // _MAX_NAMES))
    names = [drawn_name(evaluation.classes[shown[tick]], _NAME_EMS, int(shown[tick])) for tick in ticks]
    is_upright = max(map(len, names)) <= 3
    axes.set_xticks(ticks, names, rotation=0 if is_upright else 90, **_style(7, *names))
    axes.set_yticks(ticks, names, **_style(7, *names))
    if has_numbers:
        for row, column in np.argwhere(numbers):
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, f"{numbers[row, column]:,}", ha="center", va="center", color=colour, fontsize=8)
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
    names = [drawn_name(evaluation.classes[label], _NAME_EMS, label) for label, _, _ in shown]
    axes.set_yticks(range(len(shown)), names, **_style(7, *names))
    axes.set_ylim(-0.6, len(shown) - 0.4)
    axes.set_xlim(0, 1.15)
    axes.set_xticks(np.linspace(0, 1, 6))
    axes.set_xlabel("correct images / images of the class", fontsize=8)
    part = f"the worst {len(shown)} of {len(recalls):,} classes" if len(shown) < len(recalls) else "each class"
    if len(recalls) < num_classes:
        part += f" with images ({len(recalls):,} of {num_classes:,})"
    axes.set_title(f"top-1 accuracy of {part}, {title}", fontsize=10)
    figure.savefig(path, dpi=120)


def draw_reliability(path: Path, evaluation: SavedEvaluation, title: str) -> None:
    """Draw the accuracy of each bin of confidences beside its mean confidence, and its images."""
    images, correct, confidence = evaluation.predictions.calibration()
    used = np.flatnonzero(images)
    bins = len(images)
    accuracy = correct[used] / images[used]
    mean_confidence = confidence[used] / predictions.CONFIDENCE_UNIT / images[used]
    figure = _figure(5, 5)
    above, below = figure.subplots(2, 1, height_ratios=(3, 1), sharex=True)
    above.plot((0, 1), (0, 1), color="gray", linestyle="--", linewidth=0.8, label="calibrated")
    above.bar((used + 0.5) / bins, accuracy, width=0.9 / bins, label="accuracy")
    above.plot(mean_confidence, accuracy, "o", color="tab:orange", markersize=4, label="at its mean confidence")
    above.set_ylabel("correct images / images", fontsize=8)
    above.set_ylim(0, 1.02)
    above.legend(fontsize=8, loc="upper left")
    error = evaluation.predictions.calibration_error()
    number = "" if error is None else f"\nexpected calibration error {error:.4f}, {bins} bins"
    above.set_title(f"reliability diagram, {title}{number}", fontsize=10)
    below.bar((used + 0.5) / bins, images[used], width=0.9 / bins, color="gray")
    below.set_yscale("log")
    below.set_ylabel("images (log)", fontsize=8)
    below.set_xlabel("confidence: the probability of the predicted class", fontsize=8)
    below.set_xlim(0, 1)
    figure.savefig(path, dpi=120)


def draw_mistakes(path: Path, evaluation: SavedEvaluation, title: str) -> None:
    """Draw the most confident mistakes, or write no file if there are none."""
    if not len(evaluation.mistakes):
        return
    classes, all_images = evaluation.classes, evaluation.predictions
    tiles = []
    for image, pixels in zip(evaluation.mistakes, evaluation.pixels, strict=True):
        labels = (all_images.predicted[image], all_images.labels[image])
        predicted, true = (drawn_name(classes[label], _MISTAKE_EMS, label) for label in labels)
        tiles.append(Tile(pixels, f"predicted {predicted} ({all_images.confidence[image]:.2f})\ntrue {true}"))
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
        title = drawn_name(title, columns * _TILE_INCHES * 72 / 9 - 2)
        figure.suptitle(title, **_style(9, title))
    cells = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in cells:
        axes.axis("off")
    for axes, tile in zip(cells, tiles, strict=False):
        axes.imshow(tile.pixels.transpose(1, 2, 0))
        below = {"transform": axes.transAxes, "ha": "center", "va": "top"}
        axes.text(0.5, -0.04, tile.caption, **_style(6, tile.caption), **below)
    figure.savefig(file, dpi=120)


EVALUATION_FIGURES: dict[str, Callable[[Path, SavedEvaluation, str], None]]
EVALUATION_FIGURES = {
    "confusion": draw_confusion, "classes": draw_classes, "reliability": draw_reliability, "mistakes": draw_mistakes,
}  # fmt: skip
"""The figures of one evaluation: name -> function of (file to write, evaluation, end of title)."""


def drawn_name(name: str, ems: float = _CAPTION_EMS, label: int | None = None) -> str:
    """Return a name as it is drawn: at most `ems` wide, in characters that an installed font has.

    A class whose name no font has is drawn as `class 3`, by its label; other text is escaped.
    """
    name = " ".join(name.split())
    drawable = frozenset[str]().union(*map(_characters, _families(name)))
    if not drawable.issuperset(name):
        escaped = "".join(
            character if character in drawable else character.encode("unicode_escape").decode() for character in name
        )
        name = escaped if label is None else f"class {label}"
    return shorten(name, ems, lambda text: sum(map(_width, text)))


def _style(size: float, *texts: str) -> dict[str, Any]:
    return {"fontsize": size, "fontfamily": _families("".join(texts)), "parse_math": False}  # a class may be called $5


def _families(text: str) -> list[str]:
    """Return the fonts that draw `text`: each has characters that those before it lack."""
    families = [_FONT]
    missing = frozenset(text) - _characters(_FONT)
    while missing and (family := _first_family(missing)):
        families.append(family)
        missing -= _characters(family)
    return families


@cache
def _first_family(characters: frozenset[str]) -> str:
    """Return the first installed font that has one of the characters, or ""."""
    from matplotlib.font_manager import fontManager

    names = dict.fromkeys(entry.name for entry in fontManager.ttflist if not entry.name.startswith("Last Resort"))
    return next((name for name in names if not characters.isdisjoint(_characters(name))), "")


@cache
def _font(family: str) -> Any:
    """Return a font of matplotlib's for text of 10 px. Raises RuntimeError for one of pictures."""
    from matplotlib.font_manager import fontManager
    from matplotlib.ft2font import FT2Font

    files = [entry for entry in fontManager.ttflist if entry.name == family]
    font = FT2Font(min(files, key=lambda entry: (entry.style != "normal", entry.weight != 400)).fname)
    font.set_size(10, 72)
    return font


@cache
def _characters(family: str) -> frozenset[str]:
    try:
        return frozenset(map(chr, _font(family).get_charmap()))
    except (OSError, RuntimeError, ValueError):
        return frozenset()


@cache
def _width(character: str) -> float:
    """Return the width of a character in units of the size, 1 if matplotlib's own font lacks it."""
    if character not in _characters(_FONT):
        return 1
    return float(_font(_FONT).load_char(ord(character)).linearHoriAdvance) / 65536 / 10


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure((width, height), layout="constrained")
