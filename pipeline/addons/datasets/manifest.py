"""Scanning an image folder into an index, and the cache that saves the next start a scan.

The layout is torchvision's ImageFolder: `train/<class>/…` and `val/<class>/…`, or class folders
only. Of the latter a fraction is held out, chosen by a digest of each file's name, so that a file
that is added moves no other file between the splits. No torch here: a wrong layout fails in the
first second.
"""

import os
import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from pipeline.addons.datasets import file_errors
from pipeline.addons.datasets.checksums import digest_of_sums, read_sums
from pipeline.addons.datasets.folders import CACHE, Walk, check_any_class, check_layout, escaped_name
from pipeline.addons.datasets.holdout import HoldOut
from pipeline.addons.datasets.index import Index, Split, left_out
from pipeline.addons.datasets.names import class_of
from pipeline.errors import RequestError, list_first
from pipeline.files import atomic_write
from pipeline.streams import log

SPLITS = ("train", "val")
_CACHED = ".3.index"
"""End of a cached index's name. In version 0.2 hidden files were images, and it was .index."""
_MAKE = {"imagenet": "import imagenet ARCHIVES", "imagenette": "get imagenette", "cifar10": "get cifar10"}
"""Command that makes a folder of this name."""


def open_index(root: Path, hold_out: HoldOut, spare: Path, *, check_sizes: bool) -> Index:
    """Return the index of `root` from its cache if that is still current; else scan and cache it.

    The cache is in `root`, or in the folder `spare` if `root` is read-only. A cached index is
    current as long as no folder below `root` changed, so no file was added or removed.
    check_sizes: look at every file, since one may have another size. Raises RequestError if the
    layout is wrong.
    """
    make = f"pipeline data {_MAKE.get(root.name, 'make synthetic')} {shlex.quote(str(root))}"
    remedy = "give a folder with train/ and val/ in it, each with one folder per class, with data.root=FOLDER"
    if not os.path.exists(root):
        remedy += f", or make one with '{make}'"
    check_folder(root, f"data.root={root}", remedy)
    for cached in () if check_sizes else cached_indices(root, spare):
        if cached.hold_out == hold_out and not cached.table and is_current(cached, root):
            return cached
    index = scan(root, hold_out)
    save_index(index, root / CACHE, spare)
    return index


def save_index(index: Index, *folders: Path) -> None:
    """Save the index in the first of the folders that can be written. If none can, log why."""
    data = index.to_bytes()
    failures = []
    for folder in folders:
        try:
            file = folder / f"{index.digest[:16]}{_CACHED}"
            if not file.exists() or file.read_bytes() != data:
                folder.mkdir(parents=True, exist_ok=True)
                atomic_write(file, data, durable=False, shared=True)
            return
        except OSError as error:
            failures.append(f"{folder}: {error.strerror}")
    problem = f"the index of the images cannot be saved ({', '.join(failures)})"
    log(f"{problem}: the next start will scan the data again")


def find_cached_index(root: Path, spare: Path, digest: str) -> Index | None:
    """Return the index that had this digest if it is still cached, to say what changed since."""
    return next((index for index in cached_indices(root, spare) if index.digest == digest), None)


def cached_indices(root: Path, spare: Path) -> Iterator[Index]:
    """Yield the cached indices, newest first, without the damaged ones."""
    paths = [path for folder in (root / CACHE, spare) for path in folder.glob(f"*{_CACHED}")]
    for path in sorted(paths, key=lambda path: path.lstat().st_mtime_ns, reverse=True):
        try:
            with open(path, "rb", opener=file_errors.open_regular) as file:
                index = Index.from_bytes(np.memmap(file, np.uint8, "r"))
            is_valid = all(split.is_valid(index.num_labels) for split in (index.train, index.val))
        except (OSError, ValueError):
            continue
        if is_valid and index.digest.startswith(path.name.partition(".")[0]):
            yield index


def is_current(index: Index, root: Path) -> bool:
    """Return True if no file was added to a folder of the index, or removed, since it was made."""
    with suppress(OSError):
        if any(os.stat(root / folder).st_mtime_ns != time for folder, time in index.folders.items()):
            return False
        # Without train/ and val/, classes are in the root: making the cache changes its time.
        is_split = index.table or SPLITS[0] in index.folders
        if not is_split and tuple(Walk(root).classes("")) != index.classes:
            return False
        # no folder's time changes if the target of a link comes back
        for split in (index.train, index.val):
            for i in np.flatnonzero(split.sizes < 0).tolist():
                if os.path.exists(os.path.join(os.fsencode(root), split.name(i))):
                    return False
        return bool(index.table) or digest_of_sums(root) == index.sums
    return False


def scan(root: Path, hold_out: HoldOut) -> Index:
    """Return the index of the image folder `root`, after looking at every file.

    Raises RequestError that names the folder if the layout is wrong, OutageError if the storage
    fails.
    """
    walk = Walk(root)
    entries: dict[str, list[tuple[bytes, int, int]]] = {split: [] for split in SPLITS}
    with walk.errors():
        parents = [split for split in SPLITS if (root / split).is_dir()]
        if len(parents) < 2:  # with one of them, too: a link in the root may lead to a place that is away
            parents.append("")
        found = {parent: walk.classes(parent) for parent in parents}
        check_layout(root, found)
        classes = next(iter(found.values()))
        for parent, folders in found.items():
            if parent:
                walk.folders[parent] = os.stat(root / parent).st_mtime_ns
            for label, name in enumerate(classes):
                images = walk.images_of_class(os.path.join(parent.encode(), folders[name]))
                held_out = set() if parent else hold_out.chosen((file, label) for file, _ in images)
                for file, size in images:
                    entries[parent or ("val" if file in held_out else "train")].append((file, size, label))
        sums_digest, sums = digest_of_sums(root), read_sums(root)
    train, val = (Split.from_entries(entries[split], sums) for split in SPLITS)
    counts = np.bincount(train.labels, minlength=len(classes))
    if empty := [name for name, count in zip(classes, counts, strict=True) if not count]:
        problem = f"{root} has no image to train of class {list_first(empty, 5)}"
        advice = "data.split_by=file holds all of its images out; give data.split_by=class"
        raise RequestError(problem, advice)
    return Index(train, val, tuple(classes), sums_digest, walk.folders, hold_out, ignored=dict(walk.ignored))


def scan_validation(
    root: Path, classes: tuple[str, ...], hold_out: HoldOut | None
) -> tuple[Split, Counter[str]]:
    """Return the images to evaluate a model on, labelled as a model of `classes` counts.

    They are those of val/, or of class folders those that `hold_out` chooses (None: all). A class
    may be missing or empty. Returns also what is left out. Raises RequestError if a folder is not a
    class of the model, or if there is no image.
    """
    walk = Walk(root)
    labels = {class_of(name): label for label, name in enumerate(classes)}
    with walk.errors():
        parent = "val" if (root / "val").is_dir() else ""
        folders = walk.classes(parent)
        check_any_class(root, parent, folders)
        if unknown := [escaped_name(folder) for name, folder in folders.items() if name not in labels]:
            problem = f"{root} has class folders that the model does not know: {list_first(unknown, 5)}"
            raise RequestError(problem, "give data.root the folder that holds its classes")
        entries = [
            (file, size, labels[name])
            for name, folder in folders.items()
            for file, size in walk.images(os.path.join(parent.encode(), folder))
        ]
    if hold_out and not parent:
        chosen = hold_out.chosen((name, label) for name, _, label in entries)
        entries = [entry for entry in entries if entry[0] in chosen]
    if not entries:
        raise RequestError(f"data.root={root} holds no image to evaluate a model on{left_out(walk.ignored)}")
    return Split.from_entries(entries), walk.ignored


def check_folder(root: Path, given: str, remedy: str) -> None:
    """Raise RequestError if `root`, which the user wrote as `given`, cannot be listed.

    remedy: what to do if it is not a folder. Raises OutageError if the storage fails.
    """
    try:
        os.scandir(root).close()
    except (FileNotFoundError, NotADirectoryError):
        raise RequestError(f"{given} is not a folder", remedy) from None
    except OSError as error:
        file_errors.raise_if_outage(root, error)
        raise RequestError(f"{given} cannot be read: {error.strerror}") from None
