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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from pipeline.config import Config
from pipeline.data.augment import Draw, augment, centre, evaluation_geometry
from pipeline.data.images import BadImageError, Picture, decode
from pipeline.data.manifest import UnreadableError
from pipeline.data.mix import WIDTH, draw_mix
from pipeline.data.order import Order
from pipeline.data.sources import Images
from pipeline.plan import Plan, Resources
from pipeline.verdict import CRASH, StorageError
from pipeline.world import die_with_parent

_REPLACEMENTS = 16
_REBUILDS = 3
_BEGIN_S = 15
"""For a fork and a few lines of Python."""
NO_LABEL = -1
"""Label of a validation image that cannot be decoded: it counts, and no answer is right."""


class Defect(NamedTuple):
    """Of one image. Named, because torch's loader hands on a bare tuple as a list."""

    sample: int
    reason: str


class LoaderError(StorageError):
    """A process that gets no batches any more; it alone knows, so it cannot wait for the others to agree."""


class Batch(NamedTuple):
    images: Tensor
    """[B, 3, H, W] uint8."""
    labels: Tensor
    """[B] int64."""
    ids: Tensor
    """[B] int64: sample ids as the order drew them, also where another stands in."""
    digests: Tensor
    """[B, 32] uint8: SHA-256 of each sample's pixels and label where the run is traced, else [0, 32]."""
    mix: Tensor
    """[B, 5] float32: how each image is mixed with its neighbour (`data.mix`); [0, 5] where none is."""
    defects: list[tuple[int, str]]
    """A `Defect` for each image that could not be decoded."""


@dataclass
class TrainBatches(Dataset[Batch]):
    """Batch of position step × accumulate + micro, for one process."""

    images: Images
    config: Config
    plan: Plan
    rank: int

    def __post_init__(self) -> None:
        self._order = Order(self.plan, self.config.run.seed)

    def __getitem__(self, position: int) -> Batch:
        step, micro = divmod(position, self.plan.accumulate)
        epoch = self.plan.epoch(step)
        ids, views = self._order.micro_draws(step, self.rank, micro)
        pixels = _room(len(ids), self.plan.size(step))
        labels = torch.empty(len(ids), dtype=torch.int64)
        defects: list[tuple[int, str]] = []
        for row, (sample, view) in enumerate(zip(ids.tolist(), views.tolist(), strict=True)):
            labels[row] = self.images.label(self._load((epoch, sample, view), pixels[row], defects))
        digests = _digests(pixels, labels) if self.config.run.trace else torch.empty((0, 32), dtype=torch.uint8)
        first = (self.rank * self.plan.accumulate + micro) * self.plan.micro_batch
        mix = draw_mix(self.config.augment, self.config.run.seed, step, first, len(ids))
        return Batch(pixels, labels, torch.from_numpy(ids.copy()), digests, mix, defects)

    def _load(self, draw: Draw, out: Tensor, defects: list[tuple[int, str]]) -> int:
        """Writes the pixels of the sample that was drawn, or those of one that stands in; which that is."""
        epoch, sample, _ = draw
        used = sample
        for attempt in range(_REPLACEMENTS):
            try:
                picture = Picture.of(self.images.read(used))
                out.copy_(augment(picture, self.config.augment, out.shape[-1], self.config.run.seed, draw))
                return used
            except (BadImageError, UnreadableError) as defect:
                defects.append(Defect(used, str(defect)))
            used = self._order.replacement(epoch, sample, attempt)
        out.zero_()  # the defects say it; data.max_bad decides
        return sample


@dataclass
class EvalBatches(Dataset[Batch]):
    """Batch n of the validation images in index order, the same at any world size."""

    images: Images
    config: Config

    def __len__(self) -> int:
        return math.ceil(len(self.images) / self.config.evaluate.batch)

    def __getitem__(self, position: int) -> Batch:
        size, resize = evaluation_geometry(self.config.evaluate, self.config.augment)
        start = position * self.config.evaluate.batch
        ids = torch.arange(start, min(start + self.config.evaluate.batch, len(self.images)))
        pixels = _room(len(ids), size)
        labels = torch.empty(len(ids), dtype=torch.int64)
        defects: list[tuple[int, str]] = []
        for row, sample in enumerate(ids.tolist()):
            try:
                pixels[row] = centre(decode(self.images.read(sample)), size, resize)
                labels[row] = self.images.label(sample)
            except (BadImageError, UnreadableError) as defect:
                pixels[row], labels[row] = 0, NO_LABEL
                defects.append(Defect(sample, str(defect)))
        return Batch(pixels, labels, ids, torch.empty((0, 32), dtype=torch.uint8), torch.empty((0, WIDTH)), defects)


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
        loader = DataLoader(
            dataset,
            batch_size=None,
            sampler=positions[done:],
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
            for batch in iterator:
                yield batch
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
        Queue._on_queue_feeder_error = staticmethod(_give_up)  # type: ignore[attr-defined]
        die_with_parent(self._parent)


def _kill_stillborn(iterator: Any, begun: mmap.mmap) -> None:
    for worker, has_begun in zip(iterator._workers, begun[:], strict=True):
        if not has_begun:
            worker.kill()


def _give_up(error: Exception, _: object) -> NoReturn:
    print(f"a loader worker cannot hand over its batch: {error}", file=sys.stderr, flush=True)
    os._exit(CRASH)


def _lost_worker(workers: list[BaseProcess]) -> bool:
    """Whether a worker is gone: none leaves by itself.

    The error itself does not tell: torch says RuntimeError, but whoever reads from a worker in the instant of its death
    sees a broken connection, and is here before the kernel has a process to wait for.
    """
    return bool(wait([worker.sentinel for worker in workers], timeout=1))


def _room(count: int, size: int) -> Tensor:
    """Where a batch is written: [count, 3, size, size] uint8, in memory pixel by pixel, as images are decoded and resized.

    In a worker it is memory that the training process shares, so that a batch is handed over without a copy.
    """
    shape = (count, size, size, 3)
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8).permute(0, 3, 1, 2)
    try:
        storage: torch.UntypedStorage = torch.UntypedStorage._new_shared(math.prod(shape))  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        _give_up(error, None)
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape).permute(0, 3, 1, 2)


def _digests(pixels: Tensor, labels: Tensor) -> Tensor:
    """SHA-256 of each sample: its uint8 pixels [3, H, W], then its label as 8 bytes little-endian. [B, 32] uint8."""
    rows = [
        hashlib.sha256(image.numpy().tobytes() + label.to_bytes(8, "little")).digest()
        for image, label in zip(pixels, labels.tolist(), strict=True)
    ]
    return torch.from_numpy(np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 32).copy())
