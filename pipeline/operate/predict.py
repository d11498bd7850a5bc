"""`pipeline predict`: the five likeliest classes of images, by a checkpoint, a run's last one, or a model in MLflow.

Promise: an image is seen as validation sees it (the same decoding, resize and crop, from the model's own configuration),
so that the answers are those that `evaluate` counts; and an image that cannot be decoded is named and stops nobody.
"""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from pipeline import world
from pipeline.config.load import from_yaml
from pipeline.config.schema import REGISTRY, Config
from pipeline.data.batch import NO_LABEL, Batch
from pipeline.data.loader import EvalBatches, batches
from pipeline.data.manifest import EXTENSIONS, MISSING, Split
from pipeline.data.sources import FolderImages
from pipeline.device import choose_device
from pipeline.errors import NotFiniteError, RequestError, StorageError
from pipeline.model.architectures import Served
from pipeline.plan import share_resources
from pipeline.record import checkpoint
from pipeline.record.contact_sheet import Tile, draw_sheet
from pipeline.record.terminal import Terminal

_TOP = 5
_SHEET_TILES = 64
Top = list[tuple[str, float]]
"""(class, probability), the likeliest first."""
_HERE = ["run.device=auto", "data.workers=auto"]
"""Of a model's configuration these are of the machine that trained it."""


@dataclass(frozen=True)
class Labeller:
    """A model with all that its answers want."""

    served: nn.Module
    """[B, 3, H, W] float32 of 0..255 -> [B, classes] probabilities."""
    config: Config
    classes: list[str]


class Prediction(NamedTuple):
    image: str
    top: Top


def predict(target: str, places: list[str], *, as_json: bool, sheet: Path | None) -> str:
    """A table, or JSON, of the predictions. StorageError if not one of the images can be decoded."""
    images = FolderImages(Path(), _listed(places))
    labeller = _labeller(target)
    terminal = Terminal()
    found: list[Prediction] = []
    tiles: list[Tile] = []
    bad: dict[str, str] = {}
    not_finite = 0
    for batch, tops in _label(labeller, images):
        bad |= {images.name(sample): defect for sample, defect in batch.defects}
        for sample, label, pixels, top in zip(batch.ids.tolist(), batch.labels, batch.images, tops, strict=True):
            if label == NO_LABEL:
                continue
            if not math.isfinite(top[0][1]):
                bad[images.name(sample)] = "the model's logits for it are not finite"
                not_finite += 1
            else:
                found.append(Prediction(images.name(sample), top))
                if sheet and len(tiles) < _SHEET_TILES:
                    tiles.append(Tile(pixels.numpy(), f"{top[0][0]} {top[0][1]:.2f}"))
        terminal.progress(f"{len(found) + len(bad):,} of {len(images):,} images")
    for image, defect in bad.items():
        terminal.log(f"bad image {image}: {defect}")
    if not_finite and not found:
        raise NotFiniteError(f"{target} gives no image logits that are finite: use another checkpoint")
    if not found:
        raise StorageError(f"none of the {len(images):,} images can be decoded: give others")
    if sheet:
        try:
            draw_sheet(sheet, tiles, target)
        except (OSError, ValueError) as error:
            raise RequestError(f"--sheet {sheet} cannot be written ({error}): give a file that ends in .png") from None
    return _json(found, bad) if as_json else _table(found)


def _label(labeller: Labeller, images: FolderImages) -> Iterator[tuple[Batch, list[Top]]]:
    """Each batch with the answers for its images."""
    config, here = labeller.config, world.from_environment()
    device = choose_device(config, here)
    served = labeller.served.to(device)
    data = EvalBatches(images, config)
    resources = share_resources(config, here)
    resources = replace(resources, workers=min(resources.workers, len(data) - 1))  # one batch is sooner made right here
    with torch.inference_mode():
        for batch in batches(data, range(len(data)), resources, pin=device.type == "cuda"):
            if batch.outage:
                raise batch.outage
            shares, labels = served(batch.images.to(device).float()).topk(min(_TOP, len(labeller.classes)))
            yield (
                batch,
                [
                    [(labeller.classes[label], share) for label, share in zip(*row, strict=True)]
                    for row in zip(labels.tolist(), shares.tolist(), strict=True)
                ],
            )


def _listed(places: list[str]) -> Split:
    """Each file that is named, and each image in a folder that is named, as a split of one class."""
    names: set[str] = set()
    for place in places:
        if os.path.isdir(place):
            names |= {
                os.path.join(folder, name)
                for folder, _, files in os.walk(place)
                for name in files
                if os.fsencode(name).lower().endswith(EXTENSIONS)
            }
        else:
            names.add(place)
    if not names:
        raise RequestError(f"no image in {', '.join(places)}: name image files, or folders that hold some")
    return Split.of([(os.fsencode(name), _size(name), 0) for name in names])


def _size(name: str) -> int:
    try:
        return os.stat(name).st_size
    except OSError:
        return MISSING


def _labeller(target: str) -> Labeller:
    if target.startswith(REGISTRY):
        from pipeline.record.mlflow.registry import fetch_model

        contents = fetch_model(target)
    else:
        contents = checkpoint.read_model(checkpoint.find(Path(target)))
    config = from_yaml(contents["config"], target, _HERE)
    model = checkpoint.eval_model(contents, config.model)
    return Labeller(Served(model).eval(), config, contents["classes"])


def _json(found: list[Prediction], bad: dict[str, str]) -> str:
    return json.dumps(
        {
            "predictions": [
                {"image": one.image, "top": [{"class": name, "probability": share} for name, share in one.top]}
                for one in found
            ],
            "bad": [{"image": image, "defect": defect} for image, defect in bad.items()],
        }
    )


def _table(found: list[Prediction]) -> str:
    image_width = max(len(one.image) for one in found)
    class_width = max(len(name) for one in found for name, _ in one.top)
    return "\n".join(
        f"{one.image:<{image_width}}" + "".join(f"  {name:>{class_width}} {share:.4f}" for name, share in one.top)
        for one in found
    )
