"""The data loader, whose only input is a range of integers: the positions of batches in the run.

Promise: the batch at a position is a function of (seed, position), whichever process makes it. So
there may be any number of workers, a worker that dies is replaced at the same position, and the end
of an epoch needs no code: the next epoch's first batch is prepared while the last one is trained
on. The memory of a worker stays flat: it holds the mapped index and the order of an epoch.
"""

import fcntl
import hashlib
import math
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess, active_children
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from pipeline.config.schema import Config
from pipeline.data.access import Images, OutageError, UnreadableError
from pipeline.data.augment import SampleKey, augment, center_crop, evaluation_geometry
from pipeline.data.batch import NO_LABEL, Batch, Defect
from pipeline.data.images import BadImageError, Picture, decode
from pipeline.data.mix import MIX_COLUMNS, draw_mix
from pipeline.data.order import Order
from pipeline.data.shared_memory import Allocate, SharedBatches, SlotDataset, exit_worker
from pipeline.errors import StorageError
from pipeline.machine import describe_shared_memory, start_failure
from pipeline.plan import Plan, Resources
from pipeline.streams import log
from pipeline.supervision import die_with_parent

_MAX_REPLACEMENTS = 16
_MAX_REBUILDS = 3
_START_TIMEOUT_S = 15  # of a worker: a fork and a few lines of Python
_RETRY_FRACTION = 0.5
"""Fraction of `run.timeout` for which a read is retried while the storage fails.

The other ranks meanwhile wait in a collective, which fails after the whole timeout.
"""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2


class LoaderError(StorageError):
    """A loader that gave up. Only its own process knows: the ranks cannot agree to stop."""


class RetryingReader:
    """Reads images, and retries while their storage fails.

    Only the first of a process and its loader workers to meet an outage logs it.
    """

    def __init__(self, images: Images, timeout: float) -> None:
        self._images, self._timeout = images, timeout
        self._file = os.memfd_create("outage")  # shared with the workers; a lock on it ends with its holder
        os.ftruncate(self._file, 1)
        self._is_waiting = mmap.mmap(self._file, 1)

    def read(self, sample: int) -> bytes | NDArray[np.uint8]:
        """Return what `images.read` returns. Raises OutageError after the timeout."""
        start, pause = time.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                data = self._images.read(sample)
            except OutageError as outage:
                if time.monotonic() + pause > start + self._timeout:
                    raise
                self._log(True, f"{outage.problem}: waiting for it, {self._timeout:g} s at most")
            else:
                self._log(False, f"the data is back after {time.monotonic() - start:.1f} s")
                return data
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _log(self, is_waiting: bool, line: str) -> None:
        if self._is_waiting[0] == is_waiting:
            return
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        is_first = self._is_waiting[0] != is_waiting
        self._is_waiting[0] = is_waiting
        fcntl.lockf(self._file, fcntl.LOCK_UN)
        if is_first:
            log(line)


@dataclass
class TrainBatches(SlotDataset):
    """The training batches of one process: position = step × accumulate + micro."""

    images: Images
    config: Config
    plan: Plan
    rank: int

    def __post_init__(self) -> None:
        self._order = Order(self.plan, self.config.run.seed, self.images.labels)
        self._reader = RetryingReader(self.images, _RETRY_FRACTION * self.config.run.timeout)

    @property
    def max_image_bytes(self) -> int:
        return 3 * self.plan.micro_batch * self.plan.image_size**2

    def make_batch(self, position: int, allocate: Allocate) -> Batch:
        step, micro = divmod(position, self.plan.accumulate)
        epoch = self.plan.epoch_at(step)
        ids, views = self._order.micro_draws(step, self.rank, micro)
        self.images.expect(self._samples_from(position))
        pixels = allocate(len(ids), self.plan.image_size_at(step))
        labels = torch.zeros(len(ids), dtype=torch.int64)
        defects: list[Defect] = []
        outage = None
        try:
            for row, (sample, view) in enumerate(zip(ids.tolist(), views.tolist(), strict=True)):
                used = self._load(SampleKey(epoch, sample, view), pixels[row], defects)
                labels[row] = self.images.label(used)
        except OutageError as error:
            outage = error
        digests = _digests(pixels, labels) if self.config.run.trace else torch.empty((0, 32), dtype=torch.uint8)
        first = (self.rank * self.plan.accumulate + micro) * self.plan.micro_batch
        mix = draw_mix(self.config.augment, self.config.run.seed, step, first, len(ids))
        failed_reads = self.images.pop_failed_reads()
        return Batch(pixels, labels, torch.from_numpy(ids.copy()), digests, mix, defects, outage, failed_reads)

    def _samples_from(self, position: int) -> Iterator[int]:
        """Yield the samples of this batch and of the next ones of this process."""
        for ahead in self.from_position(position):
            step, micro = divmod(ahead, self.plan.accumulate)
            yield from self._order.micro_draws(step, self.rank, micro)[0].tolist()

    def _load(self, key: SampleKey, out: Tensor, defects: list[Defect]) -> int:
        """Write the pixels of a sample, or of its replacement, to `out`. Return the id used."""
        used = key.sample
        for attempt in range(_MAX_REPLACEMENTS):
            try:
                picture = Picture.open(self._reader.read(used), upright=self.images.upright)
                out.copy_(augment(picture, self.config.augment, out.shape[-1], self.config.run.seed, key))
                return used
            except (BadImageError, UnreadableError) as error:
                defects.append(Defect(used, str(error)))
            used = self._order.replacement(key.epoch, key.sample, attempt)
        out.zero_()  # the defects are reported, and data.max_bad decides whether the run ends
        return key.sample


@dataclass
class EvalBatches(SlotDataset):
    """Batches of the validation images in index order, the same at any world size."""

    images: Images
    config: Config

    def __post_init__(self) -> None:
        self._reader = RetryingReader(self.images, _RETRY_FRACTION * self.config.run.timeout)

    def __len__(self) -> int:
        return math.ceil(len(self.images) / self.config.evaluate.batch)

    @property
    def max_image_bytes(self) -> int:
        size, _ = evaluation_geometry(self.config.evaluate, self.config.augment)
        return 3 * self.config.evaluate.batch * size**2

    def make_batch(self, position: int, allocate: Allocate) -> Batch:
        size, resize = evaluation_geometry(self.config.evaluate, self.config.augment)
        ids = torch.tensor(self._samples(position))
        self.images.expect(sample for ahead in self.from_position(position) for sample in self._samples(ahead))
        pixels = allocate(len(ids), size)
        labels = torch.full((len(ids),), NO_LABEL)
        defects: list[Defect] = []
        outage = None
        for row, sample in enumerate(ids.tolist()):
            try:
                image = decode(self._reader.read(sample), upright=self.images.upright)
                pixels[row] = center_crop(image, size, resize)
                labels[row] = self.images.label(sample)
            except (BadImageError, UnreadableError) as error:
                pixels[row] = 0
                defects.append(Defect(sample, str(error)))
            except OutageError as error:
                outage = error
                break
        digests = torch.empty((0, 32), dtype=torch.uint8)
        failed_reads = self.images.pop_failed_reads()
        return Batch(pixels, labels, ids, digests, torch.empty((0, MIX_COLUMNS)), defects, outage, failed_reads)

    def _samples(self, position: int) -> range:
        start = position * self.config.evaluate.batch
        return range(start, min(start + self.config.evaluate.batch, len(self.images)))


class _Workers(_MultiProcessingDataLoaderIter):
    """The iterator of a DataLoader with workers, which `batches` ends."""

    def __del__(self) -> None:
        """Do nothing: torch's would raise if an iterator could not start all of its workers."""


def batches(dataset: Dataset[Batch], positions: Sequence[int], plan: Resources, *, pin: bool) -> Generator[Batch]:
    """Yield the batches of `positions`, in order, from `plan.workers` processes (0: this one).

    Close it: its workers ignore SIGTERM, and Python waits for them when it exits.

    If a worker dies, it is noticed within 5 s and the loader is built again at the next position.
    Raises LoaderError if workers cannot start, or die more than three times without a batch in
    between. Call this on the main thread: workers die with the thread that made them.

    A worker is forked from a process with native threads, and may hang forever in a lock that one
    of them held at the fork (Python before 3.11.10: cpython#112275, when gloo frees a tensor). So a
    worker that has not started in time is killed.
    """
    done, failures = 0, 0
    while done < len(positions):
        started = mmap.mmap(-1, max(1, plan.workers))  # shared with the workers, one byte each
        if isinstance(dataset, SlotDataset):
            dataset.dealing = positions[done:], plan
        shared = None
        if plan.workers and isinstance(dataset, SlotDataset):
            # two more than are prefetched: the batch in use and the one that has just arrived
            shared = SharedBatches(dataset, plan.workers * plan.prefetch + 2)
        loader = DataLoader(
            shared or dataset, batch_size=None, num_workers=plan.workers, pin_memory=pin,
            sampler=shared.requests(positions[done:]) if shared else positions[done:],
            # always fork: workers then have the index and the slots mapped too
            multiprocessing_context="fork" if plan.workers else None,
            prefetch_factor=plan.prefetch if plan.workers else None,
            worker_init_fn=partial(_init_worker, os.getpid(), started),
            generator=torch.Generator(),  # else the loader draws a seed from the network's generator
        )  # fmt: skip
        before = active_children()
        try:
            iterator: Iterator[Any] = _Workers(loader) if plan.workers else iter(loader)
        except OSError as error:
            for worker in {*active_children()} - {*before}:
                worker.kill()
            raise LoaderError(start_failure("loader workers", error, "set data.workers=0")) from None
        # torch's handler raises a worker's death at any line of the main thread, also in an update;
        # without it, only fetching a batch raises
        if threading.current_thread() is threading.main_thread():  # elsewhere torch has set none
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        start_timer = threading.Timer(_START_TIMEOUT_S, _kill_unstarted, (iterator, started))
        start_timer.daemon = True
        if plan.workers:
            start_timer.start()
        try:
            for made in iterator:
                yield shared.receive(made) if shared else made
                done, failures = done + 1, 0
        except Exception as error:
            if not plan.workers or not _has_dead_worker(iterator._workers):  # type: ignore[attr-defined]
                raise
            failures += 1
            if failures > _MAX_REBUILDS:
                raise LoaderError(
                    f"loader workers died {failures} times at one batch",
                    f"look at memory and {describe_shared_memory()}, or set data.workers=0 ({error})",
                ) from error
        finally:
            start_timer.cancel()
            # workers ignore SIGTERM, and one that waits for a slow disk would delay the exit
            if plan.workers:
                for worker in iterator._workers:  # type: ignore[attr-defined]
                    worker.kill()
                iterator._shutdown_workers()  # type: ignore[attr-defined]


def _init_worker(parent: int, started: mmap.mmap, worker: int) -> None:
    """Make this worker exit with its parent process, and not before on any signal."""
    started[worker] = 1
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # by default a batch that does not fit into /dev/shm is dropped: the loader waits forever
    Queue._on_queue_feeder_error = staticmethod(exit_worker)  # type: ignore[attr-defined]
    sys.excepthook = _report_unless_parent_is_gone
    die_with_parent(parent)


def _report_unless_parent_is_gone(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print the error of a worker's thread, unless it only says that the parent has just ended.

    The thread that passes tensors on finds this out before the kernel's signal arrives.
    """
    if not isinstance(error, EOFError | ConnectionError):
        sys.__excepthook__(kind, error, trace)


def _kill_unstarted(iterator: Any, started: mmap.mmap) -> None:
    for worker, has_started in zip(iterator._workers, started[:], strict=True):
        if not has_started:
            worker.kill()


def _has_dead_worker(workers: list[BaseProcess]) -> bool:
    """Return True if a worker died: none exits by itself.

    The exception does not tell: torch raises RuntimeError, but a read at the instant of a worker's
    death fails with a broken connection, before the kernel has reported the death. Hence the
    timeout.
    """
    return bool(wait([worker.sentinel for worker in workers], timeout=1))


def _digests(pixels: Tensor, labels: Tensor) -> Tensor:
    """Return the SHA-256 of each sample, [B, 32] uint8.

    It is over the uint8 pixels [3, H, W] and the label as 8 bytes, little-endian.
    """
    digests = bytearray()
    for image, label in zip(pixels, labels.tolist(), strict=True):
        digests += hashlib.sha256(image.numpy().tobytes() + label.to_bytes(8, "little")).digest()
    return torch.frombuffer(digests, dtype=torch.uint8).view(-1, 32)
