"""The images of a pack in a bucket, with a cache on a local disk.

Promise: the same bytes as from the local pack, each time with their CRC-32 checked, also when they
come from the cache. So a cache that a crash or a disk has damaged costs a read, never an image.
Nothing in it is synced, and its processes share no state but one byte for each image.

A cache holds a fixed part of the pack: the first images of the index, train before val, as far as
its limit goes. It evicts nothing: in an epoch each image is used once, in random order, so any part
of a size gives the same rate of hits, and the best possible one. The sparse file train.images has
the images in the order of the index, train.kept one byte for each: 1 if it was written.
"""

import mmap
import os
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.addons.datasets import pack
from pipeline.addons.datasets.index import MAX_FILE_BYTES, Index, Split, SplitImages
from pipeline.addons.datasets.pack import NOT_PACKED, file_or_pixels, shard_name
from pipeline.addons.store.bucket import Store
from pipeline.addons.store.ranges import Range, RangeReader
from pipeline.data.interface import UnreadableError
from pipeline.errors import RequestError
from pipeline.streams import log

_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class Cache:
    """The images of one split that are kept on the local disk. Shared by all processes."""

    def __init__(self, folder: Path, split_name: str, split: Split, limit: int) -> None:
        """limit: bytes. A folder that cannot be written is reported, and nothing is kept."""
        self._folder = folder
        self._ends = np.cumsum(split.sizes.clip(0))
        self._num_kept = int(np.searchsorted(self._ends, limit, side="right"))
        self._kept: mmap.mmap | bytearray = bytearray(len(split))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._images = os.open(folder / f"{split_name}.images", _OPEN, 0o666)
            marks = os.open(folder / f"{split_name}.kept", _OPEN, 0o666)
            os.posix_fallocate(marks, 0, len(split))  # without it, a mark on a full disk ends in a bus error
            self._kept = mmap.mmap(marks, len(split))
            os.close(marks)
        except OSError as error:
            self._end(error)

    def has(self, i: int) -> bool:
        return self._kept[i] == 1

    def read(self, i: int, part: Range) -> bytes | None:
        """Return the bytes of image i, or None if they are not kept or have changed."""
        if self.has(i):
            with suppress(OSError):
                data = os.pread(self._images, part.size, int(self._ends[i]) - part.size)
                if len(data) == part.size and zlib.crc32(data) == part.crc:
                    return data
            self._kept[i] = 0
        return None

    def write(self, i: int, data: bytes) -> None:
        """Keep image i if it belongs to the part that is kept."""
        if i < self._num_kept:
            try:
                if os.pwrite(self._images, data, int(self._ends[i]) - len(data)) == len(data):
                    self._kept[i] = 1
            except OSError as error:
                self._end(error)

    def _end(self, error: OSError) -> None:
        self._num_kept = 0
        log(f"data.cache: {self._folder} cannot be written ({error.strerror}): nothing more is kept there")


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
        data = self.cache.read(i, part) if self.cache else None
        if data is None:
            data = self._reader().take(i)
            if self.cache:
                self.cache.write(i, data)
        return file_or_pixels(data)

    def expect(self, samples: Iterable[int]) -> None:
        """Begin to read these images, see `interface.Images`."""
        wanted = list(samples)
        sizes = self.split.sizes[wanted].tolist()
        wanted = [i for i, size in zip(wanted, sizes, strict=True) if 0 < size <= MAX_FILE_BYTES]
        self._reader().expect([i for i in wanted if not (self.cache and self.cache.has(i))])

    def part(self, i: int) -> Range:
        shard, offset, crc = self.split.places[3 * i : 3 * i + 3].tolist()
        return Range(shard_name(self.split_name, shard), offset, self.size(i), crc)

    def _reader(self) -> RangeReader:
        if os.getpid() not in self._readers:
            self._readers[os.getpid()] = RangeReader(str(self.root), self.part)
        return self._readers[os.getpid()]


def open_index(place: str) -> Index:
    """Return the index of a pack in a bucket. Raises RequestError, OutageError."""
    store = Store(place)
    index = pack.open_index(store)
    if not store.honours_ranges(shard_name("train", 0)):
        remedy = "use a store that honours ranges, check AWS_ENDPOINT_URL, or copy the pack to a disk"
        raise RequestError(f"data.root={store}: the store returns only whole objects", remedy)
    return index


def open_images(place: str, index: Index, cache: Path | None, cache_gib: float) -> list[StoreImages]:
    """Return the training and validation images of a pack in a bucket. cache: see `data.cache`."""
    images, left = [], int(cache_gib * 2**30)
    for name, split in (("train", index.train), ("val", index.val)):
        kept = Cache(cache / index.digest[:16], name, split, left) if cache else None
        left -= int(split.sizes.clip(0).sum())
        images.append(StoreImages(Store(place), split, name, kept, upright=index.upright))
    return images
