"""Which images there are: an index of an image folder, flat in memory, with a digest over names, sizes and labels.

Promise: two processes with the same digest agree on what sample id 17 is, and a file that was added, removed or changed
in size gives another digest and can be named. Why memory stays flat: names are one byte buffer with offsets, not a Python
list (1.28 M tuples grow each worker from 37 to 257 MB in an epoch as their reference counts are touched; this does not).

The layout is torchvision's ImageFolder: `train/<class>/…` and `val/<class>/…`, or class folders alone, of which a share
is held out by a digest of each file's name, so that adding a file moves no other. Names are bytes: a file system's names
need not be UTF-8. No torch in here: a wrong layout is an error of the first second.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import RequestError, RunError, StorageError, TemporaryError
from pipeline.files import atomic_write
from pipeline.plan import DataSize

EXTENSIONS = (b".jpg", b".jpeg", b".png", b".ppm", b".bmp", b".pgm", b".tif", b".tiff", b".webp")
SPLITS = ("train", "val")
SUMS = "SHA256SUMS"
CACHE = ".pipeline-index"
_MAGIC = b"pipeline-index-2\n"
MAX_FILE_BYTES = 1 << 28  # an uncompressed picture of data.images.MAX_PIXELS is 229 MiB
_DTYPES = ["|u1", "<i8", "<i8", "<i4", "|u1", "<i8"]
_AT_ONCE = 10_000
MISSING = -1  # size of a name that leads to no file, such as a dangling link


_OF_A_FILE = (
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG,
)  # fmt: skip
"""Errors that a file itself may cause. Every other one is the storage's: EIO, ESTALE, ETIMEDOUT, …"""


class UnreadableError(Exception):
    """An image's file that cannot be read, or is not the one that was indexed."""


class OutageError(TemporaryError):
    """The storage that holds the images cannot be read. This says nothing about any image."""


def is_outage(error: OSError) -> bool:
    """Return whether an error is the storage's, whatever the file."""
    return error.errno not in _OF_A_FILE


def out_of_reach(path: bytes | Path, error: OSError) -> OutageError:
    """Return the OutageError that names the file and the system's error."""
    return OutageError(
        f"the data is out of reach ({show(os.fsencode(path))}: {error.strerror}): the same command goes on once it is back"
    )


def classify(path: bytes, error: OSError) -> UnreadableError | OutageError:
    """Return what a failed read of an indexed file means: a defect of this file, or an outage of the storage.

    It is the file's own defect if the folder that holds it can be listed and the file still cannot be opened. A mounted
    volume that is gone leaves no folder, or an empty one.
    """
    if not is_outage(error) and holds_something(os.path.dirname(os.path.realpath(path))):
        try:
            open(path, "rb", buffering=0).close()  # the storage may have come back in between
        except OSError as again:
            if not is_outage(again):
                return UnreadableError(again.strerror)
    return out_of_reach(path, error)


def holds_something(folder: bytes | Path) -> bool:
    """Return whether there is a folder that can be listed and is not empty."""
    try:
        with os.scandir(folder) as found:
            return any(True for _ in found)
    except OSError:
        return False


@dataclass(frozen=True)
class Split:
    """The images of one split: names: [bytes] uint8, ends: [N] int64, sizes: [N] int64, labels: [N] int32; where SHA256SUMS
    is written, sums: [N × 32] uint8, zeros for a file that it lacks; in a pack, places: [N × 3] int64, of each its shard,
    its offset there and its CRC-32."""

    names: NDArray[np.uint8]
    ends: NDArray[np.int64]
    sizes: NDArray[np.int64]
    labels: NDArray[np.int32]
    sums: NDArray[np.uint8]
    places: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ends)

    def name(self, i: int) -> bytes:
        """Path of image i below the root, as the file system spells it."""
        start = int(self.ends[i - 1]) if i else 0
        return self.names[start : int(self.ends[i])].tobytes()

    def is_sound(self, num_classes: int) -> bool:
        """Return True if the arrays agree with each other and no name leads out of the root. The index may be hostile."""
        count = len(self)
        fits = (
            len(self.sizes) == len(self.labels) == count > 0
            and len(self.sums) in (0, 32 * count)
            and len(self.places) in (0, 3 * count)
            and int(self.ends[0]) > 0
            and bool((np.diff(self.ends) > 0).all())
            and int(self.ends[-1]) == len(self.names)
            and int(self.labels.min()) >= 0
            and int(self.labels.max()) < num_classes
        )
        return fits and self._stays_inside()

    def _stays_inside(self) -> bool:
        """Return True if no name is absolute, has a part `..` or holds a NUL."""
        names = self.names.tobytes()
        if b"\0" in names or (self.names[np.append(0, self.ends[:-1])] == ord("/")).any():
            return False
        at = names.find(b"..")  # few names hold two dots at all
        while at >= 0:
            i = int(np.searchsorted(self.ends, at, side="right"))
            if b".." in self.name(i).split(b"/"):
                return False
            at = names.find(b"..", int(self.ends[i]))
        return True

    def sum(self, i: int) -> bytes:
        return self.sums[32 * i : 32 * i + 32].tobytes()

    @classmethod
    def of(cls, entries: list[tuple[bytes, int, int]], sums: dict[bytes, bytes] | None = None) -> "Split":
        """From (name, size, label), in any order; sample ids follow the sorted names."""
        entries = sorted(entries)
        return cls(
            np.frombuffer(b"".join(name for name, _, _ in entries), np.uint8),
            np.cumsum([len(name) for name, _, _ in entries], dtype=np.int64),
            np.array([size for _, size, _ in entries], np.int64),
            np.array([label for _, _, label in entries], np.int32),
            np.frombuffer(
                b"" if sums is None else b"".join(sums.get(name, bytes(32)) for name, _, _ in entries), np.uint8
            ),
            np.empty(0, np.int64),
        )


class SplitImages:
    """Images that a split lists, wherever they are read from."""

    split: Split

    def __len__(self) -> int:
        return len(self.split)

    def name(self, i: int) -> str:
        return show(self.split.name(i))

    def label(self, i: int) -> int:
        return int(self.split.labels[i])


@dataclass(frozen=True)
class Index:
    """Both splits of a data set, its classes, and what tells whether this index is still true."""

    train: Split
    val: Split
    classes: tuple[str, ...]
    """Names in label order (bytes that are not UTF-8 are escaped)."""
    sums: str | None
    """SHA-256 of the file SHA256SUMS, where there is one."""
    folders: dict[str, int]
    """Time of last change of each folder with images: a file that comes or goes moves it."""
    val_split: float

    @property
    def digest(self) -> str:
        """SHA-256 over classes, names, sizes and labels of both splits, over the contents' sums where written, and over
        their places in a pack."""
        digest = hashlib.sha256(json.dumps(self.classes).encode())
        for split in (self.train, self.val):
            for name, array in vars(split).items():
                if name != "places" or len(array):
                    digest.update(b"%d;" % array.nbytes)
                    digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    @property
    def size(self) -> DataSize:
        return DataSize(len(self.train), len(self.val), len(self.classes))

    def to_bytes(self) -> bytes:
        """One buffer: magic, length and text of a JSON header, the arrays. `from_bytes` maps it back without a copy."""
        arrays = [array for split in (self.train, self.val) for array in vars(split).values()]
        head = {
            "classes": self.classes, "sums": self.sums, "folders": self.folders, "val_split": self.val_split,
            "arrays": [[array.dtype.str, len(array)] for array in arrays],
        }  # fmt: skip
        text = json.dumps(head).encode()
        text += b" " * (-(len(_MAGIC) + 8 + len(text)) % 8)
        parts = [_MAGIC, len(text).to_bytes(8, "little"), text]
        for array in arrays:
            parts += [array.tobytes(), b"\0" * (-array.nbytes % 8)]
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, buffer: Any) -> "Index":
        """Reads `to_bytes`. ValueError if the buffer is something else."""
        view = memoryview(buffer)
        at = len(_MAGIC)
        if bytes(view[:at]) != _MAGIC:
            raise ValueError("not an index")
        length = int.from_bytes(view[at : at + 8], "little")
        head = json.loads(bytes(view[at + 8 : at + 8 + length]))
        at += 8 + length
        arrays = []
        if [dtype for dtype, _ in head["arrays"]] != 2 * _DTYPES:
            raise ValueError("not the arrays of an index")
        for dtype, count in head["arrays"]:
            array = np.frombuffer(view, np.dtype(dtype), count, at)
            arrays.append(array)
            at += array.nbytes + (-array.nbytes % 8)
        return cls(
            Split(*arrays[:6]),
            Split(*arrays[6:]),
            tuple(head["classes"]),
            head["sums"],
            dict(head["folders"]),
            head["val_split"],
        )

    def differences(self, other: "Index") -> Iterator[str]:
        """What changed from this index to `other`, a line a file."""
        if self.classes != other.classes:
            for label in sorted(set(self.classes) ^ set(other.classes)):
                yield f"class {label} {'is gone' if label in self.classes else 'is new'}"
        if (self.sums is None) != (other.sums is None):
            yield f"{SUMS} is {'new' if self.sums is None else 'gone'}"
        for ours, theirs in ((self.train, other.train), (self.val, other.val)):
            old = {ours.name(i): i for i in range(len(ours))}
            new = {theirs.name(i): i for i in range(len(theirs))}
            for name in sorted(old.keys() | new.keys()):
                if name not in new:
                    yield f"{show(name)} is gone"
                elif name not in old:
                    yield f"{show(name)} is new"
                elif ours.sizes[old[name]] != theirs.sizes[new[name]]:
                    yield f"{show(name)} had {ours.sizes[old[name]]:,} bytes and has {theirs.sizes[new[name]]:,}"
                elif self.sums and other.sums and ours.sum(old[name]) != theirs.sum(new[name]):
                    yield f"{show(name)} has another sum in {SUMS}"


def show(name: bytes) -> str:
    """A file name for people and logs, on one line: bytes that are no text are escaped."""
    text = name.decode("utf-8", "backslashreplace")
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def check_folder(root: Path, given: str, remedy: str) -> None:
    """RequestError, which says what was given, if `root` is not a folder whose contents can be listed."""
    try:
        os.scandir(root).close()
    except (FileNotFoundError, NotADirectoryError):
        raise RequestError(f"{given} is not a folder: {remedy}") from None
    except OSError as error:
        if is_outage(error):
            raise out_of_reach(root, error) from None
        raise RequestError(f"{given} cannot be read: {error.strerror}") from None


def open_index(root: Path, val_split: float, spare: Path, *, check_sizes: bool) -> Index:
    """The index of `root`, from its cache where that is still true, else scanned and cached.

    The cache lies in `root`, or in the folder `spare` where `root` is read-only. A cached index holds as long as no folder
    below `root` has changed, which says that no file came or went; `check_sizes` looks at every file besides.
    RequestError if the layout is wrong.
    """
    check_folder(
        root,
        f"data.root={root}",
        "give one with train/ and val/ in it, each with a folder a class, or make one with 'pipeline data make'",
    )
    for cached in _cached(root, spare):
        if cached.val_split == val_split and _still_true(cached, root, check_sizes):
            return cached
    index = scan(root, val_split)
    store(index, root / CACHE, spare)
    return index


def store(index: Index, *folders: Path) -> None:
    """Keep the index in the first of the folders that can be written, if any."""
    data = index.to_bytes()
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            atomic_write(folder / f"{index.digest[:16]}.index", data, durable=False, shared=True)
            break
        except OSError:
            continue


def remembered(root: Path, spare: Path, digest: str) -> Index | None:
    """The index that had this digest, if a cache still holds it: to say what has changed since."""
    return next((index for index in _cached(root, spare) if index.digest == digest), None)


def scan(root: Path, val_split: float) -> Index:
    """Looks at every file below `root`. RequestError, naming the folder, if the layout is not that of an image folder."""
    base = os.fsencode(root)
    folders: dict[str, int] = {}
    try:
        top = _folders_in(base)
        present = [split for split in SPLITS if split.encode() in top]
        if present == list(SPLITS):
            classes, entries = _scan_two(base, folders)
        elif present:
            missing = next(split for split in SPLITS if split not in present)
            raise RequestError(
                f"data.root={root} has {present[0]}/ but no {missing}/: add {missing}/ with a folder a class"
            )
        else:
            classes, entries = _scan_one(root, base, top, val_split, folders)
        sums = _parse_sums(root) if (root / SUMS).exists() else None
        sums_digest = _sums_digest(root)
    except OSError as error:
        raise _unreadable(root, error) from None
    if len(classes) < 2:
        raise RequestError(f"data.root={root} holds one class folder, {show(classes[0])}/: at least two are needed")
    index = Index(
        Split.of(entries["train"], sums),
        Split.of(entries["val"], sums),
        tuple(show(name) for name in classes),
        sums_digest,
        folders,
        val_split,
    )
    refuse_untrained(index, root)
    return index


def refuse_untrained(index: Index, root: Path) -> None:
    """RequestError if a class has no image to train, which names such classes."""
    counts = np.bincount(index.train.labels, minlength=len(index.classes))
    lacking = [index.classes[label] for label in np.flatnonzero(counts == 0)]
    if lacking:
        names = ", ".join(lacking[:5]) + (f" and {len(lacking) - 5} more" if len(lacking) > 5 else "")
        raise RequestError(
            f"{root} has no image to train of class {names}: data.val_split={index.val_split:g} holds theirs out; add"
            " images there, remove the folder, or give another data.val_split"
        )


def scan_validation(root: Path, classes: tuple[str, ...], held_out: float) -> Split:
    """The images to judge a model of `classes` on: those of val/, or of class folders the share `held_out` (1: all).

    Labels are the model's, by the folders' names; a class may be missing or empty here. RequestError if a folder is no
    class of the model, or if there is no image.
    """
    base = os.fsencode(root)
    labels = {name: label for label, name in enumerate(classes)}
    try:
        has_val = (root / "val").is_dir()
        folders = _class_folders(os.path.join(base, b"val"), "val") if has_val else _class_folders(base, str(root))
        unknown = [show(name) for name in folders if show(name) not in labels]
        if unknown:
            raise RequestError(
                f"{root} has class folders that the model does not know: {', '.join(sorted(unknown)[:5])}"
            )
        entries = [
            (file, size, labels[show(folder)])
            for folder in folders
            for file, size in _images(base, os.path.join(b"val", folder) if has_val else folder, {})
            if has_val or _is_held_out(file, held_out)
        ]
    except OSError as error:
        raise _unreadable(root, error) from None
    if not entries:
        raise RequestError(f"data.root={root} holds no image to judge the model on")
    return Split.of(entries)


def relabelled(index: Index, classes: tuple[str, ...]) -> Split:
    """The validation images of a pack, labelled as a model of `classes` counts. RequestError if it lacks one of theirs."""
    unknown = sorted(set(index.classes) - set(classes))
    if unknown:
        raise RequestError(f"the pack has classes that the model does not know: {', '.join(unknown[:5])}")
    labels = np.array([classes.index(name) for name in index.classes], np.int32)
    return replace(index.val, labels=labels[index.val.labels])


Entries = dict[str, list[tuple[bytes, int, int]]]


def _unreadable(root: Path, error: OSError) -> RunError:
    place = error.filename or root  # an error in the midst of a listing names no file
    if is_outage(error):
        return out_of_reach(place, error)
    return RequestError(f"data.root={root} cannot be read: {show(os.fsencode(place))}: {error.strerror}")


def _folders_in(base: bytes) -> list[bytes]:
    with os.scandir(base) as found:
        return sorted(entry.name for entry in found if entry.is_dir() and not entry.name.startswith(b"."))


def _scan_two(base: bytes, folders: dict[str, int]) -> tuple[list[bytes], Entries]:
    of_split = {split: _class_folders(os.path.join(base, split.encode()), split) for split in SPLITS}
    train, val = set(of_split["train"]), set(of_split["val"])
    if train != val:
        only = [f"{show(name)} in train/ alone" for name in sorted(train - val)]
        only += [f"{show(name)} in val/ alone" for name in sorted(val - train)]
        raise RequestError(
            f"the classes of train/ and val/ differ: {', '.join(only[:5])}"
            + (f" and {len(only) - 5} more" if len(only) > 5 else "")
            + ": both need the same class folders"
        )
    classes = sorted(train)
    entries: Entries = {}
    for split in SPLITS:
        entries[split] = []
        folders[split] = os.stat(os.path.join(base, split.encode())).st_mtime_ns
        for label, name in enumerate(classes):
            found = [(file, size, label) for file, size in _images(base, os.path.join(split.encode(), name), folders)]
            if not found:
                raise _empty_class(f"{split}/{show(name)}")
            entries[split] += found
    return classes, entries


def _scan_one(
    root: Path, base: bytes, classes: list[bytes], val_split: float, folders: dict[str, int]
) -> tuple[list[bytes], Entries]:
    if not classes:
        raise RequestError(f"data.root={root} holds no folders: it needs train/ and val/, each with a folder a class")
    entries: Entries = {"train": [], "val": []}
    for label, name in enumerate(classes):
        found = list(_images(base, name, folders))
        if not found:
            raise _empty_class(show(name))
        for file, size in found:
            entries["val" if _is_held_out(file, val_split) else "train"].append((file, size, label))
    for split, other in (("val", "less"), ("train", "more")):
        if not entries[split]:
            raise RequestError(
                f"data.val_split={val_split:g} leaves no image to {split}: there is {other} than it needs"
            )
    return classes, entries


def _is_held_out(name: bytes, val_split: float) -> bool:
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") < val_split * 2**64


def _class_folders(folder: bytes, split: str) -> list[bytes]:
    names = _folders_in(folder)
    images = sum(name.lower().endswith(EXTENSIONS) for name in os.listdir(folder))
    if not names and images:
        raise RequestError(
            f"{split}/ is flat: {images:,} images lie right in it, not in class folders; sort them into {split}/<class>/,"
            " with the class names of train/"
        )
    if not names:
        raise RequestError(f"{split}/ holds no class folders: it needs one for each class, with images in it")
    return names


def _images(base: bytes, folder: bytes, folders: dict[str, int]) -> Iterator[tuple[bytes, int]]:
    """(name below `base`, bytes) of each image in `folder` and the folders in it."""
    folders[os.fsdecode(folder)] = os.stat(os.path.join(base, folder)).st_mtime_ns
    with os.scandir(os.path.join(base, folder)) as found:
        for entry in found:
            name = os.path.join(folder, entry.name)
            if entry.name.lower().endswith(EXTENSIONS):
                yield name, _size(entry)
            elif entry.is_dir():
                yield from _images(base, name, folders)


def _size(entry: os.DirEntry[bytes]) -> int:
    try:
        return entry.stat().st_size
    except OSError as error:
        if is_outage(error):
            raise
        return MISSING


def _empty_class(where: str) -> RequestError:
    kinds = " ".join(kind.decode() for kind in EXTENSIONS)
    return RequestError(f"class folder {where}/ holds no image ({kinds}): add images or remove the folder")


def _cached(root: Path, spare: Path) -> Iterator[Index]:
    """Cached indices, newest first; a damaged one is passed over."""
    paths = [path for folder in (root / CACHE, spare) if os.path.isdir(folder) for path in folder.glob("*.index")]
    for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        try:
            index = Index.from_bytes(np.memmap(path, np.uint8, "r"))
            is_sound = all(split.is_sound(len(index.classes)) for split in (index.train, index.val))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        if is_sound and index.digest.startswith(path.stem):
            yield index


def _still_true(index: Index, root: Path, check_sizes: bool) -> bool:
    try:
        if any(os.stat(root / folder).st_mtime_ns != time for folder, time in index.folders.items()):
            return False
        # the root's own time would not do where it holds the classes: the cache's folder, once made, changes it
        is_split = SPLITS[0] in index.folders
        if not is_split and tuple(show(name) for name in _folders_in(os.fsencode(root))) != index.classes:
            return False
        if _sums_digest(root) != index.sums:
            return False
        # a link whose target was out of reach moves no folder's time when that is back: look at those every time
        return all(_sizes_hold(split, os.fsencode(root), check_sizes) for split in (index.train, index.val))
    except OSError:
        return False


def _sizes_hold(split: Split, base: bytes, check_all: bool) -> bool:
    for i in range(len(split)) if check_all else np.flatnonzero(split.sizes == MISSING).tolist():
        try:
            size = os.stat(os.path.join(base, split.name(i))).st_size
        except OSError:
            size = MISSING
        if size != split.sizes[i]:
            return False
    return True


def write_sums(root: Path, index: Index) -> int:
    """Writes SHA256SUMS over all images, readable by `sha256sum --check`; returns how many."""
    names = [split.name(i) for split in (index.train, index.val) for i in range(len(split))]
    lines = []
    for name, digest in zip(names, _digests(root, names), strict=True):
        if digest is None:
            raise RequestError(f"{show(name)} cannot be read: no sums written; mend or remove it first")
        escaped = name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n")
        lines.append(b"\\" * (escaped != name) + digest.hex().encode() + b"  " + escaped + b"\n")
    try:
        atomic_write(root / SUMS, b"".join(lines))
    except OSError as error:
        raise StorageError(f"{root / SUMS} cannot be written: {error.strerror}") from None
    return len(lines)


def check_sums(root: Path, index: Index) -> Iterator[tuple[str, str]]:
    """Compares each file with SHA256SUMS: (name, what is wrong) of each that changed, cannot be read or has no sum."""
    expected = _parse_sums(root)
    for name, found in zip(expected, _digests(root, list(expected)), strict=True):
        if found is None:
            yield show(name), "cannot be read"
        elif found != expected[name]:
            yield show(name), f"has changed: its content is not that of {SUMS}"
    for split in (index.train, index.val):
        for i in range(len(split)):
            if split.name(i) not in expected:
                yield show(split.name(i)), f"has no sum in {SUMS}"


def _parse_sums(root: Path) -> dict[bytes, bytes]:
    """File name -> SHA-256. RequestError names a line that `sha256sum` would not have written."""
    sums = {}
    for number, line in enumerate((root / SUMS).read_bytes().split(b"\n"), 1):
        match = re.fullmatch(rb"(\\?)([0-9a-f]{64}) [ *](?:\./)?(.+)", line, re.DOTALL)
        if match:
            name = re.sub(rb"\\(.)", lambda pair: {b"n": b"\n", b"r": b"\r"}.get(pair[1], pair[1]), match[3])
            sums[name if match[1] else match[3]] = bytes.fromhex(match[2].decode())
        elif line:
            raise RequestError(f"{root / SUMS} line {number} is not a sum and a file name: write it anew, or remove it")
    return sums


def _sums_digest(root: Path) -> str | None:
    return hashlib.sha256((root / SUMS).read_bytes()).hexdigest() if (root / SUMS).exists() else None


def _digests(root: Path, names: list[bytes]) -> Iterator[bytes | None]:
    def digest(name: bytes) -> bytes | None:
        path = os.path.join(os.fsencode(root), name)
        try:
            with open(path, "rb") as file:
                return hashlib.file_digest(file, "sha256").digest()
        except OSError as error:
            failure = classify(path, error)
            if isinstance(failure, OutageError) and not os.path.islink(path):  # a dangling link is a defect here
                raise failure from None
            return None

    with ThreadPoolExecutor(8) as pool:  # hashing and reading leave the interpreter's lock
        for start in range(0, len(names), _AT_ONCE):  # each piece of work in a pool's queue is 1 KB
            yield from pool.map(digest, names[start : start + _AT_ONCE])
