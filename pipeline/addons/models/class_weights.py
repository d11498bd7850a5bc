"""Weights of the classes in the loss, `train.class_weights`; keys that the labels must allow.

`load` replaces the name of a file by its weights, so a checkpoint and a resume need no file, and
other weights are another configuration. torch is imported where it is used.
"""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.addons.datasets.names import class_of
from pipeline.config.load import MAX_YAML_BYTES, parse_yaml, read_limited
from pipeline.config.schema import Config
from pipeline.data.interface import Source
from pipeline.errors import RequestError
from pipeline.lazy import addon

if TYPE_CHECKING:
    import torch


def read_file(tree: dict[str, Any]) -> None:
    """Replace the name of a file in the tree of a recipe by the weights in it: YAML, or JSON."""
    section = tree.get("train")
    name = section.get("class_weights") if isinstance(section, dict) else None
    if isinstance(name, str) and name not in ("none", "balanced", "sqrt"):
        try:
            text = read_limited(Path(name).expanduser(), MAX_YAML_BYTES).decode("utf-8-sig")
        except (OSError, ValueError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            problem = f"train.class_weights={name} cannot be read: {reason}"
            raise RequestError(problem, "give none | balanced | sqrt | FILE with 'class: weight'") from None
        weights = parse_yaml(text, name)
        for label, weight in weights.items():
            with suppress(TypeError, ValueError):
                if 0 < float(weight) <= 1e6:
                    continue
            problem = f"train.class_weights={name}: class '{class_of(label)}' has the weight '{weight!s:.40}'"
            raise RequestError(problem, "give a number above 0 and up to 1e6")
        tree["train"] = {**tree["train"], "class_weights": weights}


def check(config: Config, source: Source) -> None:
    """Raise RequestError for weights that do not fit the classes, or another key the labels."""
    of_one_label = {"data.balance": config.data.balance != "none", "model.teacher": config.model.teacher}
    for key in [key for key, is_used in of_one_label.items() if is_used and source.label_sets]:
        raise RequestError(f"{key} needs one label a picture, and the data has several", "leave it out")
    if config.train.watch == "val/map" and not source.label_sets:
        raise RequestError("train.watch=val/map needs several labels a picture", "give val/top1 or val/loss")
    if isinstance(config.train.class_weights, dict):
        classes = {*map(class_of, source.classes)}
        weighted = {*map(class_of, config.train.class_weights)}
        for name in sorted(classes ^ weighted):
            problem = "is no class of the data" if name in weighted else "has no weight"
            raise RequestError(f"train.class_weights: '{name}' {problem}", "give each class of the data one")


def tensor(config: Config, source: Source, device: "torch.device") -> "torch.Tensor | None":
    """Return the weight of each class, [classes] float32 on the device, or None without weights.

    balanced is scikit-learn's, images / (classes × images of the class), of classes with images.
    With several labels a picture it is other images / images of the class, of the positive targets.
    """
    import torch

    given, classes = config.train.class_weights, len(source.classes)
    if given == "none":
        return None
    if isinstance(given, dict):
        by_name = {class_of(name): weight for name, weight in given.items()}
        return torch.tensor([by_name[class_of(name)] for name in source.classes], device=device)
    counts = np.bincount(source.train.labels, minlength=classes)
    weights = counts.sum() / (np.count_nonzero(counts) * counts.clip(1))
    if source.label_sets:
        sets = np.bincount(source.train.labels, minlength=len(source.label_sets))
        counts = sets @ addon("models.several_labels").class_matrix(source)
        weights = (len(source.train) - counts).clip(1) / counts.clip(1)
    weights[counts == 0] = 1
    return torch.tensor(np.sqrt(weights) if given == "sqrt" else weights, dtype=torch.float32, device=device)
