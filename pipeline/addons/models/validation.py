"""The images on which `pipeline evaluate` and `export` evaluate a checkpoint. No torch here."""

import os
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.addons.datasets.folders import scan_validation
from pipeline.addons.datasets.manifest import scan
from pipeline.config.schema import Config
from pipeline.data.holdout import HoldOut
from pipeline.data.index import Index, Split, describe_ignored
from pipeline.data.names import class_of
from pipeline.data.sources import (
    Source,
    data_root,
    ensure_digits,
    hold_out_of,
    open_pack,
    open_source,
    source_from_index,
)  # fmt: skip
from pipeline.errors import RequestError, list_first


def open_validation(
    config: Config, contents: dict[str, Any], trained: Config, overrides: list[str]
) -> tuple[Source, str]:
    """Return a source of the images to evaluate a checkpoint on, and a description of them.

    config: the training's own, `trained`, with the `overrides` of the command. Of a folder without
    val/ it takes all images; but only those that the training held out if they are the training's
    data, wherever it lies now. Of a folder of other data, `overrides` may hold a share out. Of a
    pack it takes the validation images. Raises RequestError if there is no image, one of a class
    that the model does not know, or in a pack one that the model was trained on.
    """
    share = config.data.val_split if any(word.startswith("data.val_split=") for word in overrides) else None
    match config.data.source:
        case "synthetic":
            return _of_synthetic(config, contents)
        case "pack":
            if share is not None:
                raise RequestError(
                    "data.val_split cannot be set for a pack, which has a split already", "leave it out"
                )
            return _of_pack(config, contents)
        case _:
            return _of_folder(config, contents, trained, share)


def _of_synthetic(config: Config, contents: dict[str, Any]) -> tuple[Source, str]:
    source, classes = open_source(config), contents["classes"]
    if not set(source.classes) <= set(classes):
        made = f"{len(source.classes)} classes, 'class 0' and so on"
        raise RequestError(
            f"data.source=synthetic makes {made}, but the model knows {list_first(classes, 3)}",
            "name images of its classes with data.source=folder data.root=FOLDER",
        )
    return source, f"{len(source.val):,} synthetic images"


def _of_folder(
    config: Config, contents: dict[str, Any], trained: Config, share: float | None
) -> tuple[Source, str]:
    root = data_root(config)
    ensure_digits(config)
    has_val = (root / "val").is_dir()
    hold_out = None if has_val else _hold_out_of_folder(root, trained, contents)
    if hold_out and share not in (None, hold_out.share):
        raise RequestError(
            f"data.val_split={share:g} would include images that the model was trained on:"
            f" {hold_out.share:g} of {root} was held out; leave data.val_split out"
        )
    if not has_val and share is not None:
        hold_out = hold_out or hold_out_of(config)
    ignored: Counter[str] = Counter()
    classes = tuple(contents["classes"])
    images = scan_validation(root, classes, hold_out, ignored)
    hint = "it is not the data of the training; data.val_split=SHARE would hold a share out"
    description = f"all {len(images):,} images of {root} ({hint})"
    if has_val:
        description = f"the {len(images):,} images of {root}/val"
    elif hold_out:
        description = f"the {len(images):,} held-out images of {root}"
    description += f" (left out: {describe_ignored(ignored)})" if ignored else ""
    index = Index(Split.from_entries([]), images, classes, upright=config.data.orientation == "apply")
    return source_from_index(root, index), description


def _hold_out_of_folder(root: Path, trained: Config, contents: dict[str, Any]) -> HoldOut | None:
    """Return what a training held out of these class folders, or None if it had other data."""
    if trained.data.source == "folder" and os.path.realpath(root) == os.path.realpath(data_root(trained)):
        return hold_out_of(trained)
    with suppress(RequestError):  # a folder to evaluate on may be one that cannot be trained on
        index = scan(root, hold_out_of(trained))
        if index.digest == contents.get("data"):
            return hold_out_of(trained)
        if trained.data.source == "pack":
            return _known_hold_out(index, contents)
    return None


def _known_hold_out(index: Index, contents: dict[str, Any]) -> HoldOut | None:
    """Return what a training held out of these images, or None if it had others.

    Images are known by all of their names, because packing changes sizes, and a split the order.
    Version 0.2 took the names as the system spells them.
    """
    match contents.get("split"):
        case {"names": names, "val_split": float(share), **more} if names in (
            index.names_digest(), index.names_digest(bytes),
        ):  # fmt: skip
            return HoldOut(share, str(more.get("split_by", "file")))  # version 0.2 knew that rule only
    return None


def _of_pack(config: Config, contents: dict[str, Any]) -> tuple[Source, str]:
    index, place, classes = open_pack(config), str(config.data.root), tuple(contents["classes"])
    held_out = _known_hold_out(index, contents) if index.is_split_by_hash else None
    if held_out and held_out != index.hold_out:
        raise RequestError(
            f"the pack {place} has the images of the training with another split ({index.hold_out.describe()}), so"
            f" its validation images are ones that the model was trained on",
            f"give the folder that was packed, or pack it with --val-split {held_out.share:g}",
        )
    if not len(index.val):
        raise RequestError(f"data.root={place} holds no image to evaluate the model on")
    known = {class_of(name): label for label, name in enumerate(classes)}
    unknown = sorted(name for name in index.classes if class_of(name) not in known)
    if unknown:
        raise RequestError(f"the pack has classes that the model does not know: {list_first(unknown, 5)}")
    labels = np.array([known[class_of(name)] for name in index.classes], np.int32)
    index = replace(index, val=replace(index.val, labels=labels[index.val.labels]), classes=classes)
    return source_from_index(
        place, index, config
    ), f"the {len(index.val):,} validation images of the pack {place}"
