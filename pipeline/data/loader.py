"""From positions to batches: a loader whose only input is a range of integers.

Promise: batch number n is a function of (seed, n) wherever it is made, so workers may be any number, may die and be
replaced at the same position, and an epoch's end is no event: the next epoch's first batch is prepared while this one's
last is trained on. Memory of a worker stays flat: it holds the mapped index and one epoch's permutation.
"""

import hashlib
import math
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pipeline.config.schema import Config
from pipeline.data.augment import Draw, augment, centre, evaluation_geometry
from pipeline.data.batch import NO_LABEL, Batch, Defect
from pipeline.data.images import BadImageError, Picture, decode
from pipeline.data.manifest import OutageError, UnreadableError
from pipeline.data.mix import WIDTH, draw_mix
from pipeline.data.order import Order
from pipeline.data.shared_memory import Room, Roomed, Seats, give_up
from pipeline.data.sources import Images
from pipeline.errors import StorageError
from pipeline.plan import Plan, Resources
from pipeline.supervision import die_with_parent

_REPLACEMENTS = 16
_REBUILDS = 3
_BEGIN_S = 15
"""For a fork and a few lines of Python."""
_PATIENCE = 0.5
"""Of `run.timeout`: how long a read is tried again while the storage fails. The peers wait meanwhile, in an exchange that
gives up after the whole of it."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2


class LoaderError(StorageError):
    """A process that gets no batches any more; it alone knows, so it cannot wait for the others to agree."""


class _Patience:
    """Reads images; waits while the storage that holds them fails. One of a process and its loader workers speaks."""

    def __init__(self, images: Images, seconds: float) -> None:
        self._images = images
        self._seconds = seconds
        self._waiting = mmap.mmap(-1, 1)  # shared with the workers

    def read(self, sample: int) -> bytes | NDArray[np.uint8]:
        """Return what `images.read` returns. OutageError if the storage still fails after so many seconds."""
        start, pause = time.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                data = self._images.read(sample)
            except OutageError as outage:
                if time.monotonic() + pause > start + self._seconds:
                    raise
                self._log(True, f"{str(outage).rpartition(': ')[0]}: waiting for it, {self._seconds:g} s at most")
            else:
                self._log(False, f"the data is back after {time.monotonic() - start:.1f} s: going on")
                return data
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _log(self, is_waiting: bool, line: str) -> None:
        if self._waiting[0] != is_waiting:
            self._waiting[0] = is_waiting
            print(line, file=sys.stderr, flush=True)


@dataclass
class TrainBatches(Roomed):
    """Batch of position step × accumulate + micro, for one process."""

    images: Images
    config: Config
    plan: Plan
    rank: int

    def __post_init__(self) -> None:
        self._order = Order(self.plan, self.config.run.seed)
        self._storage = _Patience(self.images, _PATIENCE * self.config.run.timeout)

    @property
    def room_bytes(self) -> int:
        return 3 * self.plan.micro_batch * self.plan.image_size**2

    def make(self, position: int, room: Room) -> Batch:
        step, micro = divmod(position, self.plan.accumulate)
        epoch = self.plan.epoch(step)
        ids, views = self._order.micro_draws(step, self.rank, micro)
        pixels = room(len(ids), self.plan.size(step))
        labels = torch.zeros(len(ids), dtype=torch.int64)
        defects: list[tuple[int, str]] = []
        outage = None
        try:
            for row, (sample, view) in enumerate(zip(ids.tolist(), views.tolist(), strict=True)):
                labels[row] = self.images.label(self._load((epoch, sample, view), pixels[row], defects))
        except OutageError as found:
            outage = found
        digests = _digests(pixels, labels) if self.config.run.trace else torch.empty((0, 32), dtype=torch.uint8)
        first = (self.rank * self.plan.accumulate + micro) * self.plan.micro_batch
        mix = draw_mix(self.config.augment, self.config.run.seed, step, first, len(ids))
        return Batch(pixels, labels, torch.from_numpy(ids.copy()), digests, mix, defects, outage)

    def _load(self, draw: Draw, out: Tensor, defects: list[tuple[int, str]]) -> int:
        """Writes the pixels of the sample that was drawn, or those of one that stands in; which that is."""
        epoch, sample, _ = draw
        used = sample
        for attempt in range(_REPLACEMENTS):
            try:
                picture = Picture.of(self._storage.read(used))
                out.copy_(augment(picture, self.config.augment, out.shape[-1], self.config.run.seed, draw))
                return used
            except (BadImageError, UnreadableError) as defect:
                defects.append(Defect(used, str(defect)))
            used = self._order.replacement(epoch, sample, attempt)
        out.zero_()  # the defects say it; data.max_bad decides
        return sample


@dataclass
class EvalBatches(Roomed):
    """Batch n of the validation images in index order, the same at any world size."""

    images: Images
    config: Config

    def __post_init__(self) -> None:
        self._storage = _Patience(self.images, _PATIENCE * self.config.run.timeout)

    def __len__(self) -> int:
        return math.ceil(len(self.images) / self.config.evaluate.batch)

    @property
    def room_bytes(self) -> int:
        size, _ = evaluation_geometry(self.config.evaluate, self.config.augment)
        return 3 * self.config.evaluate.batch * size**2

    def make(self, position: int, room: Room) -> Batch:
        size, resize = evaluation_geometry(self.config.evaluate, self.config.augment)
        start = position * self.config.evaluate.batch
        ids = torch.arange(start, min(start + self.config.evaluate.batch, len(self.images)))
        pixels = room(len(ids), size)
        labels = torch.full((len(ids),), NO_LABEL)
        defects: list[tuple[int, str]] = []
        outage = None
        for row, sample in enumerate(ids.tolist()):
            try:
                pixels[row] = centre(decode(self._storage.read(sample)), size, resize)
                labels[row] = self.images.label(sample)
            except (BadImageError, UnreadableError) as defect:
                pixels[row] = 0
                defects.append(Defect(sample, str(defect)))
            except OutageError as found:
                outage = found
                break
        digests = torch.empty((0, 32), dtype=torch.uint8)
        return Batch(pixels, labels, ids, digests, torch.empty((0, WIDTH)), defects, outage)


def batches(dataset: Dataset[Batch], positions: Sequence[int], plan: Resources, *, pin: bool) -> Iterator[Batch]:
    """The batches of `positions`, in order, from `plan.workers` processes (0: made right here).

    A worker that dies is noticed within 5 s, and the loader is built again at the position that is due; after three in a
    row without a batch between them, LoaderError. To be called on the main thread: workers die with the thread that
    made them.

    A worker is forked from a process that has native threads, and may hang for ever in a lock that one of them held at
    that instant (Python before 3.11.10: cpython#112275, when gloo lets go of a tensor). So one that has not begun in time
    is killed.
    """
    done, failures = 0, 0
    while done < len(positions):
        begun = mmap.mmap(-1, max(1, plan.workers))  # shared with the workers: a byte each
        seats = _seats(dataset, plan)
        loader = DataLoader(
            seats or dataset,
            batch_size=None,
            sampler=seats.places(positions[done:]) if seats else positions[done:],
            num_workers=plan.workers,
            # whatever way this process was started: what is mapped here is mapped there
            multiprocessing_context="fork" if plan.workers else None,
            prefetch_factor=plan.prefetch if plan.workers else None,
            worker_init_fn=_Guard(os.getpid(), begun),
            pin_memory=pin,
            generator=torch.Generator(),  # else the loader draws a seed from the network's generator
        )
        iterator = iter(loader)
        # torch raises a worker's death at any line of the main thread, an update's included; ours is the fetch alone
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        stillborn = threading.Timer(_BEGIN_S, _kill_stillborn, (iterator, begun))
        stillborn.daemon = True
        if plan.workers:
            stillborn.start()
        try:
            for made in iterator:
                yield seats.arrived(made) if seats else made
                done, failures = done + 1, 0
        except Exception as error:
            if not plan.workers or not _lost_worker(iterator._workers):  # type: ignore[attr-defined]
                raise
            failures += 1
            if failures > _REBUILDS:
                raise LoaderError(
                    f"loader workers died {failures} times at one batch: look at memory and /dev/shm, or set data.workers=0"
                    f" ({error})"
                ) from error
        finally:
            stillborn.cancel()
            # workers ignore SIGTERM, so one that waits for a slow disk would hold up the exit; they hold nothing
            if plan.workers:
                for worker in iterator._workers:  # type: ignore[attr-defined]
                    worker.kill()
                iterator._shutdown_workers()  # type: ignore[attr-defined]


def _seats(dataset: Dataset[Batch], plan: Resources) -> Seats | None:
    if not plan.workers or not isinstance(dataset, Roomed):
        return None
    try:
        return Seats(dataset, plan.workers * plan.prefetch + 2)  # one that is used, and the one that has just come
    except OSError:
        return None


class _Guard:
    """Start of a worker: it leaves when its process does and not before, whatever a launcher signals to the group."""

    def __init__(self, parent: int, begun: mmap.mmap) -> None:
        self._parent = parent
        self._begun = begun

    def __call__(self, worker: int) -> None:
        self._begun[worker] = 1
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # a batch that does not fit into /dev/shm is else dropped with a traceback, and waited for forever
        Queue._on_queue_feeder_error = staticmethod(give_up)  # type: ignore[attr-defined]
        die_with_parent(self._parent)


def _kill_stillborn(iterator: Any, begun: mmap.mmap) -> None:
    for worker, has_begun in zip(iterator._workers, begun[:], strict=True):
        if not has_begun:
            worker.kill()


def _lost_worker(workers: list[BaseProcess]) -> bool:
    """Whether a worker is gone: none leaves by itself.

    The error itself does not tell: torch says RuntimeError, but whoever reads from a worker in the instant of its death
    sees a broken connection, and is here before the kernel has a process to wait for.
    """
    return bool(wait([worker.sentinel for worker in workers], timeout=1))


def _digests(pixels: Tensor, labels: Tensor) -> Tensor:
    """SHA-256 of each sample: its uint8 pixels [3, H, W], then its label as 8 bytes little-endian. [B, 32] uint8."""
    rows = [
        hashlib.sha256(image.numpy().tobytes() + label.to_bytes(8, "little")).digest()
        for image, label in zip(pixels, labels.tolist(), strict=True)
    ]
    return torch.from_numpy(np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 32).copy())
