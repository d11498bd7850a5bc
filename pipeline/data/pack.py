"""A pack: an image folder as a few plain tar files and an index, so that any image is one read at a known place.

Promise: sample ids, names and labels are those of the folder that was packed, so the order of a run is the same over both,
and over a lossless pack the pixels are. What was damaged since is named: each image has its CRC-32 in the index and is
compared at every read, the index its digest in pack.json, each shard its SHA-256 for `data check`. Nothing is parsed at
a read but the image itself; `tar xf` of all shards gives the folder back. No torch in here.

    pack.json      what this is: level, digests of the source and of each shard, what was bad
    pack.index     names, labels, sizes and places, mapped
    train-0000.tar, val-0000.tar, …
"""

import contextlib
import hashlib
import io
import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.data.manifest import MAX_FILE_BYTES, Index, Split, SplitImages, UnreadableError, is_outage, out_of_reach
from pipeline.errors import RequestError

FORMAT = 1
SUMMARY = "pack.json"
INDEX = "pack.index"
ABSENT = -1  # size of an image whose file could not be read when it was packed
_NPY = b"\x93NUMPY"


@dataclass(frozen=True)
class Level:
    """What packing does to an image."""

    text: str
    max_side: int | None = None
    quality: int | None = None
    raw: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Level":
        """Reads `lossless`, `max-side=500,q=90` or `raw=256`; ValueError otherwise."""
        if text == "lossless":
            return cls(text)
        match = re.fullmatch(r"max-side=(\d{2,4}),q=(\d{1,3})", text, re.ASCII)
        if match and int(match[1]) >= 8 and 1 <= int(match[2]) <= 100:
            return cls(text, max_side=int(match[1]), quality=int(match[2]))
        match = re.fullmatch(r"raw=(\d{1,4})", text, re.ASCII)
        if match and 8 <= int(match[1]) <= 2048:
            return cls(text, raw=int(match[1]))
        raise ValueError("not a level")


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:04d}.tar"


@dataclass(frozen=True)
class PackImages(SplitImages):
    """One split of a pack."""

    root: Path
    name_of_split: str
    split: Split
    _files: dict[int, int] = field(default_factory=dict, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:  # to a worker that is not forked: what is open here is not open there
        return PackImages, (self.root, self.name_of_split, self.split)

    def read(self, i: int) -> bytes | NDArray[np.uint8]:
        size = int(self.split.sizes[i])
        shard, offset, crc = self.split.places[3 * i : 3 * i + 3].tolist()
        if size == ABSENT:
            raise UnreadableError("could not be read when it was packed")
        if not 0 <= size <= MAX_FILE_BYTES:
            raise UnreadableError(f"{size:,} bytes, more than the {MAX_FILE_BYTES:,} allowed")
        try:
            data = os.pread(self._file(shard), size, offset)
        except OSError as error:  # the shard was there when the pack was opened
            if shard in self._files:
                with contextlib.suppress(OSError):
                    os.close(self._files.pop(shard))  # a stale handle stays stale
            raise out_of_reach(self.root / shard_name(self.name_of_split, shard), error) from None
        if len(data) != size or zlib.crc32(data) != crc:
            raise UnreadableError(
                f"{shard_name(self.name_of_split, shard)} has changed at byte {offset:,} since it was packed"
            )
        return _pixels(data) if data.startswith(_NPY) else data

    def _file(self, shard: int) -> int:
        if shard not in self._files:
            self._files[shard] = os.open(self.root / shard_name(self.name_of_split, shard), os.O_RDONLY | os.O_CLOEXEC)
        return self._files[shard]


def _pixels(data: bytes) -> NDArray[np.uint8]:
    """[3, H, W] from a .npy file of [H, W, 3]."""
    try:
        pixels: NDArray[np.uint8] = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, SyntaxError, MemoryError) as error:
        raise UnreadableError(f"no pixels: {error}") from None
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise UnreadableError(f"no pixels of an image: {pixels.dtype} {pixels.shape}")
    return pixels.transpose(2, 0, 1)


def open_index(root: Path) -> Index:
    """The index of the pack in `root`, mapped. RequestError if there is none, or if it is damaged or not whole."""
    summary = read_summary(root)
    try:
        index = Index.from_bytes(np.memmap(root / INDEX, np.uint8, "r"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, OSError) and is_outage(error):
            raise out_of_reach(root / INDEX, error) from None
        raise _damaged(root, f"{INDEX} cannot be read ({error})") from None
    if index.digest != summary["index"]:
        raise _damaged(root, f"{INDEX} is not the one that {SUMMARY} names")
    for name, split in (("train", index.train), ("val", index.val)):
        _check_split(root, name, split, len(index.classes))
    for shard in summary["shards"]:
        try:
            size = (root / shard["name"]).stat().st_size
        except OSError as error:
            if is_outage(error):
                raise out_of_reach(root / shard["name"], error) from None
            raise _damaged(root, f"{shard['name']}: {error.strerror}") from None
        if size != shard["bytes"]:
            raise _damaged(root, f"{shard['name']} has {size:,} bytes, not {shard['bytes']:,}")
    return index


def _check_split(root: Path, name: str, split: Split, num_classes: int) -> None:
    """What the index says fits together: a digest is no proof against whoever wrote both."""
    if not len(split.places) or not split.is_sound(num_classes):
        raise _damaged(root, f"{INDEX} does not fit together ({name})")


def read_summary(root: Path) -> dict[str, Any]:
    """pack.json. RequestError if it is missing or another thing."""
    try:
        summary = json.loads((root / SUMMARY).read_bytes())
        if summary["format"] != FORMAT:
            raise RequestError(f"{root} is a pack of format {summary['format']}, and this program reads {FORMAT}")
        shards = [(str(shard["name"]), int(shard["bytes"]), str(shard["sha256"])) for shard in summary["shards"]]
        if not all(re.fullmatch(r"(train|val)-\d{4,}\.tar", name) for name, _, _ in shards):
            raise ValueError("a shard's name is none")
        summary["index"], summary["level"], summary["source"]
    except FileNotFoundError:
        raise RequestError(
            f"data.root={root} holds no whole pack ({SUMMARY} is missing): make one with 'pipeline data pack SRC {root}'"
        ) from None
    except OSError as error:
        if is_outage(error):
            raise out_of_reach(root / SUMMARY, error) from None
        raise RequestError(f"data.root={root} cannot be read: {SUMMARY}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(root, f"{SUMMARY} cannot be read ({error})") from None
    return dict(summary)


def changed_shards(root: Path, summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, what is wrong) of each shard that is not the one that was packed."""
    for shard in summary["shards"]:
        try:
            with open(root / shard["name"], "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != shard["sha256"]:
                    yield shard["name"], f"has changed since it was packed: its SHA-256 is not that of {SUMMARY}"
        except OSError as error:
            raise out_of_reach(root / shard["name"], error) from None


def _damaged(root: Path, what: str) -> RequestError:
    return RequestError(f"the pack {root} is damaged: {what}: copy or pack it anew")
