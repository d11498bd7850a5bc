"""Processes that make the batches of a loader ahead of time.

Promise: batches arrive in the order of their positions. Worker k of n makes every n-th batch, from
the k-th on, so nothing has to be dealt out. It stays `prefetch` batches ahead: for each
batch that is taken from its pipe it gets an empty message, and makes one more.

Images travel in memory that both processes map (a memfd): they are not copied, /dev/shm need not be
large, and the kernel takes the memory back when nothing refers to it, however a process ends.
"""

import math
import mmap
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pipeline.data.batch import Batch
from pipeline.errors import CRASH
from pipeline.orphan import die_with_parent

Allocate = Callable[[int, int], Tensor]
"""(count, size) -> [count, 3, size, size] uint8, channels last as in decoded images."""
_START_TIMEOUT_S = 15  # of a worker: a fork and a few lines of Python


class BatchMaker(Protocol):
    def make_batch(self, position: int, following: Sequence[int], allocate: Allocate) -> Batch:
        """Return the batch of this position, with its images in memory from `allocate`.

        following: the positions that this process makes next.
        """


class WorkersDiedError(Exception):
    """A worker died or did not start. It is no fault of a batch, so another may make it."""


class Workers:
    """Worker processes for some positions. They ignore signals to stop: close them."""

    def __init__(self, maker: BatchMaker, positions: Sequence[int], count: int, prefetch: int) -> None:
        """Start `count` processes. Raises OSError, or WorkersDiedError if one does not start.

        A worker is forked from a process with native threads, and may hang forever in a lock that
        one of them held at the fork (Python before 3.11.10: cpython#112275).
        """
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        try:
            for number in range(count):
                pipe, theirs = Pipe()
                self._pipes.append(pipe)
                # dealt out by number, not by speed: who makes a batch needs no exchange, and each
                # worker knows what it makes next, which a bucket reads ahead
                mine = positions[number::count]
                process = get_context("fork").Process(
                    target=_work, args=(maker, mine, prefetch, theirs, os.getpid()), daemon=True
                )
                process.start()
                self._processes.append(process)
                theirs.close()  # else its end would go unnoticed
            for pipe in self._pipes:
                if not pipe.poll(_START_TIMEOUT_S):
                    raise WorkersDiedError(f"a worker did not start in {_START_TIMEOUT_S} s")
                pipe.recv()
        except BaseException as error:
            self.close()  # none of them may be left, whatever was raised, KeyboardInterrupt too
            if isinstance(error, EOFError):
                raise WorkersDiedError("a worker died at its start") from None
            raise
        self._count = len(positions)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches in order.

        Raises WorkersDiedError; RuntimeError with the traceback of an error in a worker.
        """
        # each worker has a pipe of its own, so a slow batch of one does not mix up the order
        for i in range(self._count):
            yield _receive(self._pipes[i % len(self._pipes)])

    def close(self) -> None:
        """End the processes at once, also those that wait for a slow disk."""
        for process in self._processes:
            process.kill()  # they hold nothing that would have to be written
        for process in self._processes:
            process.join()


def _receive(pipe: Connection) -> Batch:
    """Return the next batch of a worker, and let it make one more."""
    try:
        # a pickle, but from our own fork; the pixels follow as a descriptor, and are not copied
        fields, shape = pipe.recv()
        if isinstance(fields, str):
            raise RuntimeError(f"in a loader worker: {fields}")
        images = _map_images(recv_handle(pipe), shape)
    except (EOFError, OSError) as error:
        raise WorkersDiedError(str(error) or "its pipe was closed") from None
    with suppress(OSError):  # it may have made its last batch, and have left
        pipe.send_bytes(b"")
    tensors = {
        name: torch.from_numpy(value) for name, value in fields.items() if isinstance(value, np.ndarray)
    }
    return Batch(**fields | tensors | {"images": images})


def _work(maker: BatchMaker, positions: Sequence[int], prefetch: int, pipe: Connection, parent: int) -> None:
    """Make the batches of `positions`: the life of a worker."""
    # a launcher's signals are for the process that trains: it needs batches until it has saved
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)
    torch.set_num_threads(1)  # OpenMP's threads did not survive the fork: a parallel loop would wait for them
    with suppress(
        EOFError, OSError
    ):  # the process that trains closes the pipe only after it has killed this one
        pipe.send("started")
        for i, position in enumerate(positions):
            # the first batches unasked, then one for each that was taken: so memory has a bound
            if i >= prefetch:
                pipe.recv_bytes()
            _send(pipe, maker, position, positions[i + 1 : i + 1 + prefetch])
    os._exit(0)  # without the exit handlers of the process that it was forked from


def _send(pipe: Connection, maker: BatchMaker, position: int, following: Sequence[int]) -> None:
    """Make a batch and send it, or the traceback of what was raised. Raises OSError."""
    files: list[int] = []

    def allocate(count: int, size: int) -> Tensor:
        files.append(_new_memory(count * size * size * 3))
        return _map_images(os.dup(files[-1]), (count, size, size, 3))

    try:
        batch = maker.make_batch(position, following, allocate)
        shape = tuple(batch.images.permute(0, 2, 3, 1).shape)  # as they are in memory
        fields = batch._asdict() | {"images": None}
        arrays = {
            name: value.numpy() if isinstance(value, Tensor) else value for name, value in fields.items()
        }
    except BaseException:
        # as text: an exception of any type could fail to be pickled, or look like a lost pipe
        pipe.send((traceback.format_exc(), ()))
        return
    pipe.send((arrays, shape))
    # the kernel keeps the memory as long as one of both has it mapped
    send_handle(pipe, files[-1], 0)
    os.close(files[-1])


def allocate(count: int, size: int) -> Tensor:
    """Allocate memory in this process."""
    return torch.empty((count, size, size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)


def _new_memory(num_bytes: int) -> int:
    """Return a file of `num_bytes` in memory. Ends this process if there is no room for it."""
    file = os.memfd_create("batch")
    try:
        os.posix_fallocate(file, 0, max(1, num_bytes))  # else a write without room would be a bus error
    except OSError as error:
        print(f"a loader worker has no memory for its batch: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(CRASH)  # others may make it
    return file


def _map_images(file: int, shape: tuple[int, ...]) -> Tensor:
    """Return the images [count, 3, height, width] of a file, and close it.

    shape: (count, height, width, 3).
    """
    memory = mmap.mmap(file, max(1, math.prod(shape)))
    os.close(file)
    images = torch.frombuffer(memory, dtype=torch.uint8, count=math.prod(shape))
    return images.view(shape).permute(0, 3, 1, 2)
