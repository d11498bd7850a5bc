"""Reading a pack: an image folder as a few tar files with an index, so an image is one read.

A pack lies in a folder or in a bucket, with the same files.

Promise: sample ids, names and labels are those of the folder that was packed, so a run has the same
order with both, and with a lossless pack also the same pixels. Later damage is detected and named:
the CRC-32 of an image is compared at each read, the digest of the index at each start, and the
SHA-256 of a shard by `data check`. `tar xf` of all shards restores the folder. No torch here.

    pack.json      level, digests of the source, the index and each shard, and the bad images
    pack.index     names, labels, sizes and places, memory-mapped
    train-0000.tar, val-0000.tar, …
"""

import hashlib
import io
import os
import re
import shlex
import stat
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.addons.datasets import file_errors
from pipeline.addons.datasets.index import Index, SplitImages
from pipeline.addons.store.bucket import MissingError, Store
from pipeline.data.interface import UnreadableError
from pipeline.errors import RequestError, one_line
from pipeline.files import parse_json

FORMAT = 2
"""The format of new packs. In format 1, of version 0.2, no image is turned upright."""
SUMMARY = "pack.json"
INDEX = "pack.index"
REQUEST = ".packing.json"
"""The file that is in a pack until it is complete."""
REPACK = "remove it and pack it again"
NOT_PACKED = "could not be read when it was packed"
_MAX_BYTES = {SUMMARY: 1 << 28, INDEX: 1 << 32}  # of 40 million images
_ATTEMPTS = 3  # reads of an index from a bucket, until one has the digest that the summary names
NPY_MAGIC = b"\x93NUMPY"
"""First bytes of an image of a pack of pixels, and of no image file."""


@dataclass(frozen=True)
class Level:
    """The form in which a pack stores images."""

    text: str
    max_side: int | None = None  # longer side in pixels, at most; with `quality`, of a JPEG
    quality: int | None = None
    raw: int | None = None  # shorter side in pixels, at most, of decoded pixels

    @classmethod
    def parse(cls, text: str) -> "Level":
        """Parse `lossless`, `max-side=500,q=90` or `raw=256`. Raises RequestError otherwise."""
        if text == "lossless":
            return cls(text)
        if match := re.fullmatch(r"max-side=([1-9]\d{1,3}),q=([1-9]\d?|100)", text, re.ASCII):
            return cls(text, max_side=int(match[1]), quality=int(match[2]))
        match = re.fullmatch(r"raw=(\d{1,4})", text, re.ASCII)
        if match and 8 <= int(match[1]) <= 2048:
            return cls(text, raw=int(match[1]))
        forms = "lossless, max-side=PIXELS,q=QUALITY (10 to 9999, 1 to 100) or raw=PIXELS (8 to 2048)"
        raise RequestError(f"level {text} is not allowed", f"{forms}, such as max-side=500,q=90")


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:04d}.tar"


@dataclass(frozen=True)
class PackImages(SplitImages):
    """One split of a pack in a folder."""

    split_name: str
    _descriptors: dict[int, int] = field(default_factory=dict, compare=False)
    """Shard number -> descriptor, of the shards read so far."""

    def read(self, i: int) -> bytes | NDArray[np.uint8]:
        size = self.size(i)
        shard, offset, crc = self.split.places[3 * i : 3 * i + 3].tolist()
        if size < 0:
            raise UnreadableError(NOT_PACKED)
        path = self.root / shard_name(self.split_name, shard)
        try:
            if shard not in self._descriptors:
                self._descriptors[shard] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            data = os.pread(self._descriptors[shard], size, offset)
        except OSError as error:  # an outage, because the shard was there when the pack was opened
            if shard in self._descriptors:
                with suppress(OSError):
                    os.close(self._descriptors.pop(shard))  # a stale handle stays stale
            raise file_errors.outage_error(path, error) from None
        if len(data) != size or zlib.crc32(data) != crc:
            raise UnreadableError(f"{path.name} has changed at byte {offset:,} since it was packed")
        return file_or_pixels(data)


def file_or_pixels(data: bytes) -> bytes | NDArray[np.uint8]:
    """Return the bytes of an image file of a pack; of a pack of pixels, its pixels [3, H, W].

    Those are a .npy file of [H, W, 3]. Raises UnreadableError if it is damaged.
    """
    if not data.startswith(NPY_MAGIC):
        return data
    try:
        pixels: NDArray[np.uint8] = np.load(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # NumPy parses the header as Python: TokenError, OverflowError and more
        raise UnreadableError(f"its pixels cannot be read: {one_line(error)}") from None
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise UnreadableError(f"it holds {pixels.dtype} {pixels.shape} instead of pixels")
    return pixels.transpose(2, 0, 1)


def open_index(root: Path | Store) -> Index:
    """Return the index of the pack in `root`: memory-mapped, unless it comes from a bucket.

    Raises RequestError if there is no pack, or if it is damaged or incomplete.
    """
    summary = read_summary(root)
    index = _read_index(root, summary["index"])
    for split in (index.train, index.val):
        # whoever wrote both files can make the digest match
        if len(split.places) != 3 * len(split) or not split.is_valid(index.num_labels):
            raise _damaged(root, f"the parts of {INDEX} contradict each other")
    sizes = _shard_sizes(root, summary)
    for shard in summary["shards"]:
        size = sizes.get(shard["name"])
        if size != shard["bytes"]:
            found = "is missing, or not a file" if size is None else f"has {size:,} bytes"
            raise _damaged(root, f"{shard['name']} {found}, not {shard['bytes']:,} bytes")
    return index


def _read_index(root: Path | Store, digest: str) -> Index:
    problem: object = "it is another one"
    for _ in range(_ATTEMPTS if isinstance(root, Store) else 1):  # bytes may change on their way
        try:
            index = Index.from_bytes(_read(root, INDEX))
            if index.digest == digest:
                return index
        except (MissingError, ValueError) as error:
            problem = error
        except OSError as error:
            file_errors.raise_if_outage(Path(str(root), INDEX), error)
            problem = error
    raise _damaged(root, f"{INDEX} cannot be read ({problem})")


def _read(root: Path | Store, name: str) -> Any:
    """Return the bytes of a file of a pack. One in a folder is memory-mapped."""
    limit = _MAX_BYTES[name]
    if isinstance(root, Store):
        return root.read(name, limit)
    with open(root / name, "rb", opener=file_errors.open_regular) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"it has {size:,} bytes, more than the {limit:,} allowed")
        return np.memmap(file, np.uint8, "r")


def _shard_sizes(root: Path | Store, summary: dict[str, Any]) -> dict[str, int]:
    if isinstance(root, Store):
        return {found.name: found.size for split in ("train-", "val-") for found in root.list(split)}
    sizes = {}
    for shard in summary["shards"]:
        try:
            status = (root / shard["name"]).stat()
            if stat.S_ISREG(status.st_mode):  # a named pipe would never end
                sizes[shard["name"]] = status.st_size
        except OSError as error:
            file_errors.raise_if_outage(root / shard["name"], error)
    return sizes


def read_summary(root: Path | Store) -> dict[str, Any]:
    """Return the contents of pack.json. Raises RequestError if it is missing or not valid."""
    try:
        summary = dict(parse_json(bytes(_read(root, SUMMARY))))
        # all names become those of files: of shards, and of a folder of the cache
        is_digest = re.fullmatch(r"[0-9a-f]{64}", summary["index"])
        is_valid = bool(is_digest and summary["level"] and summary["source"])
        for shard in summary["shards"]:
            is_shard = re.fullmatch(r"(train|val)-\d{4,}\.tar", shard["name"])
            is_valid &= bool(is_shard and isinstance(shard["bytes"], int) and shard["sha256"])
        if not is_valid or summary["format"] not in (1, FORMAT):
            raise ValueError(f"an entry is not valid, or not of format 1 or {FORMAT}")
        return summary
    except (FileNotFoundError, NotADirectoryError, MissingError):
        problem = f"data.root={root} holds no complete pack ({SUMMARY} is missing)"
        raise RequestError(problem, _how_to_make(root)) from None
    except OSError as error:
        file_errors.raise_if_outage(Path(str(root), SUMMARY), error)
        problem = f"data.root={root} cannot be read: {SUMMARY}: {error.strerror}"
        raise RequestError(problem, file_errors.PLACE_OF_DATA) from None
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(root, f"{SUMMARY} cannot be read ({error})") from None


def _how_to_make(root: Path | Store) -> str:
    source, out = "SRC", shlex.quote(str(root))
    if isinstance(root, Path) and file_errors.is_non_empty_folder(root) and not (root / REQUEST).exists():
        source, out = out, shlex.quote(str(root.with_name(f"{root.name}-pack")))
    make = f"make one with 'pipeline data pack {source} {out}'"
    return f"give its place with data.root=FOLDER, or {make} and give data.root={out}"


def changed_shards(root: Path, summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, defect) for each shard that changed since it was packed. Raises OutageError."""
    for shard in summary["shards"]:
        try:
            with open(root / shard["name"], "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != shard["sha256"]:
                    reason = f"its SHA-256 is not that of {SUMMARY}"
                    yield shard["name"], f"has changed since it was packed: {reason}"
        except OSError as error:
            raise file_errors.outage_error(root / shard["name"], error) from None


def _damaged(root: Path | Store, what: str) -> RequestError:
    return RequestError(f"the pack {root} is damaged: {what}", f"copy it again, or {REPACK}")
