"""The index of a data set: names, sizes and labels of its images, flat in memory, with a digest.

Promise: two processes with the same digest agree on which image each sample id is. A file that was
added, removed or changed in size gives another digest and can be named.

Names are one byte buffer with offsets instead of a Python list, so memory stays flat: with 1.28 M
tuples each worker grows from 37 to 257 MB in an epoch, because touching them writes their reference
counts. Names are bytes, because names in a file system need not be UTF-8. No torch here.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.addons.datasets.holdout import RULES, HoldOut
from pipeline.addons.datasets.names import normal_path, printable_name
from pipeline.data import interface
from pipeline.data.interface import UnreadableError
from pipeline.errors import list_first
from pipeline.files import parse_json
from pipeline.plan import DataSize

MISSING = -1
"""Size of an image whose file cannot be read, such as a dangling link."""
MAX_FILE_BYTES = 1 << 28  # an uncompressed picture of images.MAX_PIXELS has 229 MiB
_MAGIC = b"pipeline-index-2\n"
_DTYPES = ["|u1", "<i8", "<i8", "<i4", "|u1", "<i8"]


@dataclass(frozen=True)
class Split:
    """The images of one split. The order of these fields is part of the file format."""

    names: NDArray[np.uint8]  # all names, one after another
    ends: NDArray[np.int64]  # [N]: where each name ends in `names`
    sizes: NDArray[np.int64]  # [N]: bytes of each file, or `MISSING`
    labels: NDArray[np.int32]  # [N]
    # [N × 32]: SHA-256 of each file from SHA256SUMS, zeros if it lacks the file; else [0]
    sums: NDArray[np.uint8]
    # [N × 3]: in a pack, each image's shard, its offset there and its CRC-32; else [0]
    places: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ends)

    def name(self, i: int) -> bytes:
        """Return the path of image i below the root, as the file system spells it."""
        start = int(self.ends[i - 1]) if i else 0
        return self.names[start : int(self.ends[i])].tobytes()

    def checksum(self, i: int) -> bytes:
        """Return the SHA-256 of image i as SHA256SUMS has it."""
        return self.sums[32 * i : 32 * i + 32].tobytes()

    def is_valid(self, num_labels: int) -> bool:
        """Return True if the arrays fit together and no name leads out of the root.

        An index file may be hostile. num_labels: see `Index.num_labels`.
        """
        count = len(self)
        if count == 0:
            return not any(len(array) for array in vars(self).values())
        fits = (
            len(self.sizes) == len(self.labels) == count
            and len(self.sums) in (0, 32 * count)
            and len(self.places) in (0, 3 * count)
            and int(self.ends[0]) > 0
            and bool((self.ends[1:] > self.ends[:-1]).all())  # np.diff would wrap
            and int(self.ends[-1]) == len(self.names)
            and int(self.labels.min()) >= 0
            and int(self.labels.max()) < num_labels
        )
        names = self.names.tobytes()
        if not fits or b"\0" in names or (self.names[np.append(0, self.ends[:-1])] == ord("/")).any():
            return False
        # few names hold two dots at all
        places = [match.start() for match in re.finditer(rb"\.(?=\.)", names)]
        suspects = np.unique(np.searchsorted(self.ends, places, side="right"))
        return not any(b".." in self.name(i).split(b"/") for i in suspects.tolist())

    def with_normal_names(self) -> "Split":
        """Return the split with names in NFC, as two systems agree on them. A pack has its own."""
        if len(self.places) or self.names.max(initial=0) < 0x80:
            return self
        names = [normal_path(self.name(i)) for i in range(len(self))]
        return replace(self, names=_joined(names), ends=_ends(names))

    @classmethod
    def from_entries(
        cls, entries: list[tuple[bytes, int, int]], sums: dict[bytes, bytes] | None = None
    ) -> "Split":
        """Return the split of (name, size, label) entries; ids follow the sorted names in NFC."""
        entries = sorted(sorted(entries), key=lambda entry: normal_path(entry[0]))
        names = [name for name, _, _ in entries]
        sums_of = (
            [] if sums is None else [sums.get(name, sums.get(normal_path(name), bytes(32))) for name in names]
        )
        sizes = np.array([size for _, size, _ in entries], np.int64)
        labels = np.array([label for _, _, label in entries], np.int32)
        return cls(_joined(names), _ends(names), sizes, labels, _joined(sums_of), np.empty(0, np.int64))


def _joined(parts: list[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(parts), np.uint8)


def _ends(names: list[bytes]) -> NDArray[np.int64]:
    return np.cumsum([len(name) for name in names], dtype=np.int64)


@dataclass(frozen=True)
class SplitImages:
    """Images listed by a split. Subclasses read a folder, a pack, an archive or a bucket."""

    root: Path
    split: Split
    upright: bool = field(default=True, kw_only=True)

    def __len__(self) -> int:
        return len(self.split)

    def name(self, i: int) -> str:
        return printable_name(self.split.name(i))

    @property
    def labels(self) -> NDArray[np.int32]:
        return self.split.labels

    def size(self, i: int) -> int:
        """Return the size of image i in bytes, or `MISSING`; UnreadableError if it is too large."""
        size = int(self.split.sizes[i])
        if size > MAX_FILE_BYTES:
            raise UnreadableError(f"{size:,} bytes, more than the {MAX_FILE_BYTES:,} allowed")
        return size

    def expect(self, samples: Iterable[int]) -> None:
        """See `interface.Images`. A disk needs no warning."""

    def read(self, i: int) -> bytes | NDArray[np.uint8]:
        raise NotImplementedError

    def open(self, i: int) -> interface.Picture:
        from pipeline.addons.datasets.images import Picture  # imports torch

        return Picture.open(self.read(i), upright=self.upright)


@dataclass(frozen=True)
class Index:
    """Both splits of a data set, its classes, and for a folder the state that it was scanned in."""

    train: Split
    val: Split
    classes: tuple[str, ...]  # names in label order, see `names.class_of`
    sums: str | None = None  # SHA-256 of the file SHA256SUMS, if there is one
    # modification time in ns of each folder: it changes if a file is added or removed
    folders: dict[str, int] = field(default_factory=dict)
    # the rule by which class folders without val/, or a table, are split
    hold_out: HoldOut = field(default_factory=HoldOut)
    upright: bool = True  # see `data.orientation`
    # number of files and folders that are left out, by the reason
    ignored: dict[str, int] = field(default_factory=dict)
    label_sets: tuple[tuple[int, ...], ...] = ()  # see `interface.Source.label_sets`
    table: str = ""  # SHA-256 of a table and of how it is read; "" for class folders
    notes: tuple[str, ...] = ()  # more about a table, for the plan

    @property
    def digest(self) -> str:
        """SHA-256 over the classes, the sets of labels if there are any, and all arrays."""
        named = [self.classes, self.label_sets] if self.label_sets else self.classes
        digest = hashlib.sha256(json.dumps(named).encode())
        for split in (self.train, self.val):
            for name, array in vars(split.with_normal_names()).items():
                if name != "places" or len(array):
                    digest.update(b"%d;" % array.nbytes)
                    digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    @property
    def num_labels(self) -> int:
        """The number of values that an image's label may have."""
        return len(self.label_sets or self.classes)

    @property
    def is_split_by_hash(self) -> bool:
        """Return True if the images come without a split: class folders without train/ and val/."""
        if self.table:
            return self.hold_out.by != "table"
        split = self.train if len(self.train) else self.val  # an evaluation has no training images
        return not split.name(0).startswith((b"train/", b"val/"))

    def split_rule(self) -> dict[str, Any] | None:
        """Return the digest of all names and the rule of the split, or None if there is val/."""
        if not self.is_split_by_hash:
            return None
        return {"names": self.names_digest(), "val_split": self.hold_out.share, "split_by": self.hold_out.by}

    def names_digest(self, normal: Callable[[bytes], bytes] = normal_path) -> str:
        """Return the SHA-256 of the names of all images, the same for any split and in a pack."""
        return hashlib.sha256(b"\0".join(sorted(map(normal, self.names())))).hexdigest()

    def names(self) -> Iterator[bytes]:
        """Yield the names of all images, train before val."""
        return (split.name(i) for split in (self.train, self.val) for i in range(len(split)))

    @property
    def size(self) -> DataSize:
        notes = [self.hold_out.describe()] if self.is_split_by_hash else []
        notes += [] if self.upright else ["EXIF orientation ignored"]
        notes += self.notes
        counts = self.class_counts(self.val)
        missing = [self.classes[label] for label in np.flatnonzero(counts == 0)] if len(self.val) else []
        notes += [f"no validation image of class {list_first(missing, 5)}"] if missing else []
        notes += [f"left out: {describe_ignored(self.ignored)}"] if self.ignored else []
        sizes = len(self.train), len(self.val), len(self.classes)
        return DataSize(*sizes, "; ".join(notes), len(self.label_sets))

    def class_counts(self, split: Split) -> NDArray[np.int64]:
        """Return the number of images of each class in one of the splits."""
        counts = np.bincount(split.labels, minlength=self.num_labels)
        if not self.label_sets:
            return counts
        by_class = np.zeros(len(self.classes), np.int64)
        for labels, count in zip(self.label_sets, counts.tolist(), strict=True):
            by_class[[*labels]] += count
        return by_class

    def label_name(self, label: int) -> str:
        """Return the class, or the classes, that a label of an image means."""
        return ";".join(self.classes[i] for i in (self.label_sets[label] if self.label_sets else [label]))

    def to_bytes(self) -> bytes:
        """Return one buffer, which `from_bytes` maps back without a copy.

        It holds a magic number, the length and text of a JSON header, and the arrays.
        """
        arrays = [array for split in (self.train, self.val) for array in vars(split).values()]
        head: dict[str, Any] = {
            "classes": self.classes, "sums": self.sums, "folders": self.folders, "upright": self.upright,
            "val_split": self.hold_out.share, "split_by": self.hold_out.by, "ignored": self.ignored,
            "arrays": [[array.dtype.str, len(array)] for array in arrays],
        }  # fmt: skip
        if self.label_sets:
            head["label_sets"] = self.label_sets
        if self.table:
            head |= {"table": self.table, "notes": self.notes}
        text = json.dumps(head).encode()
        text += b" " * (-(len(_MAGIC) + 8 + len(text)) % 8)
        parts = [_MAGIC, len(text).to_bytes(8, "little"), text]
        for array in arrays:
            parts += [array.tobytes(), b"\0" * (-array.nbytes % 8)]
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, buffer: Any) -> "Index":
        """Return the index that `to_bytes` wrote. Raises ValueError for any other bytes."""
        view = memoryview(buffer)
        at = len(_MAGIC)
        if bytes(view[:at]) != _MAGIC:
            raise ValueError("not an index")
        try:
            length = int.from_bytes(view[at : at + 8], "little")
            head = parse_json(bytes(view[at + 8 : at + 8 + length]))
            at += 8 + length
            if [dtype for dtype, _ in head["arrays"]] != 2 * _DTYPES:
                raise ValueError("not the arrays of an index")
            arrays = []
            for dtype, count in head["arrays"]:
                arrays.append(np.frombuffer(view, np.dtype(dtype), count, at))
                at += arrays[-1].nbytes + (-arrays[-1].nbytes % 8)
            index = cls(
                Split(*arrays[:6]), Split(*arrays[6:]), tuple(head["classes"]), head["sums"],
                dict(head["folders"]),
                # version 0.2, which wrote no such entries, split by file and turned no image
                HoldOut(float(head["val_split"]), head.get("split_by", "file")), head.get("upright", False),
                {reason: int(count) for reason, count in head.get("ignored", {}).items()},
                tuple(tuple(map(int, labels)) for labels in head.get("label_sets", [])),
                head.get("table", ""), tuple(head.get("notes", [])),
            )  # fmt: skip
            texts = [*index.classes, *index.ignored, *index.notes, index.table]
            labels = {label for labels in index.label_sets for label in labels}
            is_valid = labels <= set(range(len(index.classes)))
            is_valid &= all(text.isprintable() for text in texts)
            is_valid &= b"\0" not in b"".join(map(os.fsencode, index.folders))
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not an index: {error}") from None
        if not is_valid or not 0 <= index.hold_out.share < 1 or index.hold_out.by not in RULES:
            raise ValueError("a name or a number in it is not valid")
        return index


def describe_ignored(ignored: dict[str, int]) -> str:
    by_number = sorted(ignored.items(), key=lambda item: (-item[1], item[0]))
    return list_first([f"{count:,} {reason.removeprefix('extension ')}" for reason, count in by_number], 6)


def left_out(ignored: dict[str, int]) -> str:
    """Return what was left out, in brackets, for the end of a message."""
    return f" (left out: {describe_ignored(ignored)})" if ignored else ""
