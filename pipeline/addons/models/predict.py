"""`pipeline predict`: print the five most probable classes of images.

The model is that of a checkpoint, of a run's newest checkpoint, or of MLflow's model registry.

Promise: images are decoded, resized and cropped as in validation, with the model's own
configuration, so predictions are those that `evaluate` counts. An image that cannot be decoded is
named and skipped.
"""

import csv
import fcntl
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pipeline import launcher
from pipeline.addons.datasets.file_errors import raise_if_outage
from pipeline.addons.datasets.folders import Walk
from pipeline.addons.datasets.index import MISSING, Split, describe_ignored
from pipeline.addons.datasets.names import printable_name
from pipeline.addons.datasets.sources import FolderImages
from pipeline.addons.models.eval_batches import EvalBatches
from pipeline.addons.models.trained import eval_weights, exported_model, read_model, weights_digest
from pipeline.config.load import from_yaml
from pipeline.data.loader import batches
from pipeline.device import choose_device
from pipeline.errors import RequestError, StorageError
from pipeline.lazy import addon
from pipeline.planning import divide_resources
from pipeline.record.terminal import Terminal

TOP_K = 5
_NOT_FINITE = "the model's logits for it are not finite"
_MACHINE_OVERRIDES = ["run.device=auto", "data.workers=auto"]
"""Keys of the model's configuration that describe the training machine, reset for this one."""
_RANKS = ("", *(f"_{rank}" for rank in range(2, TOP_K + 1)))
_COLUMNS = ("path", *(name + rank for rank in _RANKS for name in ("class", "probability")), "defect", "model")
_FORMULA = re.compile(r"[=@]|[+-](?![\d.]+$)")  # beginning of a class name that a spreadsheet would run


def predict(target: str, paths: list[str], *, as_json: bool) -> str:
    """Return the predictions as a table or as JSON. Raises StorageError if no image has one."""
    terminal = Terminal()
    images, left_out = list_images(paths)
    contents = read_model(target)
    if left_out:
        terminal.log(left_out)
    tops: list[tuple[str, list[tuple[str, float]]]] = []  # two files may have one printed name
    bad: list[tuple[str, str]] = []
    for image, defect, top in classify(contents, target, images):
        if defect:
            bad.append((image, defect))
        else:
            tops.append((image, top))
        terminal.progress(f"{len(tops) + len(bad):,} of {len(images):,} images")
    if not tops:
        image, defect = bad[0]
        problem = f"none of {len(bad):,} images has a prediction ({image}: {defect})"
        raise StorageError(problem, "use another checkpoint" if defect == _NOT_FINITE else "give others")
    for image, defect in bad:
        terminal.log(f"bad image {image}: {defect}")
    if as_json:
        names, limits = contents["classes"], (contents.get("evaluation") or {}).get("thresholds") or ()
        limits_of = zip(map(printable_name, names), limits, strict=False)
        more = {name: {"threshold": limit} for name, limit in limits_of}
        predictions = [
            {"image": image, "top": [{"class": k, "probability": p, **more.get(k, {})} for k, p in top]}
            for image, top in tops
        ]
        defects = [{"image": image, "defect": defect} for image, defect in bad]
        return json.dumps({"predictions": predictions, "bad": defects})
    width = max(len(image) for image, _ in tops)
    class_width = max(len(name) for _, top in tops for name, _ in top)
    return "\n".join(
        f"{image:<{width}}" + "".join(f"  {name:>{class_width}} {share:.4f}" for name, share in top)
        for image, top in tops
    )


def classify(
    contents: dict[str, Any], target: str, images: FolderImages
) -> Iterator[tuple[str, str, list[tuple[str, float]]]]:
    """Yield (image, defect or "", its most probable classes and their probabilities)."""
    config, here = from_yaml(contents["config"], target, _MACHINE_OVERRIDES), launcher.this_world()
    device = choose_device(config, here)
    model = exported_model(contents, config.model).to(device)
    # a name in a foreign model could write a second line, or control the terminal
    classes = [printable_name(name) for name in contents["classes"]]
    addon("datasets.images")  # before loader workers are forked
    data = EvalBatches(replace(images, upright=config.data.orientation == "apply"), config)
    resources = divide_resources(config, here)
    # a single batch needs no worker: making it in this process is faster
    resources = replace(resources, workers=min(resources.workers, len(data) - 1))
    with torch.inference_mode():
        for batch in batches(data, range(len(data)), resources, pin=device.type == "cuda"):
            found = model(batch.readable().images.to(device).float())
            shares, labels = found.topk(min(TOP_K, len(classes)))
            defects = dict(batch.defects)
            for row, sample in enumerate(batch.ids.tolist()):
                names = [classes[label] for label in labels[row].tolist()]
                top = list(zip(names, shares[row].tolist(), strict=True))
                defect = defects.get(sample, "" if shares[row].isfinite().all() else _NOT_FINITE)
                yield images.name(sample), defect, top


def list_images(paths: list[str], done: Container[str] = ()) -> tuple[FolderImages, str]:
    """Return the given files and the images in the given folders, and what of those is left out.

    done: the printed names of images that are not needed.
    """
    sizes: dict[bytes, int] = {}
    ignored: Counter[str] = Counter()
    for path in paths:
        walk, base = Walk(Path(path)), os.fsencode(path)
        try:
            if os.path.isdir(path):
                sizes |= {os.path.join(base, name): size for name, size in walk.images(b"")}
            else:
                sizes[base] = os.path.getsize(path) if os.path.exists(path) else MISSING
        except OSError as error:
            place = os.fsencode(error.filename or path)
            raise_if_outage(place, error)
            problem = f"{printable_name(place)} cannot be read: {error.strerror}"
            raise RequestError(problem, "make it readable, or give other images") from None
        ignored += walk.ignored
    left_out = f"left out: {describe_ignored(ignored)}" if ignored else ""
    if not sizes:
        given = ", ".join(paths) + (f" ({left_out})" if left_out else "")
        raise RequestError(f"no image in {given}: give image files, or folders with images")
    entries = [(name, size, 0) for name, size in sizes.items() if printable_name(name) not in done]
    return FolderImages(Path(), Split.from_entries(entries)), left_out


def predict_csv(target: str, paths: list[str], out: Path | None) -> str | int:
    """Run `pipeline predict --csv`; return what was written to the file, or 0 for standard output.

    Promise: each row is written as soon as its picture is classified, and none is held in memory.
    The same command with the same --out continues one that was killed: it removes a torn last line,
    and skips the pictures that have a row. Raises RequestError if the rows in the file are not of
    this model, StorageError if no row has a prediction or the file cannot be written.
    """
    terminal = Terminal()
    contents = read_model(target)
    model = weights_digest(eval_weights(contents))[:16]
    number = bad = 0
    try:
        done = _images_in(out, model) if out and out.exists() else set()
        images, left_out = list_images(paths, done)
        if left_out:
            terminal.log(left_out)
        with open(out, "a", encoding="utf-8") if out else nullcontext(sys.stdout) as file:
            if out:  # two commands would both write the rows that are missing
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            rows = csv.writer(file, lineterminator="\n")
            if not (out and file.tell()):
                rows.writerow(_COLUMNS)
            for number, (image, defect, top) in enumerate(classify(contents, target, images), 1):
                cells = [] if defect else [cell for name, share in top for cell in (name, f"{share:.6f}")]
                cells = [f"'{cell}" if _FORMULA.match(cell) else cell for cell in cells]
                rows.writerow([image, *cells, *[""] * (2 * TOP_K - len(cells)), defect, model])
                file.flush()
                bad += bool(defect)
                if out or not sys.stdout.isatty():
                    terminal.progress(f"{number:,} of {len(images):,} images")
    except OSError as error:
        reason = "another command writes it" if isinstance(error, BlockingIOError) else error.strerror
        raise StorageError(f"--out {out} cannot be written: {reason}") from None
    if number and number == bad and not done:
        raise StorageError(f"none of {bad:,} images has a prediction: their rows say why (column defect)")
    return f"{out}: {number:,} rows, {bad:,} of them of bad images; it had {len(done):,}" if out else 0


def _images_in(file: Path, model: str) -> set[str]:
    """Return the images that have a row in a file, and remove a last line that a kill has torn."""
    done: set[str] = set()
    header = ",".join(_COLUMNS) + "\n"
    with open(file, "r+b") as lines:
        for number, line in enumerate(lines):
            text = line[:100_000].decode(errors="replace")
            cells = next(csv.reader([text]))
            if not text.endswith("\n") and (number or header.startswith(text)):
                lines.truncate(lines.tell() - len(line))
            elif cells[-1:] != [model] if number else text != header:
                problem = f"line {number + 1} of {file} is not of 'pipeline predict --csv' with this model"
                raise RequestError(problem, "name another file")
            elif number:
                done.add(cells[0])
    return done
