"""The web page of a run, `report/index.html`: one file that opens anywhere, without a network.

Promise: the page follows from the run's folder alone, and the same folder gives the same bytes. It
contains its pictures, and no script, link or address of another file; its security policy forbids
them, too. Whatever the folder says, such as a class's name, is shown as text. A part that is
missing or damaged is left out, and the page names it. The page shows the pictures that `figures`
has drawn; it draws none, so it is cheap enough for rank 0 and the sender.
"""

import base64
import io
import re
import shlex
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.addons.ops.credentials import without_password
from pipeline.addons.report import evaluations
from pipeline.addons.report.summary import repeat_command, summarise
from pipeline.addons.run.receipt import Receipt
from pipeline.config.load import from_yaml
from pipeline.files import parse_json
from pipeline.record.folder import RunFolder
from pipeline.record.journal import read

FILE_NAME = "index.html"
_TEMPLATE = Path(__file__).with_name("page.html")
_CONFUSIONS = 10  # rows in the table of frequent confusions
_OF_ONE_LABEL = ("confusion matrix", "frequent confusions", "reliability diagram", "mistakes")


def write_page(folder: RunFolder) -> Path:
    """Write the page of a run into its `report/`, and return the file. Raises OSError."""
    folder.report.mkdir(exist_ok=True)
    path = folder.report / FILE_NAME
    folder.write(path, render_page(folder).encode())
    return path


def render_page(folder: RunFolder) -> str:
    """Return the page of a run as HTML."""
    from jinja2 import Environment, StrictUndefined

    parts: dict[str, Callable[[RunFolder], Any]] = {
        "summary": summarise, "curves": _drawn("curves"), "confusion matrix": _drawn("confusion"),
        "frequent confusions": _confusions, "accuracy of each class": _drawn("classes"),
        "reliability diagram": _drawn("reliability"), "mistakes": _mistakes,
        "augmentation": lambda folder: list(map(_tile, *evaluations.load_augmented(folder.report))),
        "time budget": _time_budget, "evaluations": _evaluations,
        "receipt": lambda folder: Receipt(folder).contents(), "commands": _commands,
        "configuration": lambda folder: without_password(folder.config.read_text(encoding="utf-8")),
    }  # fmt: skip
    shown: dict[str, Any] = {"several_labels": False}
    with suppress(Exception):  # a damaged file is named below
        plan = parse_json(folder.plan.read_text(encoding="utf-8"))
        shown["several_labels"] = plan.get("label_sets", 0) > 0
    left_out: dict[str, str] = {}
    for name, make in parts.items():
        is_shown = not (shown["several_labels"] and name in _OF_ONE_LABEL)
        try:
            shown[name.replace(" ", "_")] = make(folder) if is_shown else None
        except Exception as error:  # whatever is damaged: the rest is shown
            shown[name.replace(" ", "_")] = None
            left_out[name] = f"{type(error).__name__}: {error}"
    templates = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = templates.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    text: str = template.render(title=folder.path.absolute().name, left_out=left_out, **shown)
    return text.encode(errors="replace").decode()  # the name of a folder may not be valid Unicode


def _drawn(name: str) -> Callable[[RunFolder], str]:
    return lambda folder: _data_uri((folder.report / f"{name}.png").read_bytes())


def _confusions(folder: RunFolder) -> list[tuple[str, str, int]]:
    evaluation = evaluations.last_evaluation(folder.report)
    names = evaluation.classes
    pairs = evaluations.most_frequent_confusions(evaluation.predictions, _CONFUSIONS)
    return [(names[true], names[predicted], images) for true, predicted, images in pairs]


def _mistakes(folder: RunFolder) -> list[dict[str, Any]]:
    evaluation = evaluations.last_evaluation(folder.report)
    found, names, tiles = evaluation.predictions, evaluation.classes, []
    for image, pixels in zip(evaluation.mistakes, evaluation.pixels, strict=True):
        predicted = f"predicted {names[found.predicted[image]]} ({found.confidence[image]:.2f})"
        tiles.append(_tile(pixels, predicted, f"true {names[found.labels[image]]}"))
    return tiles


def _tile(pixels: NDArray[np.uint8], *captions: str) -> dict[str, Any]:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0)).save(buffer, "PNG")
    return {"uri": _data_uri(buffer.getvalue()), "captions": captions}


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _time_budget(folder: RunFolder) -> list[tuple[str, str, float]]:
    """Return (entry, time, percent) of where the time of the epochs went, largest first."""
    seconds: dict[str, float] = defaultdict(float)
    for row, _ in read(folder.journal):
        metrics = row.get("metrics", {})
        for key, value in metrics.items() if "time/epoch_s" in metrics else ():
            if match := re.fullmatch(r"time/(\w+)(?<!_per)_s", key):
                seconds[match[1]] += value
    total = seconds.pop("epoch", 0)
    if not total:
        raise ValueError("no epoch is complete yet")
    rows = sorted(seconds.items(), key=lambda item: -item[1])
    return [(entry.replace("_", " "), f"{value:,.1f} s", 100 * value / total) for entry, value in rows]


def _evaluations(folder: RunFolder) -> list[tuple[list[Any], str, str]]:
    rows = []
    for row in Receipt(folder).contents()["evaluations"]:
        first = ("map", "f1", "subset") if "map" in row else ("top1", "top5", "balanced_accuracy")
        keys = (*first, "loss", "train_loss", "ece")
        numbers = ("–" if row.get(key) is None else f"{row[key]:.4f}" for key in keys)
        rows.append(([row["step"], *numbers, row["images"]], row["weights"], row["weights"][7:23]))
    return rows


def _commands(folder: RunFolder) -> dict[str, str | None]:
    config = from_yaml(folder.config.read_text(encoding="utf-8"), str(folder.config))
    world = parse_json(folder.plan.read_text(encoding="utf-8"))["world"]
    run_dir = shlex.quote(str(folder.path))
    return {
        "repeat": repeat_command(world, str(folder.config), f"{folder.path}-again"),
        "verify": f"pipeline verify {run_dir}" if config.is_deterministic else None,
        "predict": f"pipeline predict {run_dir} --best IMAGE",
    }
