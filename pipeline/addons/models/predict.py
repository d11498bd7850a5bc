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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline import supervision
from pipeline.addons.models.exported_model import ExportedModel
from pipeline.addons.report.figures import Tile, draw_contact_sheet, drawn_name
from pipeline.config.load import from_yaml
from pipeline.config.schema import MODEL_URI_PREFIX
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
_NOT_FINITE = "the model's logits for it are not finite"
_MACHINE_OVERRIDES = ["run.device=auto", "data.workers=auto"]
"""Keys of the model's configuration that describe the training machine, reset for this one."""


class _Prediction(NamedTuple):
    image: str
    defect: str
    """Why there is no prediction, or ""."""
    pixels: Tensor
    labels: list[int]
    """The most probable class first."""
    probabilities: list[float]


def predict(target: str, paths: list[str], *, as_json: bool, sheet: Path | None) -> str:
    """Run `pipeline predict`; return the predictions as a table, or as JSON.

    Raises StorageError if no image can be decoded, NotFiniteError if all logits are NaN or
    infinite.
    """
    terminal = Terminal()
    split, left_out = _list_images(paths)
    contents = _read_model(target)
    if left_out:
        terminal.log(left_out)
    # a name in a foreign model could write a second line, or control the terminal
    classes = [printable_name(name) for name in contents["classes"]]
    good: list[_Prediction] = []
    bad: dict[str, str] = {}
    for prediction in _classify(contents, target, FolderImages(Path(), split)):
        if prediction.defect:
            bad[prediction.image] = prediction.defect
        else:
            has_tile = sheet and len(good) < _SHEET_TILES
            good.append(prediction if has_tile else prediction._replace(pixels=torch.empty(0)))
        terminal.progress(f"{len(good) + len(bad):,} of {len(split):,} images")
    if good or len(bad) > 1:
        for image, defect in bad.items():
            terminal.log(f"bad image {image}: {defect}")
    if not good and _NOT_FINITE in bad.values():
        raise NotFiniteError(f"the logits of {target} are not finite for any image: use another checkpoint")
    if not good:
        image, defect = next(iter(bad.items()))
        others = f" (and none of the other {len(bad) - 1:,} images can be decoded)" if len(bad) > 1 else ""
        raise StorageError(f"{image}: {defect}{others}", "give images that can be decoded")
    if sheet:
        _draw(sheet, good[:_SHEET_TILES], classes, target)
    rows = [(image, [classes[label] for label in labels], shares) for image, _, _, labels, shares in good]
    if as_json:
        tops = [
            {
                "image": image,
                "top": [{"class": name, "probability": share} for name, share in zip(*top, strict=True)],
            }
            for image, *top in rows
        ]
        return json.dumps(
            {"predictions": tops, "bad": [{"image": name, "defect": bad[name]} for name in bad]}
        )
    width = max(len(image) for image, _, _ in rows)
    class_width = max(len(name) for _, names, _ in rows for name in names)
    return "\n".join(
        f"{image:<{width}}"
        + "".join(f"  {name:>{class_width}} {share:.4f}" for name, share in zip(names, shares, strict=True))
        for image, names, shares in rows
    )


def _classify(contents: dict[str, Any], target: str, images: FolderImages) -> Iterator[_Prediction]:
    config, here = from_yaml(contents["config"], target, _MACHINE_OVERRIDES), supervision.this_world()
    device = choose_device(config, here)
    model = ExportedModel(eval_model(contents, config.model)).eval().to(device)
    data = EvalBatches(replace(images, upright=config.data.orientation == "apply"), config)
    resources = divide_resources(config, here)
    # a single batch needs no worker: making it in this process is faster
    resources = replace(resources, workers=min(resources.workers, len(data) - 1))
    with torch.inference_mode():
        for batch in batches(data, range(len(data)), resources, pin=device.type == "cuda"):
            found = model(batch.readable().images.to(device).float())
            shares, labels = found.topk(min(_TOP_K, len(contents["classes"])))
            defects = dict(batch.defects)
            for row, sample in enumerate(batch.ids.tolist()):
                probabilities = shares[row].tolist()
                defect = defects.get(sample, "" if math.isfinite(probabilities[0]) else _NOT_FINITE)
                yield _Prediction(
                    images.name(sample), defect, batch.images[row], labels[row].tolist(), probabilities
                )


def _draw(sheet: Path, predictions: list[_Prediction], classes: list[str], target: str) -> None:
    picture = io.BytesIO()
    tiles = [
        Tile(pixels.numpy(), f"{drawn_name(classes[labels[0]], label=labels[0])} {shares[0]:.2f}")
        for _, _, pixels, labels, shares in predictions
    ]
    draw_contact_sheet(picture, tiles, target)
    try:
        atomic_write(target_of(sheet), picture.getvalue())
    except OSError as error:
        raise StorageError(f"--sheet {sheet} cannot be written: {error.strerror}") from None


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
            hidden = [name for name in folders if is_hidden(os.fsencode(name))]
            folders[:] = [name for name in folders if name not in hidden]
            links = sum(os.path.islink(os.path.join(folder, name)) for name in folders)  # which may lead back
            ignored += Counter({HIDDEN: len(hidden), "behind a link": links})
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
