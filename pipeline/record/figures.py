"""A run as pictures, from its folder alone: `report/` for people without a server, and what MLflow shows an epoch.

Promise: training never draws. matplotlib is imported where something is drawn, in a process beside the training (MLflow's
sender) or after it (`pipeline report`), and a picture that cannot be made keeps no other back.
"""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.record import predictions
from pipeline.record.contact_sheet import Tile, draw_sheet
from pipeline.record.folder import RunFolder
from pipeline.record.journal import read
from pipeline.record.predictions import KeptEvaluation

_CURVES = (
    ("loss", ("train/loss", "val/loss")),
    ("top-1", ("train/top1", "val/top1")),
    ("learning rate", ("train/lr",)),
)
_NAMED = 30  # classes whose names an axis has room for
_NAMES: dict[str, Any] = {"fontsize": 7, "parse_math": False}  # a class may be called $5
_WORST = 40  # classes shown, where there are more
_WHOLE = 1000  # classes that are all in one picture of confusion: it takes 75 bytes a pair of them beside the training
_CONFUSED = 200  # classes in it, where there are more


def draw_report(folder: RunFolder, log: Callable[[str], None]) -> list[Path]:
    """Draws all there is to draw into `report/`; the files."""
    report = folder.report
    report.mkdir(exist_ok=True)
    steps = sorted((report / "data").glob("step-*.npz"))
    wanted: dict[str, Callable[[Path], None]] = {"curves.png": lambda path: draw_curves(path, folder.journal)}
    if (report / "data" / predictions.AUGMENTED).exists():
        wanted["augmentation.png"] = lambda path: draw_augmentation(path, report)
    if steps:
        wanted |= {f"{name}.png": of_evaluation(draw, steps[-1]) for name, draw in OF_EVALUATION.items()}
    drawn = []
    for name, draw in wanted.items():
        try:
            draw(report / name)
            drawn.append(report / name)
        except (OSError, ValueError, KeyError) as error:
            log(f"{name} cannot be drawn: {error}")
    return [path for path in drawn if path.exists()]


def of_evaluation(draw: Callable[[Path, KeptEvaluation, str], None], kept: Path) -> Callable[[Path], None]:
    """`draw` for the evaluation in the file `kept`."""
    return lambda path: draw(path, predictions.load_evaluation(kept), f"step {int(kept.stem.removeprefix('step-')):,}")


def draw_curves(path: Path, journal: Path) -> None:
    """Loss, top-1 and learning rate over the steps."""
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
                axes.plot(*zip(*points[key], strict=True), marker="." if key[:3] == "val" else "", label=key)
        if any(points[key] for key in keys):
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def draw_confusion(path: Path, judged: KeptEvaluation, title: str) -> None:
    """Shares of each class's images, by what they were taken for; of many the classes that are confused most."""
    num_classes = len(judged.classes)
    shown = judged.answers.confused(num_classes, _CONFUSED if num_classes > _WHOLE else num_classes)
    _, images = judged.answers.right(num_classes)
    shares = judged.answers.confusion(shown) / np.maximum(1, images[shown, None])
    figure = _figure(6, 5.5)
    axes = figure.subplots()
    figure.colorbar(axes.imshow(shares, cmap="Blues", vmin=0, vmax=1), label="share of the class")
    some = f" of the worst {len(shown)} of {num_classes:,} classes" if len(shown) < num_classes else ""
    axes.set_title(f"confusion{some}, {title}", fontsize=10)
    axes.set_xlabel("taken for")
    axes.set_ylabel("is")
    if num_classes <= _NAMED or len(shown) < num_classes:
        places = range(0, len(shown), -(-len(shown) // _NAMED))
        names = [judged.classes[shown[place]] for place in places]
        axes.set_xticks(places, names, rotation=90, **_NAMES)
        axes.set_yticks(places, names, **_NAMES)
    figure.savefig(path, dpi=120)


def draw_classes(path: Path, judged: KeptEvaluation, title: str) -> None:
    """Accuracy of each class; of many the worst."""
    right, images = judged.answers.right(len(judged.classes))
    accuracy = right / np.maximum(1, images)
    order = np.argsort(accuracy, kind="stable")[:_WORST][::-1]
    figure = _figure(6, 0.6 + 0.2 * len(order))
    axes = figure.subplots()
    axes.barh(range(len(order)), accuracy[order])
    axes.set_yticks(range(len(order)), [judged.classes[label] for label in order], **_NAMES)
    axes.set_xlim(0, 1)
    some = f"the worst {len(order)} of {len(accuracy):,} classes" if len(order) < len(accuracy) else "each class"
    axes.set_title(f"top-1 of {some}, {title}", fontsize=10)
    figure.savefig(path, dpi=120)


def draw_mistakes(path: Path, judged: KeptEvaluation, title: str) -> None:
    """The most confident mistakes; nothing where there is none."""
    if len(judged.shown):
        said = judged.answers
        tiles = [
            Tile(
                pixels,
                f"{judged.classes[said.predicted[image]]} {said.confidence[image]:.2f}\n"
                f"is {judged.classes[said.labels[image]]}",
            )
            for image, pixels in zip(judged.shown, judged.pixels, strict=True)
        ]
        draw_sheet(path, tiles, f"most confident mistakes, {title}")


def draw_augmentation(path: Path, report: Path) -> None:
    """What augmentation makes of the first images of training."""
    pixels, captions = predictions.load_augmented(report)
    draw_sheet(path, list(map(Tile, pixels, captions)), "the first images of training, as the model sees them")


OF_EVALUATION: dict[str, Callable[[Path, KeptEvaluation, str], None]] = {
    "confusion": draw_confusion,
    "classes": draw_classes,
    "mistakes": draw_mistakes,
}
"""Pictures of one evaluation, by name."""


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure((width, height), layout="constrained")
