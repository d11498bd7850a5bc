"""The images on which `pipeline evaluate` and `export` evaluate a checkpoint. No torch here."""

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.addons.datasets import sources
from pipeline.addons.datasets.holdout import HoldOut
from pipeline.addons.datasets.index import Index, Split, left_out
from pipeline.addons.datasets.manifest import scan, scan_validation
from pipeline.addons.datasets.names import class_of
from pipeline.addons.datasets.sources import data_root, hold_out_of
from pipeline.addons.datasets.table import Table
from pipeline.config.schema import Config
from pipeline.data.interface import Source
from pipeline.errors import RequestError, list_first


def open_validation(
    config: Config, contents: dict[str, Any], trained: Config, overrides: list[str]
) -> tuple[Source, str]:
    """Return a source of the images to evaluate a checkpoint on, and a description of them.

    config: the training's own, `trained`, with the `overrides` of the command. Of a folder without
    val/ it takes all images; but only those that the training held out if they are the training's
    data, wherever it lies now. Of a pack it takes the validation images. Raises RequestError if
    there is no image, one of a class that the model does not know, or in a pack one that the model
    was trained on.
    """
    if any(word.startswith("data.val_split=") for word in overrides):
        problem = "data.val_split cannot be set here: it is the share that the training held out"
        raise RequestError(problem, "leave it out")
    if config.data.source == "synthetic":
        source = sources.open_source(config)
        _check_classes(config, source.classes, contents["classes"])
        return source, f"{len(source.val):,} synthetic images"
    if config.data.source == "pack":
        return _of_pack(config, contents)
    if config.data.source == "table":
        return _of_table(config, contents, trained)
    root = data_root(config)
    sources.ensure_digits(config)
    has_val = (root / "val").is_dir()
    hold_out = None if has_val else _hold_out_of_folder(root, trained, contents)
    classes = tuple(contents["classes"])
    images, ignored = scan_validation(root, classes, hold_out)
    description = f"all {len(images):,} images of {root} (it is not the data of the training)"
    if has_val:
        description = f"the {len(images):,} images of {root}/val"
    elif hold_out:
        description = f"the {len(images):,} held-out images of {root}"
    description += left_out(ignored)
    index = Index(Split.from_entries([]), images, classes, upright=config.data.orientation == "apply")
    return sources.source_from_index(root, index), description


def _hold_out_of_folder(root: Path, trained: Config, contents: dict[str, Any]) -> HoldOut | None:
    """Return what a training held out of these class folders, or None if it had other data."""
    if trained.data.source == "folder" and os.path.realpath(root) == os.path.realpath(data_root(trained)):
        return hold_out_of(trained)
    with suppress(RequestError):  # a folder to evaluate on may be one that cannot be trained on
        return _hold_out_of(scan(root, hold_out_of(trained)), trained, contents)
    return None


def _hold_out_of(index: Index, trained: Config, contents: dict[str, Any]) -> HoldOut | None:
    if index.digest == contents.get("data"):
        return hold_out_of(trained)
    return _known_hold_out(index, contents) if trained.data.source == "pack" else None


def _of_table(config: Config, contents: dict[str, Any], trained: Config) -> tuple[Source, str]:
    is_same = (config.data.source, config.data.table) == (trained.data.source, trained.data.table)
    hold_out = hold_out_of(trained) if is_same else None
    with suppress(RequestError):  # a table to evaluate on may be one that cannot be trained on
        hold_out = hold_out or _hold_out_of(Table(config, hold_out_of(trained)).scan(), trained, contents)
    table = Table(config, hold_out)
    index = table.scan(to_train=False)
    if not len(index.val):
        raise RequestError(f"{table.path} holds no image to evaluate the model on")
    index = _relabelled(config, index, tuple(contents["classes"]))
    index = replace(index, upright=config.data.orientation == "apply")
    which = "all" if not (hold_out or index.hold_out.by == "table") else "the"
    description = f"{which} {len(index.val):,} {'' if which == 'all' else 'held-out '}images of {table.path}"
    description += " (it is not the data of the training)" if which == "all" else ""
    return sources.source_from_index(table.root, replace(index, train=Split.from_entries([]))), description


def _known_hold_out(index: Index, contents: dict[str, Any]) -> HoldOut | None:
    """Return what a training held out of these images, or None if it had others.

    Images are known by all of their names, because packing changes sizes, and a split the order.
    Version 0.2 took the names as the system spells them, and knew the rule `file` only.
    """
    known = (index.names_digest(), index.names_digest(bytes))
    match contents.get("split"):
        case {"names": names, "val_split": float(share), **more} if names in known:
            return HoldOut(share, str(more.get("split_by", "file")))
    return None


def _of_pack(config: Config, contents: dict[str, Any]) -> tuple[Source, str]:
    index, place, classes = sources.open_pack(config), str(config.data.root), tuple(contents["classes"])
    held_out = _known_hold_out(index, contents) if index.is_split_by_hash else None
    if held_out and held_out != index.hold_out:
        split = f"another split ({index.hold_out.describe()})"
        trained_on = "its validation images are ones that the model was trained on"
        problem = f"the pack {place} has the images of the training with {split}, so {trained_on}"
        remedy = f"give the folder that was packed, or pack it with --val-split {held_out.share:g}"
        raise RequestError(problem, remedy)
    if not len(index.val):
        raise RequestError(f"data.root={place} holds no image to evaluate the model on")
    index = _relabelled(config, index, classes)
    description = f"the {len(index.val):,} validation images of the pack {place}"
    return sources.source_from_index(place, index, config), description


def _relabelled(config: Config, index: Index, classes: tuple[str, ...]) -> Index:
    """Return the validation images labelled as a model of `classes` counts."""
    _check_classes(config, index.classes, classes)
    known = {class_of(name): label for label, name in enumerate(classes)}
    labels = np.array([known[class_of(name)] for name in index.classes], np.int32)
    if index.label_sets:  # each image keeps the number of its set
        sets = tuple(tuple(sorted(labels[[*names]].tolist())) for names in index.label_sets)
        return replace(index, classes=classes, label_sets=sets)
    return replace(index, val=replace(index.val, labels=labels[index.val.labels]), classes=classes)


def as_trained(source: Source, contents: dict[str, Any]) -> Source:
    """Return the source, with sets of one label for a model that gives several.

    Raises RequestError, in all processes, for several labels a picture if the model gives one.
    """
    if contents.get("several_labels"):
        of_one = tuple((label,) for label in range(len(source.classes)))
        return replace(source, label_sets=source.label_sets or of_one)
    if source.label_sets:
        problem = "the data has several labels a picture, and the model was trained to give one"
        raise RequestError(problem, "give data with one label a picture").collective()
    return source


def _check_classes(config: Config, names: tuple[str, ...], classes: tuple[str, ...]) -> None:
    known = {class_of(name) for name in classes}
    if unknown := sorted(name for name in names if class_of(name) not in known):
        problem = f"data.source={config.data.source} has classes that the model does not know"
        found = f"{list_first(unknown, 5)}; it knows {list_first(list(classes), 3)}"
        raise RequestError(f"{problem}: {found}", "give other data")
