"""`pipeline predict`: print the five most probable classes of images.

The model is that of a checkpoint, of a run's newest checkpoint, or of MLflow's model registry.

Promise: images are decoded, resized and cropped as in validation, with the model's own
configuration, so predictions are those that `evaluate` counts. An image that cannot be decoded is
named and skipped.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pipeline import launcher
from pipeline.addons.datasets.index import MISSING, Split, describe_ignored
from pipeline.addons.datasets.names import HIDDEN, is_hidden, is_image, why_ignored
from pipeline.addons.datasets.sources import FolderImages
from pipeline.addons.models.exported_model import ExportedModel
from pipeline.addons.models.inputs import MODEL_URI_PREFIX
from pipeline.addons.models.trained import eval_model
from pipeline.config.load import from_yaml
from pipeline.data.loader import EvalBatches, batches
from pipeline.device import choose_device
from pipeline.errors import NotFiniteError, RequestError, StorageError, printable_name
from pipeline.planning import divide_resources
from pipeline.record import checkpoint, checkpoint_files
from pipeline.record.terminal import Terminal

_TOP_K = 5
_NOT_FINITE = "the model's logits for it are not finite"
_MACHINE_OVERRIDES = ["run.device=auto", "data.workers=auto"]
"""Keys of the model's configuration that describe the training machine, reset for this one."""


def predict(target: str, paths: list[str], *, as_json: bool) -> str:
    """Run `pipeline predict`; return the predictions as a table, or as JSON.

    Raises StorageError if no image can be decoded, NotFiniteError if all logits are NaN or
    infinite.
    """
    terminal = Terminal()
    images, left_out = _list_images(paths)
    contents = _read_model(target)
    if left_out:
        terminal.log(left_out)
    tops: list[tuple[str, list[tuple[str, float]]]] = []  # two files may have one printed name
    bad: list[tuple[str, str]] = []
    for image, defect, top in _classify(contents, target, images):
        if defect:
            bad.append((image, defect))
        else:
            tops.append((image, top))
        terminal.progress(f"{len(tops) + len(bad):,} of {len(images):,} images")
    if not tops and any(defect == _NOT_FINITE for _, defect in bad):
        raise NotFiniteError(f"the logits of {target} are not finite for any image: use another checkpoint")
    if not tops:
        image, defect = bad[0]
        raise StorageError(f"none of {len(bad):,} images can be decoded ({image}: {defect})", "give others")
    for image, defect in bad:
        terminal.log(f"bad image {image}: {defect}")
    if as_json:
        predictions = [
            {"image": image, "top": [{"class": name, "probability": share} for name, share in top]}
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


def _classify(
    contents: dict[str, Any], target: str, images: FolderImages
) -> Iterator[tuple[str, str, list[tuple[str, float]]]]:
    """Yield (image, defect or "", its most probable classes and their probabilities)."""
    config, here = from_yaml(contents["config"], target, _MACHINE_OVERRIDES), launcher.this_world()
    device = choose_device(config, here)
    model = ExportedModel(eval_model(contents, config.model)).eval().to(device)
    # a name in a foreign model could write a second line, or control the terminal
    classes = [printable_name(name) for name in contents["classes"]]
    data = EvalBatches(replace(images, upright=config.data.orientation == "apply"), config)
    resources = divide_resources(config, here)
    # a single batch needs no worker: making it in this process is faster
    resources = replace(resources, workers=min(resources.workers, len(data) - 1))
    with torch.inference_mode():
        for batch in batches(data, range(len(data)), resources, pin=device.type == "cuda"):
            found = model(batch.readable().images.to(device).float())
            shares, labels = found.topk(min(_TOP_K, len(classes)))
            defects = dict(batch.defects)
            for row, sample in enumerate(batch.ids.tolist()):
                probabilities = shares[row].tolist()
                defect = defects.get(sample, "" if math.isfinite(probabilities[0]) else _NOT_FINITE)
                names = [classes[label] for label in labels[row].tolist()]
                yield images.name(sample), defect, list(zip(names, probabilities, strict=True))


def _list_images(paths: list[str]) -> tuple[FolderImages, str]:
    """Return the given files and the images in the given folders, and what of those is left out."""
    sizes: dict[str, int] = {}
    ignored: Counter[str] = Counter()
    for path in paths:
        found = [path] if not os.path.isdir(path) else []
        for folder, folders, files in os.walk(path):
            ignored.update(
                why_ignored(os.fsencode(name)) for name in files if not is_image(os.fsencode(name))
            )
            found += [os.path.join(folder, name) for name in files if is_image(os.fsencode(name))]
            hidden = [name for name in folders if is_hidden(os.fsencode(name))]
            folders[:] = [name for name in folders if name not in hidden]
            links = sum(os.path.islink(os.path.join(folder, name)) for name in folders)  # which may lead back
            ignored += Counter({HIDDEN: len(hidden), "behind a link": links})
        sizes |= {name: os.path.getsize(name) if os.path.exists(name) else MISSING for name in found}
    left_out = f"left out: {describe_ignored(ignored)}" if ignored else ""
    if not sizes:
        given = ", ".join(paths) + (f" ({left_out})" if left_out else "")
        raise RequestError(f"no image in {given}: give image files, or folders with images")
    entries = [(os.fsencode(name), size, 0) for name, size in sizes.items()]
    return FolderImages(Path(), Split.from_entries(entries)), left_out


def _read_model(target: str) -> dict[str, Any]:
    """Return the contents of a checkpoint, or of a model in MLflow's registry."""
    if target.startswith(MODEL_URI_PREFIX):
        from pipeline.addons.mlflow.registry import fetch_model

        return fetch_model(target)
    return checkpoint.read_model(checkpoint_files.find(Path(target)))
