"""Where batches are written: for workers in shared memory that is made once and used again, so that nothing is copied.

Promise: no batch is written over while anything refers to it. Why that holds: each seat is a Python object to which every
tensor over it holds a reference, views included; one that nobody else refers to is free, and where none is free a batch
goes into memory of its own. Memory anew for each batch is cleared by the kernel page by page, and taken back so: 3 % of
what a loader does.
"""

import math
import mmap
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from pipeline.data.batch import Batch
from pipeline.errors import CRASH

Room = Callable[[int, int], Tensor]
"""(count, size) -> [count, 3, size, size] uint8, in memory pixel by pixel, as images are decoded and resized."""
Place = tuple[int, int | None]
"""The position of a batch, and the seat that it is to be written into."""

_FOLDER = "/dev/shm"


class Roomed(Dataset[Batch]):
    """Batches whose images are written into a room that is given."""

    @property
    def room_bytes(self) -> int:
        """Of the largest."""
        raise NotImplementedError

    def make(self, position: int, room: Room) -> Batch:
        raise NotImplementedError

    def __getitem__(self, position: int) -> Batch:
        return self.make(position, _room)


@dataclass(frozen=True, slots=True)
class Handed:
    """A batch on its way from a worker, without its images. No tuple: torch's loader takes these apart, and an older one
    (2.11) pins their fields without asking for a `pin_memory` of their own."""

    seats: int
    seat: int
    shape: tuple[int, ...]
    rest: Batch

    def whole(self) -> Batch:
        return self.rest._replace(images=_over(_KNOWN[self.seats].memory[self.seat], self.shape))

    def pin_memory(self) -> Batch:
        """What the loader's own thread asks for."""
        batch: Batch = pin_memory(self.whole())  # type: ignore[no-untyped-call]
        return batch


class Seats(Dataset[Batch | Handed]):
    """The same batches by `Place`. To be made before workers are forked; OSError where there is no shared memory."""

    def __init__(self, roomed: Roomed, count: int) -> None:
        self._roomed = roomed
        self._bytes = -(-roomed.room_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._file = os.open(_FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC)
        finalize(self, os.close, self._file)
        os.ftruncate(self._file, count * self._bytes)
        self.memory = [mmap.mmap(self._file, self._bytes, offset=seat * self._bytes) for seat in range(count)]
        self._unused = self._references(0)
        self._underway: deque[int | None] = deque()
        self._reserved: set[int] = set()  # by this process
        _KNOWN[id(self)] = self

    def places(self, positions: Sequence[int]) -> Iterator[Place]:
        """A sampler: the loader asks for one when it has something to do for a worker."""
        for position in positions:
            self._underway.append(self._free())
            yield position, self._underway[-1]

    def _free(self) -> int | None:
        for seat in range(len(self.memory)):
            if seat not in self._underway and self._references(seat) == self._unused:
                return seat
        return None

    def _references(self, seat: int) -> int:
        return sys.getrefcount(self.memory[seat])

    def __getitem__(self, place: Place) -> Batch | Handed:
        """In a worker."""
        position, seat = place
        if seat is None:
            return self._roomed[position]
        batch = self._roomed.make(position, partial(self._room, seat))
        count, colours, height, width = batch.images.shape
        shape = (count, height, width, colours)
        return Handed(id(self), seat, shape, batch._replace(images=torch.empty(0, dtype=torch.uint8)))

    def _room(self, seat: int, count: int, size: int) -> Tensor:
        if seat not in self._reserved:
            try:
                os.posix_fallocate(self._file, seat * self._bytes, self._bytes)  # else a full one is a bus error
            except OSError as error:
                give_up(error, None)
            self._reserved.add(seat)
        return _over(self.memory[seat], (count, size, size, 3))

    def arrived(self, made: Batch | Handed) -> Batch:
        """The batch of the oldest place that is underway."""
        self._underway.popleft()
        return made.whole() if isinstance(made, Handed) else made


_KNOWN: WeakValueDictionary[int, Seats] = WeakValueDictionary()
"""By `id`: what comes from a worker has been pickled."""


def _over(memory: mmap.mmap, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8, count=math.prod(shape)).view(shape).permute(0, 3, 1, 2)


def _room(count: int, size: int) -> Tensor:
    """Memory of its own, in a worker shared."""
    shape = (count, size, size, 3)
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8).permute(0, 3, 1, 2)
    try:
        storage: torch.UntypedStorage = torch.UntypedStorage._new_shared(math.prod(shape))  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        give_up(error, None)
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape).permute(0, 3, 1, 2)


def give_up(error: Exception, _: object) -> NoReturn:
    """Of a worker that cannot hand over its batch."""
    print(f"a loader worker cannot hand over its batch: {error}", file=sys.stderr, flush=True)
    os._exit(CRASH)
