"""Image folders as people have them: the walk that finds the images, and what may be wrong there.

`manifest` makes an index of what the walk finds.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.addons.datasets import file_errors, names
from pipeline.addons.datasets.index import MISSING, Index, left_out
from pipeline.addons.datasets.names import normal_path, printable_name
from pipeline.data.interface import OutageError
from pipeline.errors import RequestError, list_first

CACHE = ".pipeline-index"
"""The folder of a data set that keeps its index."""
_SPLIT_NAME = re.compile(
    r"(?:(?P<train>train|training|trn)|(?P<val>val|valid|validation|validate|eval|evaluation|dev|hold[\W_]*out)|"
    r"(?P<test>tests?|testing|tst)|(?P<other>images?|imgs?|jpegimages|labels?|annotations?|masks?|unlabell?ed))"
    r"(?:[\W_]*(?:sets?|data|datasets?|split|images?|imgs?|\d+))*",
    re.IGNORECASE,
)  # fmt: skip
_EACH = "with one folder per class"


class Walk:
    """A walk through an image folder, and what it found besides images."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._base = os.fsencode(root)
        self.folders: dict[str, int] = {}  # the modification time of each folder with images
        # the number of files and folders that are left out, by the reason
        self.ignored: Counter[str] = Counter()

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise RequestError or OutageError that names the place for an error of the system."""
        try:
            yield
        except OSError as error:
            path = error.filename or self._root  # an error in the middle of a listing names no file
            file_errors.raise_if_outage(path, error)
            name = printable_name(os.fsencode(path))
            problem = f"data.root={self._root} cannot be read: {name}: {error.strerror}"
            raise RequestError(problem, file_errors.PLACE_OF_DATA) from None

    def classes(self, parent: str) -> dict[str, bytes]:
        """Return the folders in `parent`, a name below the root, by their classes."""
        place = os.path.join(self._base, parent.encode()) if parent else self._base
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
        for name in sorted(folders, key=lambda name: (normal_path(name), name)):
            other = classes.setdefault(names.class_of(name), name)
            if other != name:
                both = f"{escaped_name(other)} and {escaped_name(name)}"
                problem = f"{printable_name(place)} has two folders whose names look alike, {both}"
                raise RequestError(problem, "move the images of one into the other")
        return classes

    def images_of_class(self, folder: bytes) -> list[tuple[bytes, int]]:
        """Return `images` of a class folder. Raises RequestError if there are none."""
        before = self.ignored.copy()
        if images := list(self.images(folder)):
            return images
        kinds = " ".join(kind.decode() for kind in names.EXTENSIONS)
        problem = f"class folder {printable_name(folder)}/ holds no image ({kinds})"
        raise RequestError(problem + left_out(self.ignored - before), "add images or remove the folder")

    def images(self, folder: bytes, above: tuple[os.stat_result, ...] = ()) -> Iterator[tuple[bytes, int]]:
        """Yield (name below the root, bytes) of each image in `folder` and the folders in it.

        above: the status of each folder that holds `folder`, b"" for the root.
        """
        path = os.path.join(self._base, folder)
        if folder and not above:
            above = (os.stat(self._base), os.stat(os.path.dirname(path)))
        status = os.stat(path)
        if any(os.path.samestat(status, other) for other in above):
            problem = f"{printable_name(path)} leads back to a folder that it is in"
            raise RequestError(problem, "remove the link")
        self.folders[os.fsdecode(folder)] = status.st_mtime_ns
        with os.scandir(path) as found:
            for entry in found:
                name = os.path.join(folder, entry.name)
                if names.is_hidden(entry.name):
                    self.ignored[names.HIDDEN] += 1
                elif names.is_image(entry.name):
                    size = size_of(entry)
                    if size != MISSING and entry.is_dir():
                        problem = f"{printable_name(entry.path)} is a folder that is named like an image"
                        raise RequestError(problem, "rename or remove it")
                    yield name, size
                elif _is_folder(entry):
                    yield from self.images(name, (*above, status))
                else:
                    self.ignored[names.why_ignored(entry.name)] += 1


def _is_folder(entry: os.DirEntry[bytes]) -> bool:
    """Return True for a folder. Raises OutageError if the place that a link leads to is away."""
    if entry.is_symlink():  # for others, the listing says it without a system call
        size_of(entry)
    return entry.is_dir()


def size_of(entry: os.DirEntry[bytes]) -> int:
    """Return the size, or MISSING. Raises OutageError if the place that a link leads to is away."""
    try:
        return entry.stat().st_size
    except OSError as error:
        failure = file_errors.read_error(entry.path, error)
        if isinstance(failure, OutageError):
            raise failure from None
        return MISSING


def check_layout(root: Path, found: dict[str, dict[str, bytes]]) -> None:
    """Raise RequestError that names what is wrong with the class folders of `root`.

    found: the folders by their classes, in train/ and val/ as far as they exist, and in the root
    ("") unless both do.
    """
    given = f"data.root={root}"
    if len(found) == 2 and "" in found:
        present = next(iter(found))
        missing = "val" if present == "train" else "train"
        advice = _renames([*found[""].values()]) or f"add {missing}/ {_EACH}"
        raise RequestError(f"{given} has {present}/ but no {missing}/", advice)
    for parent, folders in found.items():
        check_any_class(root, parent, folders)
    classes, *others = found.values()
    for val in others:
        differing = [f"{escaped_name(classes[name])} in train/ only" for name in classes if name not in val]
        differing += [f"{escaped_name(val[name])} in val/ only" for name in val if name not in classes]
        if differing:
            problem = f"the classes of train/ and val/ differ: {list_first(differing, 5)}"
            raise RequestError(problem, "both need the same class folders")
    if all(map(split_of, classes.values())):
        noun = "folders" if len(classes) > 1 else "folder"
        listed = list_first([printable_name(name) for name in classes.values()], 5)
        advice = f"give a folder with train/ and val/, each {_EACH}, or with class folders only"
        problem = f"{given} holds no classes, but the {noun} {listed}"
        raise RequestError(problem, _renames([*classes.values()]) or advice)
    if len(classes) < 2:
        raise RequestError(f"{given} holds one class folder, {next(iter(classes))}/", "give two or more")


def check_any_class(root: Path, parent: str, folders: dict[str, bytes]) -> None:
    """Raise RequestError if there are no class folders in `parent`, a name below the root."""
    if not folders:
        place, needed = f"data.root={root}", f"it needs train/ and val/, each {_EACH}"
        if parent:
            place, needed = f"{parent}/ of {place}", f"sort the images into {parent}/<class>/"
        raise RequestError(f"{place} holds no folders", needed)


def split_of(name: bytes) -> str | None:
    """Return "train", "val", "test" or "other" for a name of a split or of its parts, else None."""
    match = _SPLIT_NAME.fullmatch(name.decode(errors="replace").strip())
    return match and match.lastgroup


def _renames(folders: list[bytes]) -> str:
    """Return how to rename folders like Train/ and Validation/; "" if one of them is missing."""
    kinds = {split_of(name): printable_name(name) for name in reversed(folders)}
    pairs = {"train": kinds.get("train"), "val": kinds.get("val") or kinds.get("test")}
    if None in pairs.values():
        return ""
    return "rename " + " and ".join(f"{old}/ to {new}/" for new, old in pairs.items() if old != new)


def changes(before: Index, now: Index) -> Iterator[str]:
    """Yield what changed from one index to another: one line for each class or file."""
    for label in sorted(set(before.classes) ^ set(now.classes)):
        yield f"class {label} {'is gone' if label in before.classes else 'is new'}"
    if (before.sums is None) != (now.sums is None):
        yield f"SHA256SUMS is {'new' if before.sums is None else 'gone'}"
    for ours, theirs in ((before.train, now.train), (before.val, now.val)):
        old = {normal_path(ours.name(i)): i for i in range(len(ours))}
        new = {normal_path(theirs.name(i)): i for i in range(len(theirs))}
        for name in sorted(old.keys() | new.keys()):
            if name not in new:
                yield f"{printable_name(name)} is gone"
            elif name not in old:
                yield f"{printable_name(name)} is new"
            elif ours.sizes[old[name]] != theirs.sizes[new[name]]:
                was, has = ours.sizes[old[name]], theirs.sizes[new[name]]
                yield f"{printable_name(name)} had {was:,} bytes and has {has:,}"
            elif before.label_name(ours.labels[old[name]]) != now.label_name(theirs.labels[new[name]]):
                yield f"{printable_name(name)} has another label"
            elif before.sums and now.sums and ours.checksum(old[name]) != theirs.checksum(new[name]):
                yield f"{printable_name(name)} has another sum in SHA256SUMS"


def escaped_name(name: bytes) -> str:
    """Return a name for a message, with Python's spelling if another name could look like it."""
    text = name.decode(errors="backslashreplace")
    is_plain = text.isascii() and text.isprintable() and text == text.strip()
    return text if is_plain else f"{printable_name(name).strip()} ({text!a})"
