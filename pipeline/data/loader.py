"""The data loader, whose only input is a range of integers: the positions of batches in the run.

Promise: the batch at a position is a function of (seed, position), whichever process makes it. So
there may be any number of workers, all start again at the same position if one dies, and the end of
an epoch needs no code: the next epoch's first batch is prepared while the last one is trained
on. The memory of a worker stays flat: it holds the mapped index and the order of an epoch.
"""

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.data.augment import SampleKey, augment
from pipeline.data.batch import Batch, Defect
from pipeline.data.interface import Images, Options, OutageError, Picture, UnreadableError
from pipeline.data.mix import MIX_COLUMNS, draw_mix
from pipeline.data.order import Order
from pipeline.data.transfer import pin as pin_batch
from pipeline.data.transfer import pinned
from pipeline.data.workers import Allocate, WorkersDiedError, allocate, worker_batches
from pipeline.errors import StorageError
from pipeline.plan import Plan, Resources
from pipeline.streams import log

_MAX_ATTEMPTS = 16
_MAX_REBUILDS = 3
# The other ranks wait in a collective meanwhile, which fails after the whole `run.timeout`.
_RETRY_FRACTION = 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2


class LoaderError(StorageError):
    """A loader that gave up. Only its own process knows: the ranks cannot agree to stop."""


@dataclass
class Patience:
    """Opens the images of a batch, and retries while the storage fails: for so long in all."""

    images: Images
    seconds_left: float

    def open(self, sample: int) -> Picture:
        """Return what `images.open` returns. Raises OutageError when the time is used up."""
        pause = _FIRST_PAUSE_S
        while True:
            start = time.monotonic()
            try:
                return self.images.open(sample)
            except OutageError as outage:
                if self.seconds_left < pause:
                    raise
                if pause == _FIRST_PAUSE_S:
                    log(f"{outage.problem}: waiting for it, {self.seconds_left:.3g} s at most")
            time.sleep(pause)
            self.seconds_left -= time.monotonic() - start
            pause = min(2 * pause, _LONGEST_PAUSE_S)


@dataclass
class Batches(ABC):
    """Makes the batch at a position. A subclass says which samples are in it, and loads each."""

    images: Images
    config: Options

    def __getitem__(self, position: int) -> Batch:
        return self.make_batch(position, (), allocate)

    def make_batch(self, position: int, following: Sequence[int], allocate: Allocate) -> Batch:
        """Return the batch at a position. See `workers.MakeBatch`."""
        keys = self._keys(position)
        # a bucket reads all of these at once; a disk ignores it
        self.images.expect(key.sample for ahead in (position, *following) for key in self._keys(ahead))
        pixels = allocate(len(keys), self._size_at(position))
        labels = torch.zeros(len(keys), dtype=torch.int64)
        defects: list[Defect] = []
        outage = None
        patience = Patience(self.images, _RETRY_FRACTION * self.config.run.timeout)
        try:
            for row, key in enumerate(keys):
                labels[row] = self._load(key, pixels[row], defects, patience)
        except OutageError as error:
            # not raised here: the ranks agree on it after a pass, and leave together
            outage = error
        ids = torch.tensor([key.sample for key in keys])
        digests, mix = torch.empty((0, 32), dtype=torch.uint8), torch.empty((0, MIX_COLUMNS))
        return Batch(pixels, labels, ids, digests, mix, defects, outage)

    @abstractmethod
    def _keys(self, position: int) -> list[SampleKey]: ...
    @abstractmethod
    def _size_at(self, position: int) -> int: ...
    @abstractmethod
    def _load(self, key: SampleKey, out: Tensor, defects: list[Defect], patience: Patience) -> int:
        """Write the pixels of a sample to `out`, or add its defect. Return its label."""


@dataclass
class TrainBatches(Batches):
    """The training batches of one process: position = step × accumulate + micro."""

    plan: Plan
    rank: int

    def __post_init__(self) -> None:
        self._order = Order(self.plan, self.config.run.seed, self.images.labels)

    def make_batch(self, position: int, following: Sequence[int], allocate: Allocate) -> Batch:
        batch = super().make_batch(position, following, allocate)
        if self.config.run.trace:
            batch = batch._replace(digests=sample_digests(batch.images, batch.labels))
        return batch._replace(mix=self.mix(position))

    def mix(self, position: int) -> Tensor:
        """Return how the images at a position are mixed, see `Batch.mix`."""
        step, micro = divmod(position, self.plan.accumulate)
        # the place of this pass in the global batch, on which the draw of a mix depends
        first = (self.rank * self.plan.accumulate + micro) * self.plan.micro_batch
        return draw_mix(self.config.augment, self.config.run.seed, step, first, self.plan.micro_batch)

    def _keys(self, position: int) -> list[SampleKey]:
        step, micro = divmod(position, self.plan.accumulate)
        ids, views = self._order.micro_draws(step, self.rank, micro)
        epoch = self.plan.epoch_at(step)
        return [SampleKey(epoch, *draw) for draw in zip(ids.tolist(), views.tolist(), strict=True)]

    def _size_at(self, position: int) -> int:
        return self.plan.image_size_at(position // self.plan.accumulate)

    def _load(self, key: SampleKey, out: Tensor, defects: list[Defect], patience: Patience) -> int:
        """Also tries its replacements. The label is that of the image used."""
        used = key.sample
        for attempt in range(_MAX_ATTEMPTS):
            try:
                picture = patience.open(used)
                # with the key of the bad sample: a replacement is cropped as that would have been
                out.copy_(augment(picture, self.config.augment, out.shape[-1], self.config.run.seed, key))
                return int(self.images.labels[used])
            except UnreadableError as error:
                defects.append(Defect(used, str(error)))
            used = self._order.replacement(key.epoch, key.sample, attempt)
        out.zero_()  # the defects are reported, and data.max_bad decides whether the run ends
        return int(self.images.labels[key.sample])


def batches(maker: Batches, positions: Sequence[int], plan: Resources, *, pin: bool) -> Generator[Batch]:
    """Yield the batches of `positions`, in order, from `plan.workers` processes (0: this one).

    Close it: its workers ignore SIGTERM, and Python waits for them when it exits. If a worker dies,
    all are started again at the next position. Raises LoaderError if they cannot start, or die more
    than three times at one batch. Iterate it on the main thread: the first `next` forks the
    workers, and they die with the thread that forked them.
    """
    if not plan.workers:
        for position in positions:
            batch = maker[position]  # in this thread: a policy draws from torch's default generator
            yield pin_batch(batch) if pin else batch
        return
    done, failures = 0, 0
    while done < len(positions):
        try:
            # what the former workers had made ahead is made again: it is the same
            with worker_batches(
                maker.make_batch, positions[done:], plan.workers, plan.prefetch
            ) as made_ahead:
                for batch in pinned(made_ahead) if pin else made_ahead:
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
        except OSError as error:
            remedy = "raise the limits on processes, memory and open files, or set data.workers=0"
            raise LoaderError(f"loader workers cannot start: {error.strerror}", remedy) from None


def sample_digests(pixels: Tensor, labels: Tensor) -> Tensor:
    """Return the SHA-256 of each sample's pixels [3, H, W] and label (8 bytes), [B, 32] uint8."""
    digests = bytearray()
    for image, label in zip(pixels, labels.tolist(), strict=True):
        digests += hashlib.sha256(image.numpy().tobytes() + label.to_bytes(8, "little")).digest()
    return torch.frombuffer(digests, dtype=torch.uint8).view(-1, 32)
