"""A pool of shared-memory slots into which loader workers write the images of their batches.

Promise: no batch is overwritten while anything refers to it. A slot is a Python object, and every
tensor in it, views included, holds a reference to that object. So a slot without other references
is free. If none is free, a batch gets memory of its own.

Slots are made once and used again, because the kernel clears new memory page by page and takes it
back the same way: 3 % of a loader's time. The images are not copied between processes. All else of
a batch travels in a pipe, as arrays. Torch would send each tensor as an open file, over a socket in
the folder for temporary files: that fails if its path is longer than 107 characters, and a worker
that is killed leaves the folder.
"""

import math
import mmap
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn
from weakref import WeakValueDictionary, finalize

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch.utils.data._utils.pin_memory import pin_memory

from pipeline.data.batch import Batch
from pipeline.errors import CRASH
from pipeline.plan import Resources

Allocate = Callable[[int, int], Tensor]
"""(count, size) -> [count, 3, size, size] uint8, channels last as in decoded images."""
SlotRequest = tuple[int, int | None]
"""The position of a batch, and the slot for its images; None if no slot is free."""

_FOLDER = "/dev/shm"


class SlotDataset(Dataset[Batch]):
    """A dataset of batches that can write its images into memory that it is given."""

    dealing: tuple[Sequence[int], Resources] | None = None
    """The positions that the loader asks for, and its workers; None: no batch is read ahead."""

    def from_position(self, position: int) -> Sequence[int]:
        """Return `position` and those that this process makes next: `prefetch` at most."""
        if not self.dealing:
            return (position,)
        positions, plan = self.dealing
        stride = max(1, plan.workers)  # DataLoader deals the positions to its workers in turn
        first = positions.index(position)
        return positions[first : first + stride * plan.prefetch + 1 : stride]

    @property
    def max_image_bytes(self) -> int:
        """Bytes of the images of the largest batch."""
        raise NotImplementedError

    def make_batch(self, position: int, allocate: Allocate) -> Batch:
        """Return the batch of this position, with its images in memory from `allocate`."""
        raise NotImplementedError

    def __getitem__(self, position: int) -> Batch:
        return self.make_batch(position, _allocate)


@dataclass(frozen=True, slots=True)
class SentBatch:
    """A batch on its way from a worker.

    Not a tuple: DataLoader would unpack it, and torch 2.11 would pin its fields without calling
    `pin_memory` below.
    """

    fields: dict[str, Any]
    """Those of the batch, with arrays in place of tensors."""
    slot: tuple[int, int] | None
    """The pool and the slot of the images, or None if they travel in the pipe, too."""
    shape: tuple[int, ...]
    """(count, height, width, channels) of the images."""

    @classmethod
    def make(cls, batch: Batch, slot: tuple[int, int] | None) -> "SentBatch":
        images = batch.images.permute(0, 2, 3, 1)  # as they are in memory
        fields = batch._replace(images=images[:0] if slot else images)._asdict()
        arrays = {name: value.numpy() if isinstance(value, Tensor) else value for name, value in fields.items()}
        return cls(arrays, slot, tuple(images.shape))

    def to_batch(self) -> Batch:
        arrays = {name: value for name, value in self.fields.items() if isinstance(value, np.ndarray)}
        tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
        memory: Any = arrays["images"]
        if self.slot:
            pool, slot = self.slot
            memory = _POOLS[pool].memory[slot]
        return Batch(**self.fields | tensors | {"images": _images_in(memory, self.shape)})

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory. DataLoader's pinning thread calls this."""
        batch: Batch = pin_memory(self.to_batch())  # type: ignore[no-untyped-call]
        return batch


class SharedBatches(Dataset[SentBatch]):
    """The batches of a `SlotDataset`, made by workers in shared-memory slots.

    Make it before the workers are forked. Without shared memory there are no slots.
    """

    def __init__(self, dataset: SlotDataset, num_slots: int) -> None:
        self._dataset = dataset
        size = self._slot_bytes = -(-dataset.max_image_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory: list[mmap.mmap] = []
        with suppress(OSError):
            self._file = os.open(_FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC)
            finalize(self, os.close, self._file)
            os.ftruncate(self._file, num_slots * size)
            self.memory = [mmap.mmap(self._file, size, offset=slot * size) for slot in range(num_slots)]
            self._references_if_free = sys.getrefcount(self.memory[0])
        self._in_flight: deque[int | None] = deque()
        """Slots of the batches that were requested and have not arrived, oldest first."""
        self._reserved: set[int] = set()
        """Slots for which this process has reserved memory."""
        _POOLS[id(self)] = self

    def requests(self, positions: Sequence[int]) -> Iterator[SlotRequest]:
        """Yield a request for each position. DataLoader reads them one by one, as its sampler."""
        for position in positions:
            self._in_flight.append(self._free_slot())
            yield position, self._in_flight[-1]

    def _free_slot(self) -> int | None:
        for slot in range(len(self.memory)):
            if slot not in self._in_flight and sys.getrefcount(self.memory[slot]) == self._references_if_free:
                return slot
        return None

    def __getitem__(self, request: SlotRequest) -> SentBatch:
        """Return the requested batch. Runs in a worker."""
        position, slot = request
        if slot is None:
            return SentBatch.make(self._dataset[position], None)
        batch = self._dataset.make_batch(position, partial(self._allocate_in, slot))
        return SentBatch.make(batch, (id(self), slot))

    def _allocate_in(self, slot: int, count: int, size: int) -> Tensor:
        if slot not in self._reserved:
            try:
                # without this, a write to a full /dev/shm ends in a bus error
                os.posix_fallocate(self._file, slot * self._slot_bytes, self._slot_bytes)
            except OSError as error:
                exit_worker(error, None)
            self._reserved.add(slot)
        return _images_in(self.memory[slot], (count, size, size, 3))

    def receive(self, made: Batch | SentBatch) -> Batch:
        """Return the batch of the oldest request, for which DataLoader returned `made`."""
        self._in_flight.popleft()
        return made.to_batch() if isinstance(made, SentBatch) else made


_POOLS: WeakValueDictionary[int, SharedBatches] = WeakValueDictionary()
"""By `id`, because a SentBatch arrives pickled and cannot refer to the object itself."""


def _images_in(memory: Any, shape: tuple[int, ...]) -> Tensor:
    """Return images [count, 3, height, width] in `memory`. shape: (count, height, width, 3)."""
    return torch.frombuffer(memory, dtype=torch.uint8, count=math.prod(shape)).view(shape).permute(0, 3, 1, 2)


def _allocate(count: int, size: int) -> Tensor:
    """Allocate memory that belongs to one batch only."""
    return torch.empty((count, size, size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)


def exit_worker(error: Exception, _: object) -> NoReturn:
    """Log why this worker cannot return its batch, and exit: the loader starts new workers."""
    print(f"a loader worker cannot return its batch: {error}", file=sys.stderr, flush=True)
    os._exit(CRASH)
