"""Scanning an image folder into an index, and the cache that saves the next start a scan.

The layout is torchvision's ImageFolder: `train/<class>/…` and `val/<class>/…`, or class folders
only. Of the latter a fraction is held out, chosen by a digest of each file's name, so that a file
that is added moves no other file between the splits. No torch here: a wrong layout fails in the
first second. `addons.datasets.folders` says what is wrong with it.
"""

import hashlib
import os
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from pipeline.data import access, names
from pipeline.data.holdout import HoldOut
from pipeline.data.index import MISSING, Index, Split
from pipeline.data.interface import OutageError
from pipeline.errors import RequestError, list_first
from pipeline.files import atomic_write
from pipeline.lazy import part
from pipeline.streams import log

SPLITS = ("train", "val")
SUMS = "SHA256SUMS"
"""The file with the SHA-256 of each image, as the tool `sha256sum` writes it."""
CACHE = ".pipeline-index"
_CACHED = ".3.index"
"""End of a cached index's name. Up to version 0.2 it was .index, and hidden files were images."""


def open_index(root: Path, hold_out: HoldOut, spare: Path, *, check_sizes: bool) -> Index:
    """Return the index of `root` from its cache if that is still current; else scan and cache it.

    The cache is in `root`, or in the folder `spare` if `root` is read-only. A cached index is
    current as long as no folder below `root` changed, so no file was added or removed; with
    `check_sizes` the size of every file is compared too. Raises RequestError if the layout is
    wrong.
    """
    layout = "train/ and val/ in it, each with one folder per class"
    how_to_make = "" if os.path.exists(root) else part("how to make a folder")(root)
    access.check_folder(
        root, f"data.root={root}", f"give a folder with {layout}, with data.root=FOLDER{how_to_make}"
    )
    for cached in _cached(root, spare, _CACHED):
        if cached.hold_out == hold_out and _is_current(cached, root, check_sizes):
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
            folder.mkdir(parents=True, exist_ok=True)
            atomic_write(folder / f"{index.digest[:16]}{_CACHED}", data, durable=False, shared=True)
            return
        except OSError as error:
            failures.append(f"{folder}: {error.strerror}")
    log(
        f"the index of the images cannot be saved ({', '.join(failures)}): the next start will scan the data again"
    )


def find_cached_index(root: Path, spare: Path, digest: str) -> Index | None:
    """Return the index that had this digest if it is still cached, to say what changed since."""
    return next((index for index in _cached(root, spare, ".index") if index.digest == digest), None)


def find_missing_folder(index: Index, root: Path) -> str | None:
    """Return a folder with images of the index that is missing or empty now, or None."""
    for folder in index.folders:
        # another system may have written the index, and spell the folder in another of these forms
        spellings = {folder, *(unicodedata.normalize(form, folder) for form in ("NFC", "NFD"))}
        if not any(access.is_non_empty_folder(root / spelling) for spelling in spellings):
            start = os.fsencode(folder) + b"/"
            if any(name.startswith(start) for name in index.names()):
                return folder
    return None


def _cached(root: Path, spare: Path, suffix: str) -> Iterator[Index]:
    """Yield the indices in files that end in `suffix`, newest first, without the damaged ones."""
    paths = [
        path
        for folder in (root / CACHE, spare)
        if os.path.isdir(folder)
        for path in folder.glob(f"*{suffix}")
    ]
    for path in sorted(paths, key=lambda path: path.lstat().st_mtime_ns, reverse=True):
        try:
            with open(path, "rb", opener=access.open_regular) as file:
                index = Index.from_bytes(np.memmap(file, np.uint8, "r"))
            is_valid = all(split.is_valid(len(index.classes)) for split in (index.train, index.val))
        except (OSError, ValueError):
            continue
        if is_valid and index.digest.startswith(path.name.partition(".")[0]):
            yield index


def _is_current(index: Index, root: Path, check_sizes: bool) -> bool:
    with suppress(OSError):
        if any(os.stat(root / folder).st_mtime_ns != time for folder, time in index.folders.items()):
            return False
        # Without train/ and val/, classes are in the root: making the cache changes its time.
        if SPLITS[0] not in index.folders and tuple(Walk(root).classes(b"")) != index.classes:
            return False
        sizes_match = (
            _sizes_match(split, os.fsencode(root), check_sizes) for split in (index.train, index.val)
        )
        return digest_of_sums(root) == index.sums and all(sizes_match)
    return False


def _sizes_match(split: Split, base: bytes, check_all: bool) -> bool:
    # missing files are always checked: no folder's time changes if the target of a link comes back
    for i in range(len(split)) if check_all else np.flatnonzero(split.sizes == MISSING).tolist():
        size = MISSING
        with suppress(OSError):
            size = os.stat(os.path.join(base, split.name(i))).st_size
        if size != split.sizes[i]:
            return False
    return True


def digest_of_sums(root: Path) -> str | None:
    """Return the SHA-256 of the file SHA256SUMS, or None if there is none. Raises OSError."""
    with suppress(FileNotFoundError), open(root / SUMS, "rb", opener=access.open_regular) as file:
        return hashlib.sha256(file.read()).hexdigest()
    return None


def scan(root: Path, hold_out: HoldOut) -> Index:
    """Return the index of the image folder `root`, after looking at every file.

    Raises RequestError that names the folder if the layout is wrong, OutageError if the storage
    fails.
    """
    walk = Walk(root)
    entries: dict[str, list[tuple[bytes, int, int]]] = {split: [] for split in SPLITS}
    with walk.errors():
        parents = [split for split in SPLITS if (root / split).is_dir()]
        # with one of them alone, also the root: a link in it may lead to a place that is away
        found = {
            parent: walk.classes(parent.encode())
            for parent in (parents if len(parents) == 2 else [*parents, ""])
        }
        part("check layout")(root, found)
        classes = next(iter(found.values()))
        for parent, folders in found.items():
            if parent:
                walk.folders[parent] = os.stat(root / parent).st_mtime_ns
            for label, name in enumerate(classes):
                images = walk.images_of_class(os.path.join(parent.encode(), folders[name]))
                held_out = set() if parent else hold_out.chosen((file, label) for file, _ in images)
                for file, size in images:
                    entries[parent or ("val" if file in held_out else "train")].append((file, size, label))
        sums_digest = digest_of_sums(root)
        sums = None if sums_digest is None else part("read sums")(root)
    train, val = (Split.from_entries(entries[split], sums) for split in SPLITS)
    index = Index(train, val, tuple(classes), sums_digest, walk.folders, hold_out, ignored=dict(walk.ignored))
    check_train_classes(index, root)
    return index


def check_train_classes(index: Index, root: str | Path) -> None:
    """Raise RequestError that names the classes without an image to train, if there are any."""
    counts = np.bincount(index.train.labels, minlength=len(index.classes))
    empty = [index.classes[label] for label in np.flatnonzero(counts == 0)]
    if empty:
        raise RequestError(
            f"{root} has no image to train of class {list_first(empty, 5)}",
            "data.split_by=file holds all of its images"
            " out; add images there, remove the folder, or give data.split_by=class",
        )


def check_has_validation(index: Index, root: str | Path) -> None:
    """Raise RequestError if there is no image to validate on."""
    if not len(index.val):
        rule, other = "of each class is none", ""
        if index.hold_out.by == "file":
            rule, other = "with data.split_by=file draws no file", ", or give data.split_by=class"
        remedy = f"add images, or give a larger data.val_split (for a pack: --val-split){other}"
        problem = f"{root} has no image to validate on: data.val_split={index.hold_out.share:g} {rule}"
        raise RequestError(problem, remedy)


class Walk:
    """A walk through an image folder, and what it found besides images."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._base = os.fsencode(root)
        self.folders: dict[str, int] = {}
        """The modification time of each folder with images."""
        self.ignored: Counter[str] = Counter()
        """The number of files and folders that are left out, by the reason."""

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise RequestError or OutageError that names the place for an error of the system."""
        try:
            yield
        except OSError as error:
            path = error.filename or self._root  # an error in the middle of a listing names no file
            access.raise_if_outage(path, error)
            name = names.printable_name(os.fsencode(path))
            problem = f"data.root={self._root} cannot be read: {name}: {error.strerror}"
            raise RequestError(problem, access.PLACE_OF_DATA) from None

    def classes(self, parent: bytes) -> dict[str, bytes]:
        """Return the folders in `parent`, a name below the root, by their classes.

        Raises RequestError if two folders have the same class.
        """
        place = os.path.join(self._base, parent) if parent else self._base
        folders = []
        with os.scandir(place) as found:
            for entry in found:
                if names.is_hidden(entry.name):
                    if entry.name != CACHE.encode():
                        self.ignored[names.HIDDEN] += 1
                elif _is_folder(entry):
                    folders.append(entry.name)
                elif names.is_image(entry.name):
                    self.ignored["outside of the class folders"] += 1
        classes: dict[str, bytes] = {}
        for name in sorted(folders, key=lambda name: (names.normal_path(name), name)):
            other = classes.setdefault(names.class_of(name), name)
            if other != name:
                raise RequestError(
                    f"{names.printable_name(place)} has two folders whose names look alike,"
                    f" {names.escaped_name(other)} and {names.escaped_name(name)}",
                    "move the images of one into the other",
                )
        return classes

    def images_of_class(self, folder: bytes) -> list[tuple[bytes, int]]:
        """Return `images` of a class folder. Raises RequestError if there are none."""
        before = self.ignored.copy()
        if images := list(self.images(folder)):
            return images
        raise part("error of an empty class")(folder, self.ignored - before)

    def images(self, folder: bytes, above: Sequence[tuple[int, int]] = ()) -> Iterator[tuple[bytes, int]]:
        """Yield (name below the root, bytes) of each image in `folder` and the folders in it.

        above: the device and inode of each folder that holds `folder`. Raises RequestError that
        names a link which leads back to one of them.
        """
        path = os.path.join(self._base, folder)
        status = os.stat(path)
        if not above:
            above = [
                (place.st_dev, place.st_ino)
                for place in (os.stat(self._base), os.stat(os.path.dirname(path)))
            ]
        here = (status.st_dev, status.st_ino)
        if here in above and (link := _last_link(self._base, folder)):
            raise RequestError(
                f"{names.printable_name(link)} is a link to a folder that it is in", "remove the link"
            )
        self.folders[os.fsdecode(folder)] = status.st_mtime_ns
        with os.scandir(path) as found:
            for entry in found:
                name = os.path.join(folder, entry.name)
                if names.is_hidden(entry.name):
                    self.ignored[names.HIDDEN] += 1
                elif names.is_image(entry.name):
                    size = _size(entry)
                    if size != MISSING and entry.is_dir():
                        raise RequestError(
                            f"{names.printable_name(entry.path)} is a folder that is named like an image",
                            "rename or remove it",
                        )
                    yield name, size
                elif _is_folder(entry):
                    yield from self.images(name, [*above, here])
                else:
                    self.ignored[names.why_ignored(entry.name)] += 1


def _last_link(base: bytes, folder: bytes) -> bytes | None:
    """Return the last link in the path of `folder` below `base`, or None."""
    while folder:
        path = os.path.join(base, folder)
        if os.path.islink(path):
            return path
        folder = os.path.dirname(folder)
    return None


def _is_folder(entry: os.DirEntry[bytes]) -> bool:
    """Return True for a folder. The listing says so: only for a link it takes a system call.

    Raises OutageError if the place that a link leads to is away.
    """
    if entry.is_symlink():
        _size(entry)
    return entry.is_dir()


def _size(entry: os.DirEntry[bytes]) -> int:
    """Return the size, or MISSING. Raises OutageError if the place that a link leads to is away."""
    try:
        return entry.stat().st_size
    except OSError as error:
        failure = access.read_error(entry.path, error)
        if isinstance(failure, OutageError):
            raise failure from None
        return MISSING
