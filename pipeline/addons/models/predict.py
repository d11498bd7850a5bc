"""`pipeline predict`: print the five most probable classes of images.

The model is that of a checkpoint, of a run's newest checkpoint, or of MLflow's model registry.

Promise: images are decoded, resized and cropped as in validation, with the model's own
configuration, so predictions are those that `evaluate` counts. An image that cannot be decoded is
named and skipped.
"""

import io
import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pipeline import world
from pipeline.addons.models.exported_model import ExportedModel
from pipeline.addons.report.figures import Tile, draw_contact_sheet, drawn_name
from pipeline.config.load import from_yaml
from pipeline.config.schema import MODEL_URI_PREFIX
from pipeline.data.batch import NO_LABEL, Batch
from pipeline.data.index import MISSING, Split, describe_ignored
from pipeline.data.loader import EvalBatches, batches
from pipeline.data.names import HIDDEN, is_hidden, is_image, printable_name, why_ignored
from pipeline.data.sources import FolderImages
from pipeline.device import choose_device
from pipeline.errors import NotFiniteError, RequestError, StorageError
from pipeline.files import atomic_write, target_of
from pipeline.model.trained import eval_model
from pipeline.planning import divide_resources
from pipeline.record import checkpoint, checkpoint_files
from pipeline.record.terminal import Terminal

_TOP_K = 5
_SHEET_TILES = 64
_MACHINE_OVERRIDES = ["run.device=auto", "data.workers=auto"]
"""Keys of the model's configuration that describe the training machine, reset for this one."""
TopClasses = list[tuple[str, float]]
"""(class, probability), the most probable first."""


def predict(target: str, paths: list[str], *, as_json: bool, sheet: Path | None) -> str:
    """Run `pipeline predict`; return the predictions as a table, or as JSON.

    Raises StorageError if no image can be decoded, NotFiniteError if all logits are NaN or
    infinite.
    """
    terminal = Terminal()
    split, left_out = _list_images(paths)
    images = FolderImages(Path(), split)
    contents = _read_model(target)
    if left_out:
        terminal.log(left_out)
    predictions: list[tuple[str, TopClasses]] = []
    tiles: list[Tile] = []
    labels = {printable_name(name): label for label, name in enumerate(contents["classes"])}
    bad: dict[str, str] = {}
    has_bad_logits = False
    for batch, tops in _classify(contents, target, images):
        bad |= {images.name(sample): defect for sample, defect in batch.defects}
        for sample, label, pixels, top in zip(batch.ids.tolist(), batch.labels, batch.images, tops, strict=True):
            if label == NO_LABEL:
                continue
            if not math.isfinite(top[0][1]):
                bad[images.name(sample)] = "the model's logits for it are not finite"
                has_bad_logits = True
                continue
            predictions.append((images.name(sample), top))
            if sheet and len(tiles) < _SHEET_TILES:
                name = drawn_name(top[0][0], label=labels[top[0][0]])
                tiles.append(Tile(pixels.numpy(), f"{name} {top[0][1]:.2f}"))
        terminal.progress(f"{len(predictions) + len(bad):,} of {len(images):,} images")
    if predictions or len(bad) > 1:
        for image, defect in bad.items():
            terminal.log(f"bad image {image}: {defect}")
    if has_bad_logits and not predictions:
        raise NotFiniteError(f"the logits of {target} are not finite for any image: use another checkpoint")
    if not predictions:
        image, defect = next(iter(bad.items()))
        others = f" (and none of the other {len(bad) - 1:,} images can be decoded)" if len(bad) > 1 else ""
        raise StorageError(f"{image}: {defect}{others}: give images that can be decoded")
    if sheet:
        picture = io.BytesIO()
        draw_contact_sheet(picture, tiles, target)
        try:
            atomic_write(target_of(sheet), picture.getvalue())
        except OSError as error:
            raise StorageError(f"--sheet {sheet} cannot be written: {error.strerror}") from None
    return _json(predictions, bad) if as_json else _table(predictions)


def _classify(contents: dict[str, Any], target: str, images: FolderImages) -> Iterator[tuple[Batch, list[TopClasses]]]:
    """Yield each batch with the most probable classes of its images, by the model `contents`."""
    config, here = from_yaml(contents["config"], target, _MACHINE_OVERRIDES), world.from_environment()
    device = choose_device(config, here)
    # a name in a foreign model could write a second line, or control the terminal
    classes = [printable_name(name) for name in contents["classes"]]
    model = ExportedModel(eval_model(contents, config.model)).eval().to(device)
    data = EvalBatches(replace(images, upright=config.data.orientation == "apply"), config)
    resources = divide_resources(config, here)
    # a single batch needs no worker: making it in this process is faster
    resources = replace(resources, workers=min(resources.workers, len(data) - 1))
    with torch.inference_mode():
        for batch in batches(data, range(len(data)), resources, pin=device.type == "cuda"):
            probabilities, labels = model(batch.readable().images.to(device).float()).topk(min(_TOP_K, len(classes)))
            tops = [
                [(classes[label], probability) for label, probability in zip(*row, strict=True)]
                for row in zip(labels.tolist(), probabilities.tolist(), strict=True)
            ]
            yield batch, tops


def _list_images(paths: list[str]) -> tuple[Split, str]:
    """Return the given files and the images in the given folders, and what of those is left out.

    The images are a split with one class.
    """
    names: set[str] = set()
    ignored: Counter[str] = Counter()
    for path in paths:
        if not os.path.isdir(path):
            names.add(path)
        for folder, folders, files in os.walk(path):
            for name in files:
                if is_image(os.fsencode(name)):
                    names.add(os.path.join(folder, name))
                else:
                    ignored[why_ignored(os.fsencode(name))] += 1
            for name in filter(lambda name: is_hidden(os.fsencode(name)), [*folders]):
                folders.remove(name)
                ignored[HIDDEN] += 1
            if links := sum(os.path.islink(os.path.join(folder, name)) for name in folders):
                ignored["behind a link"] += links  # which may lead back
    left_out = f"left out: {describe_ignored(ignored)}" if ignored else ""
    if not names:
        given = ", ".join(paths) + (f" ({left_out})" if left_out else "")
        raise RequestError(f"no image in {given}: give image files, or folders with images")
    sizes = {name: os.path.getsize(name) if os.path.exists(name) else MISSING for name in names}
    return Split.from_entries([(os.fsencode(name), size, 0) for name, size in sizes.items()]), left_out


def _read_model(target: str) -> dict[str, Any]:
    """Return the contents of a checkpoint, or of a model in MLflow's registry."""
    if target.startswith(MODEL_URI_PREFIX):
        from pipeline.addons.mlflow.registry import fetch_model

        return fetch_model(target)
    return checkpoint.read_model(checkpoint_files.find(Path(target)))


def _json(predictions: list[tuple[str, TopClasses]], bad: dict[str, str]) -> str:
    rows = [
        {"image": image, "top": [{"class": name, "probability": probability} for name, probability in top]}
        for image, top in predictions
    ]
    defects = [{"image": image, "defect": defect} for image, defect in bad.items()]
    return json.dumps({"predictions": rows, "bad": defects})


def _table(predictions: list[tuple[str, TopClasses]]) -> str:
    image_width = max(len(image) for image, _ in predictions)
    class_width = max(len(name) for _, top in predictions for name, _ in top)
    return "\n".join(
        f"{image:<{image_width}}" + "".join(f"  {name:>{class_width}} {probability:.4f}" for name, probability in top)
        for image, top in predictions
    )
