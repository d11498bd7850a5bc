"""The data loader, whose only input is a range of integers: the positions of batches in the run.

Promise: the batch at a position is a function of (seed, position), whichever process makes it. So
there may be any number of workers, a worker that dies is replaced at the same position, and the end
of an epoch needs no code: the next epoch's first batch is prepared while the last one is trained
on. The memory of a worker stays flat: it holds the mapped index and the order of an epoch.
"""

import hashlib
import math
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.data.augment import SampleKey, augment, center_crop, evaluation_geometry
from pipeline.data.batch import NO_LABEL, Batch, Defect
from pipeline.data.images import BadImageError, Picture, decode
from pipeline.data.interface import Images, Options, OutageError, Sizes, UnreadableError, WorkerSizes
from pipeline.data.mix import MIX_COLUMNS, draw_mix
from pipeline.data.order import Order
from pipeline.data.transfer import pinned
from pipeline.data.workers import Allocate, Workers, WorkersDiedError, allocate
from pipeline.errors import StorageError
from pipeline.streams import log

_MAX_ATTEMPTS = 16
_MAX_REBUILDS = 3
# The other ranks wait in a collective meanwhile, which fails after the whole `run.timeout`.
_RETRY_FRACTION = 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2


class LoaderError(StorageError):
    """A loader that gave up. Only its own process knows: the ranks cannot agree to stop."""


class Patience:
    """Reads the images of a batch, and retries while the storage fails: for so long in all."""

    def __init__(self, images: Images, timeout: float) -> None:
        self._images, self._seconds_left = images, timeout

    def read(self, sample: int) -> bytes | NDArray[np.uint8]:
        """Return what `images.read` returns. Raises OutageError when the time is used up."""
        start, pause = time.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                data = self._images.read(sample)
            except OutageError as outage:
                if time.monotonic() + pause > start + self._seconds_left:
                    raise
                if pause == _FIRST_PAUSE_S:
                    log(f"{outage.problem}: waiting for it, {round(self._seconds_left, 1):g} s at most")
            else:
                if pause > _FIRST_PAUSE_S:
                    waited = time.monotonic() - start
                    self._seconds_left -= waited
                    log(f"the data is back after {waited:.1f} s")
                return data
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


@dataclass
class TrainBatches:
    """The training batches of one process: position = step × accumulate + micro."""

    images: Images
    config: Options
    plan: Sizes
    rank: int

    def __post_init__(self) -> None:
        self._order = Order(self.plan, self.config.run.seed, self.images.labels)
        self._timeout = _RETRY_FRACTION * self.config.run.timeout

    def __getitem__(self, position: int) -> Batch:
        return self.make_batch(position, (), allocate)

    def make_batch(self, position: int, following: Sequence[int], allocate: Allocate) -> Batch:
        """See `workers.BatchMaker`."""
        step, micro = divmod(position, self.plan.accumulate)
        epoch, seed = self.plan.epoch_at(step), self.config.run.seed
        ids, views = self._draws(position)
        # a bucket reads all of these at once; a disk ignores it
        self.images.expect(
            sample for ahead in (position, *following) for sample in self._draws(ahead)[0].tolist()
        )
        pixels = allocate(len(ids), self.plan.image_size_at(step))
        labels = torch.zeros(len(ids), dtype=torch.int64)
        defects: list[Defect] = []
        outage, patience = None, Patience(self.images, self._timeout)
        try:
            for row, (sample, view) in enumerate(zip(ids.tolist(), views.tolist(), strict=True)):
                used = self._load(patience, SampleKey(epoch, sample, view), pixels[row], defects)
                labels[row] = self.images.label(used)
        except OutageError as error:
            # not raised here: the ranks agree on it after the pass, and leave together
            outage = error
        digests = (
            _digests(pixels, labels) if self.config.run.trace else torch.empty((0, 32), dtype=torch.uint8)
        )
        # the place of this pass in the global batch, on which the draw of a mix depends
        first = (self.rank * self.plan.accumulate + micro) * self.plan.micro_batch
        mix = draw_mix(self.config.augment, seed, step, first, len(ids))
        # a copy: `ids` is a slice that would keep the whole global batch in memory
        return Batch(pixels, labels, torch.from_numpy(ids.copy()), digests, mix, defects, outage)

    def _draws(self, position: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        step, micro = divmod(position, self.plan.accumulate)
        return self._order.micro_draws(step, self.rank, micro)

    def _load(self, patience: Patience, key: SampleKey, out: Tensor, defects: list[Defect]) -> int:
        """Write the pixels of a sample, or of its replacement, to `out`. Return the id used."""
        used = key.sample
        for attempt in range(_MAX_ATTEMPTS):
            try:
                picture = Picture.open(patience.read(used), upright=self.images.upright)
                # with the key of the bad sample: a replacement is cropped as that would have been
                out.copy_(augment(picture, self.config.augment, out.shape[-1], self.config.run.seed, key))
                return used
            except (BadImageError, UnreadableError) as error:
                defects.append(Defect(used, str(error)))
            used = self._order.replacement(key.epoch, key.sample, attempt)
        out.zero_()  # the defects are reported, and data.max_bad decides whether the run ends
        return key.sample


@dataclass
class EvalBatches:
    """Batches of the validation images in index order, the same at any world size."""

    images: Images
    config: Options

    def __len__(self) -> int:
        return math.ceil(len(self.images) / self.config.evaluate.batch)

    def __getitem__(self, position: int) -> Batch:
        return self.make_batch(position, (), allocate)

    def make_batch(self, position: int, following: Sequence[int], allocate: Allocate) -> Batch:
        """See `workers.BatchMaker`."""
        size, resize = evaluation_geometry(self.config.evaluate, self.config.augment)
        ids = self._samples(position)
        patience = Patience(self.images, _RETRY_FRACTION * self.config.run.timeout)
        self.images.expect(sample for ahead in (position, *following) for sample in self._samples(ahead))
        pixels = allocate(len(ids), size)
        # an image that cannot be decoded is not replaced: it keeps NO_LABEL, and so counts as wrong
        labels = torch.full((len(ids),), NO_LABEL)
        defects: list[Defect] = []
        outage = None
        for row, sample in enumerate(ids):
            try:
                image = decode(patience.read(sample), upright=self.images.upright)
                pixels[row] = center_crop(image, size, resize)
                labels[row] = self.images.label(sample)
            except (BadImageError, UnreadableError) as error:
                pixels[row] = 0
                defects.append(Defect(sample, str(error)))
            except OutageError as error:
                outage = error
                break
        digests, mix = torch.empty((0, 32), dtype=torch.uint8), torch.empty((0, MIX_COLUMNS))
        return Batch(pixels, labels, torch.tensor(ids), digests, mix, defects, outage)

    def _samples(self, position: int) -> range:
        start = position * self.config.evaluate.batch
        return range(start, min(start + self.config.evaluate.batch, len(self.images)))


def batches(
    maker: TrainBatches | EvalBatches, positions: Sequence[int], plan: WorkerSizes, *, pin: bool
) -> Generator[Batch]:
    """Yield the batches of `positions`, in order, from `plan.workers` processes (0: this one).

    Close it: its workers ignore SIGTERM, and Python waits for them when it exits.

    If a worker dies, the workers are started again at the next position. Raises LoaderError if they
    cannot start, or die more than three times without a batch in between. Call this on the main
    thread: workers die with the thread that made them.
    """
    if not plan.workers:
        made = (maker[position] for position in positions)
        yield from pinned(made) if pin else made
        return
    done, failures = 0, 0
    while done < len(positions):
        workers = None
        try:
            # what the former workers had made ahead is made again: it is the same
            workers = _start(maker, positions[done:], plan)
            for batch in pinned(workers) if pin else workers:
                yield batch
                done, failures = done + 1, 0
        except WorkersDiedError as error:
            # one may be killed for its memory; a batch that kills each of its workers ends the run
            failures += 1
            if failures > _MAX_REBUILDS:
                raise LoaderError(
                    f"loader workers died {failures} times at one batch ({error})",
                    "look at the memory of this machine, or set data.workers=0",
                ) from error
        finally:
            if workers:
                workers.close()


def _start(maker: TrainBatches | EvalBatches, positions: Sequence[int], plan: WorkerSizes) -> Workers:
    try:
        return Workers(maker, positions, plan.workers, plan.prefetch)
    except OSError as error:
        remedy = "raise the limits on processes, memory and open files, or set data.workers=0"
        raise LoaderError(f"loader workers cannot start: {error.strerror}", remedy) from None


def _digests(pixels: Tensor, labels: Tensor) -> Tensor:
    """Return the SHA-256 of each sample, [B, 32] uint8.

    It is over the uint8 pixels [3, H, W] and the label as 8 bytes, little-endian.
    """
    digests = bytearray()
    for image, label in zip(pixels, labels.tolist(), strict=True):
        digests += hashlib.sha256(image.numpy().tobytes() + label.to_bytes(8, "little")).digest()
    return torch.frombuffer(digests, dtype=torch.uint8).view(-1, 32)
