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

import contextlib
import hashlib
import io
import json
import os
import re
import shlex
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.addons.store.bucket import MissingError, Store
from pipeline.data.access import (
    PACK_FILE,
    PLACE_OF_DATA,
    is_non_empty_folder,
    open_regular,
    outage_error,
    raise_if_outage,
)
from pipeline.data.index import Index, SplitImages
from pipeline.data.interface import OutageError, UnreadableError
from pipeline.errors import RequestError
from pipeline.files import atomic_write, parse_json

FORMAT = 2
"""The format of new packs. In format 1, of version 0.2, no image is turned upright."""
SUMMARY = PACK_FILE
INDEX = "pack.index"
REQUEST = ".packing.json"
"""The file that is in a pack until it is complete."""
CHANGED = f"has changed since it was packed: its SHA-256 is not that of {SUMMARY}"
REPACK = "remove it and pack it again"
NOT_PACKED = "could not be read when it was packed"
_MAX_SUMMARY_BYTES = 1 << 28
_MAX_INDEX_BYTES = 1 << 32  # of 40 million images
_ATTEMPTS = 3
"""Reads of an index from a bucket, until one has the digest that the summary names."""
NPY_MAGIC = b"\x93NUMPY"
"""First bytes of an image of a pack of pixels, and of no image file."""


@dataclass(frozen=True)
class Level:
    """The form in which a pack stores images."""

    text: str
    max_side: int | None = None
    """Longer side in pixels, at most; with `quality`, of a JPEG."""
    quality: int | None = None
    raw: int | None = None
    """Shorter side in pixels, at most, of decoded pixels."""

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

    root: Path
    split_name: str
    _descriptors: dict[int, int] = field(default_factory=dict, compare=False)
    """Shard number -> descriptor, of the shards read so far."""

    def __reduce__(self) -> tuple[Any, ...]:  # a process that is not forked has none of these descriptors
        return partial(PackImages, upright=self.upright), (self.root, self.split, self.split_name)

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
                with contextlib.suppress(OSError):
                    os.close(self._descriptors.pop(shard))  # a stale handle stays stale
            raise outage_error(path, error) from None
        if len(data) != size or zlib.crc32(data) != crc:
            raise UnreadableError(f"{path.name} has changed at byte {offset:,} since it was packed")
        return file_or_pixels(data)


def open_images(root: Path, index: Index) -> tuple[PackImages, PackImages]:
    """Return the training and validation images of a pack in a folder."""
    return (
        PackImages(root, index.train, "train", upright=index.upright),
        PackImages(root, index.val, "val", upright=index.upright),
    )


def file_or_pixels(data: bytes) -> bytes | NDArray[np.uint8]:
    """Return the bytes of an image file of a pack; of a pack of pixels, its pixels [3, H, W].

    Those are a .npy file of [H, W, 3]. Raises UnreadableError if it is damaged.
    """
    if not data.startswith(NPY_MAGIC):
        return data
    try:
        pixels: NDArray[np.uint8] = np.load(io.BytesIO(data), allow_pickle=False)
    except (
        Exception
    ) as error:  # NumPy parses the header as Python: tokenize.TokenError, OverflowError and more
        raise UnreadableError(f"its pixels cannot be read: {' '.join(str(error).split())[:200]}") from None
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise UnreadableError(f"it holds {pixels.dtype} {pixels.shape} instead of pixels")
    return pixels.transpose(2, 0, 1)


def open_index(root: Path | Store, cache: Path | None = None) -> Index:
    """Return the index of the pack in `root`: memory-mapped, unless it comes from a bucket.

    cache: folder that keeps the index of a bucket, see `data.cache`. Raises RequestError if there
    is no pack, or if it is damaged or incomplete.
    """
    summary = read_summary(root)
    index = _kept_index(cache, summary["index"]) if cache else None
    if index is None:
        index = _read_index(root, summary["index"], _ATTEMPTS if isinstance(root, Store) else 1)
        if cache:
            _keep_index(cache, index)
    for name, split in (("train", index.train), ("val", index.val)):
        # whoever wrote both files can make the digest match
        if len(split.places) != 3 * len(split) or not split.is_valid(len(index.classes)):
            raise _damaged(root, f"the parts of {INDEX} contradict each other ({name})")
    sizes = _shard_sizes(root, summary)
    for shard in summary["shards"]:
        size = sizes.get(shard["name"])
        if size is None:
            raise _damaged(root, f"{shard['name']} does not exist, or is not a file")
        if size != shard["bytes"]:
            raise _damaged(root, f"{shard['name']} has {size:,} bytes, not {shard['bytes']:,}")
    return index


def _read_index(root: Path | Store, digest: str, attempts: int = 1) -> Index:
    """Return the index with this digest. Raises RequestError if it is not in `root`."""
    try:
        index = Index.from_bytes(_read(root, INDEX, _MAX_INDEX_BYTES))
        if index.digest == digest:
            return index
        error: object = "it is another one"
    except (OSError, MissingError, ValueError) as problem:
        if isinstance(problem, OSError) and isinstance(root, Path):
            raise_if_outage(root / INDEX, problem)
        error = problem
    if attempts > 1:  # the bytes of a bucket may be lost or changed on their way
        return _read_index(root, digest, attempts - 1)
    raise _damaged(root, f"{INDEX} cannot be read ({error})")


def _read(root: Path | Store, name: str, limit: int) -> Any:
    """Return the bytes of a file of a pack. One in a folder is memory-mapped."""
    if isinstance(root, Store):
        return root.read(name, limit)
    with open(root / name, "rb", opener=open_regular) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"it has {size:,} bytes, more than the {limit:,} allowed")
        return np.memmap(file, np.uint8, "r")


def _shard_sizes(root: Path | Store, summary: dict[str, Any]) -> dict[str, int]:
    """Return the sizes of the shards that exist."""
    if isinstance(root, Store):
        return {found.name: found.size for split in ("train-", "val-") for found in root.list(split)}
    sizes = {}
    for shard in summary["shards"]:
        try:
            status = (root / shard["name"]).stat()
            if stat.S_ISREG(status.st_mode):  # a named pipe would never end
                sizes[shard["name"]] = status.st_size
        except OSError as error:
            raise_if_outage(root / shard["name"], error)
    return sizes


def cache_folder(cache: Path, digest: str) -> Path:
    """Return the folder in `data.cache` of the pack whose index has this digest."""
    return cache / digest[:16]


def _kept_index(cache: Path, digest: str) -> Index | None:
    with contextlib.suppress(OSError, RequestError, OutageError):
        return _read_index(cache_folder(cache, digest), digest)
    return None


def _keep_index(cache: Path, index: Index) -> None:
    folder = cache_folder(cache, index.digest)
    with contextlib.suppress(OSError):  # it is reported when the first image is to be kept
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / INDEX, index.to_bytes(), shared=True)


def read_summary(root: Path | Store) -> dict[str, Any]:
    """Return the contents of pack.json. Raises RequestError if it is missing or not valid."""
    try:
        summary = parse_json(bytes(_read(root, SUMMARY, _MAX_SUMMARY_BYTES)))
        if summary["format"] not in (1, FORMAT):
            found = json.dumps(summary["format"])[:20]  # it may be text of any length
            raise RequestError(f"{root} is a pack of format {found}, and this program reads 1 and {FORMAT}")
        # all names become those of files: of shards, and of a folder of the cache
        is_valid = bool(re.fullmatch(r"[0-9a-f]{64}", summary["index"]))
        for shard in summary["shards"]:
            is_shard = re.fullmatch(r"(train|val)-\d{4,}\.tar", shard["name"])
            is_valid &= bool(is_shard and isinstance(shard["bytes"], int) and shard["sha256"])
        if not is_valid or not summary["level"] or not summary["source"]:
            raise ValueError("an entry is not valid")
    except (FileNotFoundError, NotADirectoryError, MissingError):
        missing = f"data.root={root} holds no complete pack ({SUMMARY} is missing)"
        raise RequestError(missing, _how_to_make(root)) from None
    except OSError as error:
        assert isinstance(root, Path)
        raise_if_outage(root / SUMMARY, error)
        raise RequestError(
            f"data.root={root} cannot be read: {SUMMARY}: {error.strerror}", PLACE_OF_DATA
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(root, f"{SUMMARY} cannot be read ({error})") from None
    return dict(summary)


def _how_to_make(root: Path | Store) -> str:
    """Return the advice for a place that holds no complete pack: a command that works there."""
    given = "give its place with data.root=FOLDER, or"
    quoted = shlex.quote(str(root))
    if isinstance(root, Store):
        return f"give its place with data.root, or make one with 'pipeline data pack SRC {quoted}'"
    if re.match("imagenet(-|$)", root.name) and not root.exists():
        make = f"pipeline data import imagenet ARCHIVES {quoted} --pack max-side=500,q=90"
        return f"{given} make one of ImageNet's archives with '{make}'"
    if root.is_file():
        return "give the folder of a pack"
    if is_non_empty_folder(root) and not (root / REQUEST).exists():
        new = shlex.quote(str(root.with_name(f"{root.name}-pack")))
        remedy = f"{given} make one with 'pipeline data pack {quoted} {new}' and give data.root={new}"
        return f"{remedy}, or train from a folder of images with data.source=folder"
    return f"{given} make one with 'pipeline data pack SRC {quoted}'"


def changed_shards(root: Path, summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, defect) for each shard that changed since it was packed. Raises OutageError."""
    for shard in summary["shards"]:
        try:
            with open(root / shard["name"], "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != shard["sha256"]:
                    yield shard["name"], CHANGED
        except OSError as error:
            raise outage_error(root / shard["name"], error) from None


def _damaged(root: Path | Store, what: str) -> RequestError:
    return RequestError(f"the pack {root} is damaged: {what}", f"copy it again, or {REPACK}")
