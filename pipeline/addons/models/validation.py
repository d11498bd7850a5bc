"""The images on which `pipeline evaluate` and `export` evaluate a checkpoint. No torch here."""

import os
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.addons.datasets.folders import scan_validation
from pipeline.addons.datasets.pack import train_shard
from pipeline.config.schema import Config
from pipeline.data.holdout import HoldOut
from pipeline.data.index import Index, Split, describe_ignored
from pipeline.data.manifest import scan
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
    val/, and of a pack of one, it takes all images; but only those that the training held out if
    they are the training's data, wherever it lies now and however it was packed. Of a folder of
    other data, `overrides` may hold a share out. Raises RequestError if there is no image, or one
    of a class that the model does not know.
    """
    classes = tuple(contents["classes"])
    names_val_split = any(word.startswith("data.val_split=") for word in overrides)
    if config.data.source == "synthetic":
        source = open_source(config)
        if not set(source.classes) <= set(classes):
            raise RequestError(
                f"data.source=synthetic makes {len(source.classes)} classes, 'class 0' and so on, but the model knows"
                f" {list_first(list(classes), 3)}",
                "name images of its classes with data.source=folder data.root=FOLDER",
            )
        return source, f"{len(source.val):,} synthetic images"
    if config.data.source == "pack":
        if names_val_split:
            raise RequestError("data.val_split cannot be set for a pack, which has a split already", "leave it out")
        index, place = open_pack(config), str(config.data.root)
        split, description = _validation_of_pack(index, contents)
        if not len(split):
            raise RequestError(f"data.root={place} holds no image to evaluate the model on")
        index = replace(index, val=split)
        index = replace(index, val=_relabel_validation(index, classes), classes=classes)
        source = source_from_index(place, index, config)
        return source, description.format(count=f"{len(split):,}", pack=f"the pack {place}")
    root = data_root(config)
    ensure_digits(config)
    hold_out = None
    if (root / "val").is_dir():
        description = "the {count} images of {root}/val"
    elif hold_out := _hold_out_of_folder(root, trained, contents):
        description = "the {count} held-out images of {root}"
        if names_val_split and config.data.val_split != hold_out.share:
            raise RequestError(
                f"data.val_split={config.data.val_split:g} would include images that the model was trained on:"
                f" {hold_out.share:g} of {root} was held out; leave data.val_split out"
            )
    elif names_val_split:
        hold_out, description = hold_out_of(config), "the {count} held-out images of {root}"
    else:
        description = (
            "all {count} images of {root}"
            " (it is not the data of the training; data.val_split=SHARE would hold a share out)"
        )
    ignored: Counter[str] = Counter()
    validation = scan_validation(root, classes, hold_out, ignored)
    description += f" (left out: {describe_ignored(ignored)})" if ignored else ""
    upright = config.data.orientation == "apply"
    source = source_from_index(root, Index(Split.from_entries([]), validation, classes, upright=upright))
    return source, description.format(count=f"{len(validation):,}", root=root)


def _validation_of_pack(index: Index, contents: dict[str, Any]) -> tuple[Split, str]:
    """Return the images of a pack to evaluate a checkpoint on, and a description of them."""
    # a checkpoint of an earlier version does not say which images its training held out
    if not index.is_split_by_hash or "split" not in contents:
        return index.val, "the {count} held-out images of {pack}"
    hold_out = _known_hold_out(index, contents)
    if hold_out == index.hold_out:
        return index.val, "the {count} held-out images of {pack}"
    if hold_out:
        return _join(index, hold_out), "the {count} images of {pack} that the training held out"
    return _join(index, None), "all {count} images of {pack} (it is not the data of the training)"


def _join(index: Index, hold_out: HoldOut | None) -> Split:
    """Return the images of both splits of a pack that `hold_out` chooses (None: all)."""
    splits = index.train, index.val
    names, labels = list(index.names()), np.concatenate([split.labels for split in splits])
    chosen = hold_out.chosen(zip(names, labels.tolist(), strict=True)) if hold_out else set(names)
    kept = [i for i, name in enumerate(names) if name in chosen]
    places = np.concatenate([split.places.reshape(-1, 3) for split in splits])
    places[: len(index.train), 0] = train_shard(places[: len(index.train), 0])
    return Split(
        np.frombuffer(b"".join(names[i] for i in kept), np.uint8),
        np.cumsum([len(names[i]) for i in kept], dtype=np.int64),
        np.concatenate([split.sizes for split in splits])[kept],
        labels[kept],
        np.empty(0, np.uint8),
        places[kept].ravel(),
    )


def _relabel_validation(index: Index, classes: tuple[str, ...]) -> Split:
    """Return the validation images of a pack, labelled as a model of `classes` counts.

    Raises RequestError if the pack has a class that the model does not know.
    """
    known = {class_of(name): label for label, name in enumerate(classes)}
    unknown = sorted(name for name in index.classes if class_of(name) not in known)
    if unknown:
        raise RequestError(f"the pack has classes that the model does not know: {list_first(unknown, 5)}")
    labels = np.array([known[class_of(name)] for name in index.classes], np.int32)
    return replace(index.val, labels=labels[index.val.labels])


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
