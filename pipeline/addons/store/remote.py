"""The images of a pack in a bucket, with a cache on a local disk.

Promise: the same bytes as from the local pack, each time with their CRC-32 checked, also when they
come from the cache. So a cache that a crash or a disk has damaged costs a read, never an image.
Nothing in it is synced, and its processes share no state but one byte for each image.

A cache holds a fixed part of the pack: the first images of the index, train before val, as far as
its limit goes. It evicts nothing: in an epoch each image is used once, in random order, so any part
of a size gives the same rate of hits, and the best possible one.

    DIR/<16 hex of the index's digest>/
        train.images, val.images  the images in the order of the index, sparse
        train.kept, val.kept      one byte for each image: 1 if it was written
"""

import mmap
import os
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.addons.datasets import pack
from pipeline.addons.datasets.pack import NOT_PACKED, cache_folder, file_or_pixels, shard_name
from pipeline.addons.store.bucket import Store
from pipeline.addons.store.ranges import Range, RangeReader, RangesIgnoredError
from pipeline.data.index import MAX_FILE_BYTES, Index, Split, SplitImages
from pipeline.data.interface import UnreadableError
from pipeline.errors import RequestError
from pipeline.streams import log

_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class Cache:
    """The images of one split that are kept on the local disk. Shared by all processes."""

    def __init__(self, folder: Path, split_name: str, split: Split, limit: int) -> None:
        """limit: bytes. A folder that cannot be written is reported, and nothing is kept."""
        self._folder = folder
        self._has_failed = mmap.mmap(-1, 1)  # shared with the workers
        self._ends = np.cumsum(split.sizes.clip(0))
        self._num_kept = int(np.searchsorted(self._ends, limit, side="right"))
        self.full_bytes = int(self._ends[-1])
        """Bytes that the whole split takes."""
        self._kept: mmap.mmap | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._images = os.open(folder / f"{split_name}.images", _OPEN, 0o666)
            descriptor = os.open(folder / f"{split_name}.kept", _OPEN, 0o666)
            try:
                # without this, a mark on a full disk ends in a bus error
                os.posix_fallocate(descriptor, 0, len(split))
                self._kept = mmap.mmap(descriptor, len(split))
            finally:
                os.close(descriptor)
        except OSError as error:
            self._warn(error)

    def has(self, i: int) -> bool:
        return self._kept is not None and self._kept[i] == 1

    def read(self, i: int, part: Range) -> bytes | None:
        """Return the bytes of image i, which is kept, or None if they have changed."""
        assert self._kept
        with suppress(OSError):
            data = os.pread(self._images, part.size, self._offset(i, part))
            if len(data) == part.size and zlib.crc32(data) == part.crc:
                return data
        self._kept[i] = 0
        return None

    def write(self, i: int, part: Range, data: bytes) -> None:
        """Keep image i if it belongs to the part that is kept."""
        if i >= self._num_kept or self._kept is None or self._has_failed[0]:
            return
        try:
            if os.pwrite(self._images, data, self._offset(i, part)) == part.size:
                self._kept[i] = 1
        except OSError as error:
            self._warn(error)

    def _offset(self, i: int, part: Range) -> int:
        return int(self._ends[i]) - part.size

    def _warn(self, error: OSError) -> None:
        if not self._has_failed[0]:
            self._has_failed[0] = 1
            log(
                f"data.cache: {self._folder} cannot be written ({error.strerror}): nothing more is kept there"
            )


@dataclass(frozen=True)
class StoreImages(SplitImages):
    """One split of a pack in a bucket."""

    root: Store  # type: ignore[assignment]
    split_name: str
    cache: Cache | None = None
    _readers: dict[int, RangeReader] = field(default_factory=dict, compare=False)
    """By the process: one that is forked needs its own."""

    def read(self, i: int) -> bytes | NDArray[np.uint8]:
        part = self.part(i)
        if part.size < 0:
            raise UnreadableError(NOT_PACKED)
        if not part.size:
            return b""
        data = self.cache.read(i, part) if self.cache and self.cache.has(i) else None
        if data is None:
            data = self._reader().take(i)
            if self.cache:
                self.cache.write(i, part, data)
        return file_or_pixels(data)

    def expect(self, samples: Iterable[int]) -> None:
        wanted = list(samples)
        sizes = self.split.sizes[wanted].tolist()
        wanted = [i for i, size in zip(wanted, sizes, strict=True) if 0 < size <= MAX_FILE_BYTES]
        if self.cache:
            wanted = [i for i in wanted if not self.cache.has(i)]
        self._reader().expect(wanted)

    def part(self, i: int) -> Range:
        """Return where image i is."""
        shard, offset, crc = self.split.places[3 * i : 3 * i + 3].tolist()
        return Range(shard_name(self.split_name, shard), offset, self.size(i), crc)

    def close(self) -> None:
        """End the reader of this process: workers that are forked must not use its connections."""
        if reader := self._readers.pop(os.getpid(), None):
            reader.close()

    def _reader(self) -> RangeReader:
        if os.getpid() not in self._readers:
            self._readers[os.getpid()] = RangeReader(str(self.root), self.part)
        return self._readers[os.getpid()]

    def __reduce__(self) -> tuple[Any, ...]:  # a process that is not forked has no client and no cache
        return _without_cache, (str(self.root), self.split, self.split_name, self.upright)


def _without_cache(place: str, split: Split, split_name: str, upright: bool) -> StoreImages:
    return StoreImages(Store(place), split, split_name, upright=upright)


def open_index(place: str) -> Index:
    """Return the index of a pack in a bucket. Raises RequestError, OutageError."""
    store = Store(place)
    index = pack.open_index(store)
    check_ranges(store, index)
    return index


def open_images(
    place: str, index: Index, cache: Path | None, cache_gib: float
) -> tuple[StoreImages, StoreImages]:
    """Return the training and validation images of a pack in a bucket.

    cache: see `data.cache`, with at most `cache_gib`.
    """
    store, cache_bytes = Store(place), int(cache_gib * 2**30)
    train = val = None
    if cache:
        folder = cache_folder(cache, index.digest)
        train = Cache(folder, "train", index.train, cache_bytes)
        val = Cache(folder, "val", index.val, cache_bytes - train.full_bytes)
    return (
        StoreImages(store, index.train, "train", train, upright=index.upright),
        StoreImages(store, index.val, "val", val, upright=index.upright),
    )


def check_ranges(store: Store, index: Index) -> None:
    """Raise RequestError if the store does not return parts of objects, which one read shows.

    Raises OutageError if it does not answer.
    """
    images = StoreImages(store, index.train, "train")
    try:
        images.read(int(np.argmax(index.train.sizes > 0)))
    except RangesIgnoredError as error:
        raise RequestError(
            f"data.root={store}: the store answers a read of a part of an object with"
            f" {error.status}, not 206",
            "use a store that honours ranges, check AWS_ENDPOINT_URL, or copy the pack to a disk",
        ) from None
    except UnreadableError:
        pass  # an image that has changed is named when it is used
    finally:
        images.close()
