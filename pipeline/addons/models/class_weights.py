"""Weights of the classes in the loss: `train.class_weights`.

A file is read once, by `load`, and its weights take its place in the configuration: a checkpoint
and a resume need no file, and other weights are another configuration. No torch at import.
"""

import csv
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.addons.datasets.names import class_of
from pipeline.config.load import parse_yaml, read_limited
from pipeline.config.schema import Config
from pipeline.data.interface import Source
from pipeline.errors import RequestError, nearest
from pipeline.files import parse_json

if TYPE_CHECKING:
    import torch

_MAX_BYTES = 1 << 22
_MAX_WEIGHT = 1e6


def read_file(tree: dict[str, Any]) -> None:
    """Replace the name of a file in the tree of a recipe by what the file holds."""
    section = tree.get("train")
    name = section.get("class_weights") if isinstance(section, dict) else None
    if not isinstance(name, str) or name in ("none", "balanced", "sqrt"):
        return
    try:
        path = Path(os.path.expanduser(name))
        text = read_limited(path, _MAX_BYTES).decode("utf-8-sig")
        if path.suffix in (".csv", ".tsv"):
            rows = list(csv.reader(text.splitlines(), delimiter="\t" if path.suffix == ".tsv" else ","))
            given: Any = [row for row in rows if row and row != ["class", "weight"]]
        elif path.suffix in (".yaml", ".yml"):
            given = [*parse_yaml(text, name).items()]
        else:
            given = [*parse_json(text).items()]
        section["class_weights"] = parse(given, f"{name}: ")  # type: ignore[index]
    except (OSError, ValueError, AttributeError) as error:
        problem = getattr(error, "strerror", None) or "it is no table of classes and weights"
        allowed = "none | balanced | sqrt | FILE (.json, .yaml or .csv, with class and weight)"
        raise RequestError(
            f"train.class_weights={name} cannot be read: {problem}", f"give {allowed}"
        ) from None


def parse(given: Any, where: str = "train.class_weights: ") -> Any:
    """Return the weight of each class by name; anything but a table as it is.

    Raises RequestError that names the class.
    """
    if not isinstance(given, dict | list):
        return given
    weights: dict[str, float] = {}
    for name, *values in given.items() if isinstance(given, dict) else given:
        try:
            (weight,) = map(float, values)
        except (TypeError, ValueError):
            weight = math.nan
        if not 0 < weight <= _MAX_WEIGHT or name in weights:
            stated = "is given twice" if name in weights else f"has the weight {str(values)[1:-1][:40]}"
            remedy = f"give each class one number above 0 and up to {_MAX_WEIGHT:g}"
            raise RequestError(f"{where}class '{class_of(str(name))}' {stated}", remedy)
        weights[name] = weight
    return weights


def check(config: Config, source: Source) -> None:
    """Raise RequestError if a class has no weight, or a weight no class."""
    given, classes = config.train.class_weights, [class_of(name) for name in source.classes]
    if isinstance(given, dict):
        known = {class_of(name) for name in given}
        for name in sorted(known.difference(classes)):
            problem = f"train.class_weights: the data has no class '{name}'{nearest(name, classes)}"
            raise RequestError(problem, "remove it")
        for name in sorted({*classes} - known):
            raise RequestError(f"train.class_weights: class '{name}' has no weight", "give each class one")
    if config.train.watch == "val/map" and not source.label_sets:
        raise RequestError("train.watch=val/map needs several labels a picture", "give val/top1 or val/loss")


def tensor(config: Config, source: Source, device: "torch.device") -> "torch.Tensor | None":
    """Return the weight of each class, [classes] float32 on the device, or None without weights."""
    import torch

    given = config.train.class_weights
    if given == "none":
        return None
    if isinstance(given, dict):
        weights = {class_of(name): weight for name, weight in given.items()}
        return torch.tensor([weights[class_of(name)] for name in source.classes], device=device)
    found = balanced(source)
    return torch.tensor(np.sqrt(found) if given == "sqrt" else found, dtype=torch.float32, device=device)


def balanced(source: Source) -> "np.ndarray[Any, Any]":
    """Return images / (classes × images of the class), as scikit-learn; 1 for a class without any.

    With several labels a picture, its images are those that have the label.
    """
    counts = np.bincount(source.train.labels, minlength=len(source.label_sets or source.classes))
    if source.label_sets:
        pairs = [
            (label, count)
            for labels, count in zip(source.label_sets, counts, strict=True)
            for label in labels
        ]
        labels, weights = zip(*pairs, strict=True)
        counts = np.bincount(labels, weights, minlength=len(source.classes))
    present = np.count_nonzero(counts)
    return np.where(counts > 0, counts.sum() / (present * np.maximum(counts, 1)), 1.0)
