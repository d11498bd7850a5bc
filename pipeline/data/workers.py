"""Processes that make the batches of a loader ahead of time.

Promise: batches arrive in the order of their positions. Worker k of n makes every n-th batch, from
the k-th on, so nothing has to be dealt out. It stays `prefetch` batches ahead: for each
batch that is taken from its pipe it gets a message, and makes one more.

Images travel in memory that both processes map (a memfd): they are not copied, /dev/shm need not be
large, and the kernel takes the memory back when nothing refers to it, however a process ends. A
worker uses it again once nothing in the process that trains refers to its batch: new pages for each
batch would cost a tenth of the loader's time.
"""

import errno
import math
import mmap
import os
import signal
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.data.batch import Batch
from pipeline.errors import CRASH
from pipeline.supervision import die_with_parent

Allocate = Callable[[int, int], Tensor]
"""(count, size) -> [count, 3, size, size] uint8, channels last as in decoded images."""


MakeBatch = Callable[[int, Sequence[int], Allocate], Batch]
"""(position, positions that this process makes next, allocate) -> the batch."""
_START_TIMEOUT_S = 15  # of a worker: a fork and a few lines of Python


class WorkersDiedError(Exception):
    """A worker died or did not start. It is no fault of a batch, so another may make it."""


@contextmanager
def worker_batches(
    make: MakeBatch, positions: Sequence[int], count: int, prefetch: int
) -> Iterator[Iterator[Batch]]:
    """Start `count` processes, and return an iterator of the batches of `positions`, in order.

    They end with the block, at once, also those that wait for a slow disk. Raises OSError if they
    cannot start; WorkersDiedError, as the iterator does, if one hangs at its start: forked from a
    process with threads, it may wait for ever for a lock that one of them held (Python before
    3.11.10, cpython#112275). The iterator raises RuntimeError with the traceback of a worker, too.
    """
    processes: list[BaseProcess] = []
    senders: list[_Sender] = []
    try:
        for number in range(count):
            pipe, theirs = Pipe()
            # dealt out by number, not by speed: who makes a batch needs no exchange, and each
            # worker knows what it makes next, which a bucket reads ahead
            arguments = (make, positions[number::count], prefetch, theirs, os.getpid())
            process = get_context("fork").Process(target=_work, args=arguments, daemon=True)
            process.start()
            processes.append(process)
            senders.append(_Sender(pipe))
            theirs.close()  # else its end would go unnoticed
        for sender in senders:
            if not sender.pipe.poll(_START_TIMEOUT_S):
                raise WorkersDiedError(f"a worker did not start in {_START_TIMEOUT_S} s")
        # each worker has a pipe of its own, so a slow batch of one does not mix up the order
        yield (senders[i % count].receive() for i in range(len(positions)))
    finally:
        for worker in processes:
            worker.kill()  # they ignore other signals, and hold nothing that would have to be written
        for worker in processes:
            worker.join()


class _Sender:
    """A worker, as the process that trains sees it."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self._mappings: dict[int, NDArray[np.uint8]] = {}
        """The worker's memory, by its number."""
        self._lent: dict[int, weakref.ref[memoryview]] = {}

    def receive(self) -> Batch:
        """Return the next batch of the worker, and let it make one more."""
        try:
            # a pickle, but from our own fork; the pixels are in memory that both map
            fields, shape, number, is_new = self.pipe.recv() or self.pipe.recv()  # None: it has started
            file = recv_handle(self.pipe) if is_new else -1
        except (EOFError, OSError) as error:
            raise WorkersDiedError(str(error) or "its pipe was closed") from None
        except RuntimeError:  # no descriptor has arrived
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from None
        if isinstance(fields, str):
            raise RuntimeError(f"in a loader worker: {fields}")
        if is_new:  # mapped by torch, which keeps no descriptor, as mmap would
            size, path = os.fstat(file).st_size, f"/proc/self/fd/{file}"
            self._mappings[number] = torch.from_file(path, shared=True, size=size, dtype=torch.uint8).numpy()
            os.close(file)
        with suppress(OSError):  # it may have made its last batch, and have left
            self.pipe.send_bytes(self._returned())
        if shape:
            lent = self._mappings[number].data  # a new object, which only the storage of the images refers to
            self._lent[number] = weakref.ref(lent)
            fields["images"] = _images(lent, shape)
        tensors = {
            name: torch.from_numpy(field) for name, field in fields.items() if isinstance(field, np.ndarray)
        }
        return Batch(**fields | tensors)

    def _returned(self) -> bytes:
        """Return the number of memory that no tensor is in any more, or b""."""
        for number, lent in self._lent.items():
            if lent() is None:
                del self._lent[number]
                return b"%d" % number
        return b""


class _Memory:
    """The memory of a worker for the images of its batches."""

    def __init__(self) -> None:
        self.mappings: list[mmap.mmap] = []
        self.free: list[int] = []
        """Numbers of those that may be used again."""

    def take(self, num_bytes: int) -> tuple[int, int]:
        """Return the number of a mapping, and its file if it is new, else -1."""
        number = self.free.pop() if self.free else len(self.mappings)
        if number < len(self.mappings) and len(self.mappings[number]) >= num_bytes:
            return number, -1
        file = os.memfd_create("batch")
        try:
            os.posix_fallocate(file, 0, num_bytes)  # else a full memory would be a bus error
        except OSError as error:
            print(f"a loader worker has no memory: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(CRASH)  # another process may make it
        self.mappings[number : number + 1] = [mmap.mmap(file, num_bytes)]
        return number, file


def _work(make: MakeBatch, positions: Sequence[int], prefetch: int, pipe: Connection, parent: int) -> None:
    """Make the batches of `positions`: the life of a worker."""
    # a launcher's signals are for the process that trains: it needs batches until it has saved
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)
    # OpenMP's threads did not survive the fork: a parallel loop would wait for them
    torch.set_num_threads(1)
    memory = _Memory()
    with suppress(EOFError, OSError):  # the process that trains has closed the pipe
        pipe.send(None)
        for i, position in enumerate(positions):
            # the first batches unasked, then one for each that was taken: so memory has a bound
            if i >= prefetch and (returned := pipe.recv_bytes()):
                memory.free.append(int(returned))
            _send(pipe, make, memory, position, positions[i + 1 : i + 1 + prefetch])
    os._exit(0)  # without the exit handlers of the process that it was forked from


def _send(
    pipe: Connection, make: MakeBatch, memory: _Memory, position: int, following: Sequence[int]
) -> None:
    """Make a batch and send it, or the traceback of what was raised. Raises OSError."""
    number, file = -1, -1

    def allocate(count: int, size: int) -> Tensor:
        nonlocal number, file
        number, file = memory.take(count * size * size * 3)
        return _images(memory.mappings[number], (count, size, size, 3))

    try:
        fields = make(position, following, allocate)._asdict()
        shape: tuple[int, ...] = ()
        if number >= 0:  # else there are no pixels, see `Batch.images`
            shape = tuple(fields.pop("images").permute(0, 2, 3, 1).shape)  # as they are in memory
        arrays = {
            name: field.numpy() if isinstance(field, Tensor) else field for name, field in fields.items()
        }
    except BaseException:
        # as text: an exception of any type could fail to be pickled, or look like a lost pipe
        pipe.send((traceback.format_exc(), (), -1, False))
        return
    pipe.send((arrays, shape, number, file >= 0))
    if file >= 0:
        send_handle(pipe, file, 0)
        os.close(file)  # the kernel keeps the memory as long as a process has it mapped


def allocate(count: int, size: int) -> Tensor:
    """Allocate memory in this process."""
    return torch.empty((count, size, size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)


def _images(memory: mmap.mmap | memoryview, shape: tuple[int, ...]) -> Tensor:
    """Return the images [count, 3, height, width] in it. shape: (count, height, width, 3)."""
    images = torch.frombuffer(memory, dtype=torch.uint8, count=math.prod(shape))
    return images.view(shape).permute(0, 3, 1, 2)
