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
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline import plan_table
from pipeline.config.credentials import without_password
from pipeline.config.load import from_yaml
from pipeline.files import parse_json
from pipeline.plan import Plan
from pipeline.record import predictions
from pipeline.record.folder import RunFolder
from pipeline.record.journal import events, read
from pipeline.record.receipt import Receipt, rank

FILE_NAME = "index.html"
_TEMPLATE = Path(__file__).with_name("page.html")
_STATUS = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped"}
_CONFUSIONS = 10  # rows in the table of frequent confusions
_MAX_START_ROWS = 50  # later starts of a run are shown, earlier ones counted


class Picture(NamedTuple):
    uri: str
    width: int
    height: int
    captions: tuple[str, ...] = ()


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
        "summary": _summary, "curves": _drawn("curves"), "confusion matrix": _drawn("confusion"),
        "frequent confusions": _confusions, "accuracy of each class": _drawn("classes"),
        "reliability diagram": _drawn("reliability"), "mistakes": _mistakes, "augmentation": _augmented,
        "time budget": _time_budget, "evaluations": _evaluations, "plan": _plan,
        "receipt": _facts, "commands": _commands, "configuration": _configuration,
    }  # fmt: skip
    shown: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, make in parts.items():
        try:
            shown[name.replace(" ", "_")] = make(folder)
        except Exception as error:  # whatever is damaged: the rest is shown
            shown[name.replace(" ", "_")] = None
            left_out[name] = _reason(error)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    text: str = template.render(title=folder.path.absolute().name, left_out=left_out, **shown)
    return text.encode(errors="replace").decode()  # the name of a folder may not be valid Unicode


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{Path(error.filename or '').name}: {error.strerror or error}"
    return f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def _summary(folder: RunFolder) -> dict[str, Any]:
    """Return what the run is, its status, and the figures of its last evaluated model."""
    receipt = Receipt(folder).contents()
    config, plan, evaluations = receipt["config"], receipt["plan"], receipt["evaluations"]
    rows = events(folder.journal)
    last = rows[-1] if rows else {}
    processes = "1 process" if plan["world"] == 1 else f"{plan['world']} processes"
    finite = [row for row in evaluations if not row.get("not_finite")]
    best = max(finite, key=rank, default=None)
    return {
        "recipe": config["recipe"],
        "what": f"{config['model']['arch']} on {plan['train_images']:,} images of {plan['num_classes']:,} classes:"
        f" {plan['last_step']:,} steps of {plan['global_batch']:,} images on {processes},"
        f" {config['train']['precision']}",
        "status": _STATUS.get(last.get("status", ""), "running or killed"),
        "line": last.get("line", ""),
        "figures": _figures(receipt),
        "best": {"top1": _number(best["top1"]), "step": f"{best['step']:,}"} if best else None,
        "began": _utc(rows[0]["time"]) if rows else None,
        "ended": _utc(last["time"]) if "status" in last else None,
    }


def _figures(receipt: dict[str, Any]) -> dict[str, str]:
    """Return the figures of the done line, or those of the last evaluation by the same names."""
    if receipt["done"]:
        return dict(word.split("=", 1) for word in receipt["done"].split()[1:])
    if not receipt["evaluations"]:
        return {}
    last = receipt["evaluations"][-1]
    return {
        "step": f"{last['step']}", "epoch": f"{last['step'] / receipt['plan']['steps_per_epoch']:.4g}",
        "top1": _number(last["top1"]), "top5": _number(last["top5"]), "images": last["images"],
        "weights": last["weights"],
    }  # fmt: skip


def _drawn(name: str) -> Callable[[RunFolder], Picture]:
    """Return a function that loads the picture `name` of a report. It raises OSError."""

    def load(folder: RunFolder) -> Picture:
        from PIL import Image

        data = (folder.report / f"{name}.png").read_bytes()
        try:
            with Image.open(io.BytesIO(data)) as image:
                image.load()
                return Picture(_data_uri(data), *image.size)
        except (OSError, SyntaxError) as error:
            raise ValueError(f"{name}.png is damaged ({error})") from None

    return load


def _last_evaluation(folder: RunFolder) -> predictions.SavedEvaluation:
    saved = predictions.saved_evaluations(folder.report)
    if not saved:
        raise ValueError("no evaluation yet")
    return predictions.load_evaluation(saved[-1])


def _confusions(folder: RunFolder) -> list[tuple[str, str, int]]:
    """Return (true class, predicted class, images) of the most frequent confusions."""
    evaluation = _last_evaluation(folder)
    names = evaluation.classes
    pairs = evaluation.predictions.most_frequent_confusions(_CONFUSIONS)
    return [(names[true], names[predicted], images) for true, predicted, images in pairs]


def _mistakes(folder: RunFolder) -> list[Picture]:
    evaluation = _last_evaluation(folder)
    names, of_all = evaluation.classes, evaluation.predictions
    tiles = []
    for image, pixels in zip(evaluation.mistakes, evaluation.pixels, strict=True):
        predicted, true = names[of_all.predicted[image]], names[of_all.labels[image]]
        tiles.append(_tile(pixels, f"predicted {predicted} ({of_all.confidence[image]:.2f})", f"true {true}"))
    return tiles


def _augmented(folder: RunFolder) -> list[Picture]:
    return list(map(_tile, *predictions.load_augmented(folder.report)))


def _tile(pixels: NDArray[np.uint8], *captions: str) -> Picture:
    from PIL import Image

    buffer = io.BytesIO()
    image = Image.fromarray(pixels.transpose(1, 2, 0))
    image.save(buffer, "PNG")
    return Picture(_data_uri(buffer.getvalue()), *image.size, captions)


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _time_budget(folder: RunFolder) -> list[tuple[str, str, float]]:
    """Return (entry, time, percent) of where the time of the epochs went, largest first."""
    seconds: dict[str, float] = defaultdict(float)
    for row, _ in read(folder.journal):
        metrics = row.get("metrics", {})
        if "time/epoch_s" in metrics:
            for key, value in metrics.items():
                if match := re.fullmatch(r"time/(\w+)(?<!_per)_s", key):
                    seconds[match[1]] += value
    total = seconds.pop("epoch", 0)
    if not total:
        raise ValueError("no epoch is complete yet")
    rows = sorted(seconds.items(), key=lambda item: -item[1])
    return [(_words(entry), _duration(value), 100 * value / total) for entry, value in rows]


def _words(name: str) -> str:
    return {"forward_backward": "forward and backward"}.get(name, name.replace("_", " "))


def _evaluations(folder: RunFolder) -> dict[str, Any]:
    evaluations = Receipt(folder).contents()["evaluations"]
    if not evaluations:
        raise ValueError("no evaluation yet")
    keys = ("top1", "top5", "balanced_accuracy", "loss", "train_loss", "ece")
    rows = [
        [f"{row['step']:,}", *(_number(row.get(key)) for key in keys), row["images"], row["weights"]]
        for row in evaluations
    ]
    balanced = "balanced"
    with suppress(OSError, ValueError):
        last = _last_evaluation(folder)
        count, num_classes = last.predictions.classes_with_images, len(last.classes)
        balanced += f" ({count:,} of {num_classes:,} classes)" if count < num_classes else ""
    return {"rows": rows, "balanced": balanced}


def _plan(folder: RunFolder) -> dict[str, str]:
    return plan_table.rows(Plan(**parse_json(folder.plan.read_text(encoding="utf-8"))))


def _facts(folder: RunFolder) -> dict[str, Any]:
    """Return the facts of the last start, the digest of the data, and every start."""
    receipt = Receipt(folder).contents()
    starts = receipt["starts"]
    facts = {"run": receipt["run"], "data": receipt["data"], **starts[-1]}
    del facts["step"]
    rows = [
        [f"{start['step']:,}", start["world"], start.get("device", ""), start.get("commit", ""), start["version"]]
        for start in starts
    ]
    return {
        "facts": {_words(name): value for name, value in facts.items() if value is not None},
        "starts": rows[-_MAX_START_ROWS:],
        "earlier": max(0, len(rows) - _MAX_START_ROWS),
    }


def _commands(folder: RunFolder) -> dict[str, str | None]:
    """Return the commands that repeat, verify and use the run."""
    config = from_yaml(folder.config.read_text(encoding="utf-8"), str(folder.config))
    plan = parse_json(folder.plan.read_text(encoding="utf-8"))
    nodes, run_dir = plan["world"] // plan["local_world"], shlex.quote(str(folder.path))
    words = f"train {shlex.quote(str(folder.config))} run.dir={shlex.quote(f'{folder.path}-again')}"
    start = f"pipeline {words}" + (f" --nproc {plan['world']}" if plan["world"] > 1 else "")
    if nodes > 1:
        agent = f"torchrun --nnodes {nodes} --nproc-per-node {plan['local_world']} --rdzv-backend pipeline"
        start = f"{agent} --rdzv-endpoint HOST:29500 -m pipeline {words}"
    return {
        "repeat": start,
        "verify": f"pipeline verify {run_dir}" if config.is_deterministic else None,
        "predict": f"pipeline predict {run_dir} --best IMAGE",
    }


def _configuration(folder: RunFolder) -> str:
    return without_password(folder.config.read_text(encoding="utf-8"))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _utc(milliseconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(milliseconds // 1000))


def _duration(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds < 3600 else f"{seconds / 3600:,.1f} h"
