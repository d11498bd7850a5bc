"""Scanning an image folder into an index, and the cache that saves the next start a scan.

The layout is torchvision's ImageFolder: `train/<class>/…` and `val/<class>/…`, or class folders
only. Of the latter a fraction is held out, chosen by a digest of each file's name, so that a file
that is added moves no other file between the splits. No torch here: a wrong layout fails in the
first second.
"""

import os
import shlex
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from pipeline.data.access import (
    EXTENSIONS,
    HIDDEN,
    PLACE_OF_DATA,
    OutageError,
    check_folder,
    class_of,
    escaped_name,
    is_hidden,
    is_image,
    is_non_empty_folder,
    is_outage,
    normal_path,
    open_regular,
    outage_error,
    printable_name,
    read_error,
    split_of,
    why_ignored,
)
from pipeline.data.checksums import digest_of_sums, read_sums
from pipeline.data.holdout import HoldOut
from pipeline.data.index import MISSING, Index, Split, describe_ignored
from pipeline.errors import RequestError, list_first
from pipeline.files import atomic_write
from pipeline.streams import log

SPLITS = ("train", "val")
CACHE = ".pipeline-index"
_CACHED = ".3.index"
"""End of a cached index's name. Up to version 0.2 it was .index, and hidden files were images."""
Entries = dict[str, list[tuple[bytes, int, int]]]
"""(name below the root, bytes, label) of the images of each split."""


def open_index(root: Path, hold_out: HoldOut, spare: Path, *, check_sizes: bool) -> Index:
    """Return the index of `root` from its cache if that is still current; else scan and cache it.

    The cache is in `root`, or in the folder `spare` if `root` is read-only. A cached index is
    current as long as no folder below `root` changed, so no file was added or removed; with
    `check_sizes` the size of every file is compared too. Raises RequestError if the layout is
    wrong.
    """
    layout = "train/ and val/ in it, each with one folder per class"
    check_folder(root, f"data.root={root}", f"give a folder with {layout}, with data.root=FOLDER{_how_to_make(root)}")
    for cached in _cached(root, spare, _CACHED):
        if cached.hold_out == hold_out and _is_current(cached, root, check_sizes):
            return cached
    index = scan(root, hold_out)
    save_index(index, root / CACHE, spare)
    return index


def _how_to_make(root: Path) -> str:
    """Return ", or make one with …", a command that suits the folder's name, or ""."""
    if os.path.exists(root):  # a file
        return ""
    quoted = shlex.quote(str(root))
    default = f"make synthetic {quoted}"
    commands = {
        "imagenet": f"import imagenet ARCHIVES {quoted}",
        "imagenette": f"get imagenette {quoted}",
        "cifar10": f"get cifar10 {quoted}",
    }
    return f", or make one with 'pipeline data {commands.get(root.name, default)}'"


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
    line = f"the index of the images cannot be saved ({', '.join(failures)}): the next start will scan the data again"
    log(line)


def find_cached_index(root: Path, spare: Path, digest: str) -> Index | None:
    """Return the index that had this digest if it is still cached, to say what changed since."""
    return next((index for index in _cached(root, spare, ".index") if index.digest == digest), None)


def find_missing_folder(index: Index, root: Path) -> str | None:
    """Return a folder with images of the index that is missing or empty now, or None."""
    for folder in index.folders:
        # another system may have written the index, and spell the folder in another of these forms
        spellings = {folder, *(unicodedata.normalize(form, folder) for form in ("NFC", "NFD"))}
        if not any(is_non_empty_folder(root / spelling) for spelling in spellings):
            start = os.fsencode(folder) + b"/"
            if any(name.startswith(start) for name in index.names()):
                return folder
    return None


def _cached(root: Path, spare: Path, suffix: str) -> Iterator[Index]:
    """Yield the indices in files that end in `suffix`, newest first, without the damaged ones."""
    paths = [path for folder in (root / CACHE, spare) if os.path.isdir(folder) for path in folder.glob(f"*{suffix}")]
    for path in sorted(paths, key=lambda path: path.lstat().st_mtime_ns, reverse=True):
        try:
            with open(path, "rb", opener=open_regular) as file:
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
        base = os.fsencode(root)
        has_splits = SPLITS[0] in index.folders
        if not has_splits and tuple(_Scan(root).subfolders(b"")) != index.classes:
            return False
        sizes_match = (_sizes_match(split, base, check_sizes) for split in (index.train, index.val))
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


def scan(root: Path, hold_out: HoldOut) -> Index:
    """Return the index of the image folder `root`, after looking at every file.

    Raises RequestError that names the folder if the layout is wrong, OutageError if the storage
    fails.
    """
    found = _Scan(root)
    entries: Entries = {split: [] for split in SPLITS}
    with found.errors():
        present = [split for split in SPLITS if (root / split).is_dir()]
        if len(present) == 1:
            # raises OutageError if the other is a link to a place that is away
            raise _missing_split(root, present[0], [*found.subfolders(b"").values()])
        parents = {split: found.class_folders(split) for split in present} or {"": found.subfolders(b"")}
        classes = next(iter(parents.values()))
        if not classes:
            raise RequestError(
                f"data.root={root} holds no folders", "it needs train/ and val/, each with one folder per class"
            )
        if present:
            _check_same_classes(parents["train"], parents["val"])
        _refuse_splits_as_classes(root, [*classes.values()])
        for parent, folders in parents.items():
            if parent:
                found.folders[parent] = os.stat(root / parent).st_mtime_ns
            for label, name in enumerate(classes):
                images = found.class_images(os.path.join(parent.encode(), folders[name]))
                chosen = set() if parent else hold_out.chosen((file, label) for file, _ in images)
                for file, size in images:
                    entries[parent or ("val" if file in chosen else "train")].append((file, size, label))
        sums, sums_digest = read_sums(root), digest_of_sums(root)
    if len(classes) < 2:
        raise RequestError(
            f"data.root={root} holds one class folder, {next(iter(classes))}/", "at least two are needed"
        )
    train, val = (Split.from_entries(entries[split], sums) for split in SPLITS)
    index = Index(train, val, tuple(classes), sums_digest, found.folders, hold_out, ignored=dict(found.ignored))
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
        remedy = "add images"
        if np.bincount(index.train.labels).max() > 1:  # the only image of a class is never held out
            remedy += ", or give a larger data.val_split (for a pack: --val-split)"
        rule = "of each class is none"
        if index.hold_out.by == "file":
            rule, remedy = "with data.split_by=file draws no file", f"{remedy}, or give data.split_by=class"
        raise RequestError(
            f"{root} has no image to validate on", f"data.val_split={index.hold_out.share:g} {rule}; {remedy}"
        )


def scan_validation(
    root: Path, classes: tuple[str, ...], hold_out: HoldOut | None, ignored: Counter[str] | None = None
) -> Split:
    """Return the images to evaluate a model on, labelled as a model of `classes` counts.

    They are those of val/, or of class folders those that `hold_out` chooses (None: all). A class
    may be missing or empty. `ignored` gets the number of what is left out. Raises RequestError if a
    folder is not a class of the model, or if there is no image.
    """
    found = _Scan(root, Counter() if ignored is None else ignored)
    labels = {class_of(name): label for label, name in enumerate(classes)}
    with found.errors():
        parent = "val" if (root / "val").is_dir() else ""
        folders = found.class_folders(parent)
        unknown = [folder for name, folder in folders.items() if name not in labels]
        if unknown:
            names = list_first([escaped_name(folder) for folder in unknown], 5)
            parts = {split_of(folder): os.fsdecode(folder) for folder in reversed(unknown)}
            part = parts.get("val") or parts.get("test")
            advice = f": to evaluate on {part}/, give data.root={shlex.quote(str(root / part))}" if part else ""
            raise RequestError(f"{root} has class folders that the model does not know: {names}{advice}")
        entries = [
            (file, size, labels[name])
            for name, folder in folders.items()
            for file, size in found.images(os.path.join(parent.encode(), folder))
        ]
    if hold_out and not parent:
        chosen = hold_out.chosen((name, label) for name, _, label in entries)
        entries = [entry for entry in entries if entry[0] in chosen]
    if not entries:
        raise RequestError(f"data.root={root} holds no image to evaluate the model on{_left_out(found.ignored)}")
    return Split.from_entries(entries)


def _missing_split(root: Path, present: str, folders: list[bytes]) -> RequestError:
    """Return the error of a folder with train/ or val/ alone. folders: all that are in it."""
    missing = "val" if present == "train" else "train"
    similar = [printable_name(name) for name in folders if split_of(name) == missing]
    tests = [printable_name(name) for name in folders if split_of(name) == "test" and missing == "val"]
    advice = f"add {missing}/ with one folder per class"
    if similar:
        advice = f"rename {similar[0]}/ to {missing}/"
    elif tests:
        advice += f", or rename {tests[0]}/ to {missing}/ to validate on it"
    return RequestError(f"data.root={root} has {present}/ but no {missing}/", advice)


def _refuse_splits_as_classes(root: Path, classes: list[bytes]) -> None:
    """Raise RequestError if all class folders are named as splits, such as Train and Validation."""
    parts = {name: split_of(name) for name in classes}
    if not all(parts.values()):
        return
    advice = "give a folder with train/ and val/, each with one folder per class, or with class folders only"
    names = [printable_name(name) for name in classes]
    train, val = (
        next((printable_name(name) for kind in kinds for name in classes if parts[name] == kind), None)
        for kinds in (("train",), ("val", "test"))
    )
    if train and val:
        advice = f"rename {train}/ to train/ and {val}/ to val/"
    found = "the folders" if len(names) > 1 else "the folder"
    raise RequestError(f"data.root={root} holds no classes, but {found} {list_first(names, 5)}", advice)


def _left_out(ignored: dict[str, int]) -> str:
    return f" (left out: {describe_ignored(ignored)})" if ignored else ""


class _Scan:
    """A walk through an image folder, and what it found besides images."""

    def __init__(self, root: Path, ignored: Counter[str] | None = None) -> None:
        self._root = root
        self._base = os.fsencode(root)
        self.folders: dict[str, int] = {}
        """The modification time of each folder with images."""
        self.ignored: Counter[str] = Counter() if ignored is None else ignored
        """The number of files and folders that are left out, by the reason."""

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise RequestError or OutageError that names the place for an error of the system."""
        try:
            yield
        except OSError as error:
            path = error.filename or self._root  # an error in the middle of a listing names no file
            if is_outage(error):
                raise outage_error(path, error) from None
            name = printable_name(os.fsencode(path))
            problem = f"data.root={self._root} cannot be read: {name}: {error.strerror}"
            raise RequestError(problem, PLACE_OF_DATA) from None

    def subfolders(self, parent: bytes) -> dict[str, bytes]:
        """Return the folders in `parent`, a name below the root, by their classes.

        Raises RequestError if two folders have the same class.
        """
        place = os.path.join(self._base, parent) if parent else self._base
        names = []
        with os.scandir(place) as found:
            for entry in found:
                if is_hidden(entry.name):
                    if entry.name != CACHE.encode():
                        self.ignored[HIDDEN] += 1
                elif _is_folder(entry):
                    names.append(entry.name)
                elif is_image(entry.name):
                    self.ignored["outside of the class folders"] += 1
        classes: dict[str, bytes] = {}
        for name in sorted(names, key=lambda name: (normal_path(name), name)):
            other = classes.setdefault(class_of(name), name)
            if other != name:
                raise RequestError(
                    f"{printable_name(place)} has two folders whose names look alike, {escaped_name(other)} and"
                    f" {escaped_name(name)}",
                    "move the images of one into the other",
                )
        return classes

    def class_folders(self, parent: str) -> dict[str, bytes]:
        """Return the class folders in train/, val/ or the root. Raises RequestError if none."""
        names = self.subfolders(parent.encode())
        if names:
            return names
        split = parent or str(self._root)
        images = sum(map(is_image, os.listdir(os.path.join(self._base, parent.encode()))))
        if images:
            raise RequestError(
                f"{split}/ is flat",
                f"it holds images ({images:,}) but no class folders; sort them into {split}/<class>/,"
                " with the class names of train/",
            )
        raise RequestError(f"{split}/ holds no class folders", "it needs one for each class, with images in it")

    def class_images(self, folder: bytes) -> list[tuple[bytes, int]]:
        """Return the images of a class folder. Raises RequestError if there are none."""
        before = self.ignored.copy()
        images = list(self.images(folder))
        if not images:
            kinds = " ".join(kind.decode() for kind in EXTENSIONS)
            raise RequestError(
                f"class folder {printable_name(folder)}/ holds no image ({kinds}){_left_out(self.ignored - before)}",
                "add images or remove the folder",
            )
        return images

    def images(self, folder: bytes, above: Sequence[tuple[int, int]] = ()) -> Iterator[tuple[bytes, int]]:
        """Yield (name below the root, bytes) of each image in `folder` and the folders in it.

        above: the device and inode of each folder that holds `folder`. Raises RequestError that
        names a link which leads back to one of them.
        """
        path = os.path.join(self._base, folder)
        status = os.stat(path)
        if not above:
            above = [(place.st_dev, place.st_ino) for place in (os.stat(self._base), os.stat(os.path.dirname(path)))]
        here = (status.st_dev, status.st_ino)
        if here in above and (link := _last_link(self._base, folder)):
            raise RequestError(f"{printable_name(link)} is a link to a folder that it is in", "remove the link")
        self.folders[os.fsdecode(folder)] = status.st_mtime_ns
        with os.scandir(path) as found:
            for entry in found:
                name = os.path.join(folder, entry.name)
                if is_hidden(entry.name):
                    self.ignored[HIDDEN] += 1
                elif is_image(entry.name):
                    size = _size(entry)
                    if size != MISSING and entry.is_dir():
                        raise RequestError(
                            f"{printable_name(entry.path)} is a folder that is named like an image",
                            "rename or remove it",
                        )
                    yield name, size
                elif _is_folder(entry):
                    yield from self.images(name, [*above, here])
                else:
                    self.ignored[why_ignored(entry.name)] += 1


def _check_same_classes(train: dict[str, bytes], val: dict[str, bytes]) -> None:
    if train.keys() != val.keys():
        differing = [f"{escaped_name(train[name])} in train/ only" for name in train if name not in val]
        differing += [f"{escaped_name(val[name])} in val/ only" for name in val if name not in train]
        raise RequestError(
            f"the classes of train/ and val/ differ: {list_first(differing, 5)}", "both need the same class folders"
        )


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
        failure = read_error(entry.path, error)
        if isinstance(failure, OutageError):
            raise failure from None
        return MISSING
