"""The interface of the loader: the images that it reads, and the settings that a batch depends on.

`config.schema.Config` (Options) and `plan.Plan` (sizes) have the settings, with their meaning.
Nothing else of a request reaches the loader, so a batch cannot depend on anything else.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import TemporaryError


class UnreadableError(Exception):
    """An image file that cannot be read, or that changed since it was indexed."""


class OutageError(TemporaryError):
    """The storage that holds the images cannot be read. It says nothing about any single image."""


class Images(Protocol):
    """The images of one split."""

    @property
    def labels(self) -> NDArray[np.int32]:
        """The class of each image, [N]."""

    @property
    def upright(self) -> bool:
        """Images are turned as their EXIF orientation says."""

    def __len__(self) -> int: ...
    def name(self, i: int) -> str: ...
    def label(self, i: int) -> int: ...
    def read(self, i: int) -> bytes | NDArray[np.uint8]:
        """Return the bytes of the file, or decoded pixels [3, H, W] uint8.

        Raises UnreadableError if this image cannot be read, OutageError if its storage cannot.
        """

    def expect(self, samples: Iterable[int]) -> None:
        """Prepare to read these images next, in this order. Only a bucket looks at them."""


class RunOptions(Protocol):
    @property
    def seed(self) -> int: ...
    @property
    def timeout(self) -> float: ...
    @property
    def trace(self) -> bool: ...


class EvaluateOptions(Protocol):
    @property
    def batch(self) -> int: ...
    @property
    def size(self) -> int | None: ...
    @property
    def resize(self) -> int | None: ...


class AugmentOptions(Protocol):
    @property
    def size(self) -> int: ...
    @property
    def scale(self) -> tuple[float, float]: ...
    @property
    def ratio(self) -> tuple[float, float]: ...
    @property
    def pad(self) -> int: ...
    @property
    def flip(self) -> float: ...
    @property
    def alternate_flips(self) -> bool: ...
    @property
    def policy(self) -> str: ...
    @property
    def magnitude(self) -> int: ...
    @property
    def erase(self) -> float: ...
    @property
    def mixup(self) -> float: ...
    @property
    def cutmix(self) -> float: ...


class Options(Protocol):
    @property
    def run(self) -> RunOptions: ...
    @property
    def augment(self) -> AugmentOptions: ...
    @property
    def evaluate(self) -> EvaluateOptions: ...


class WorkerSizes(Protocol):
    @property
    def workers(self) -> int: ...
    @property
    def prefetch(self) -> int: ...


class Sizes(Protocol):
    @property
    def train_images(self) -> int: ...
    @property
    def global_batch(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def accumulate(self) -> int: ...
    @property
    def steps_per_epoch(self) -> int: ...
    @property
    def repeats(self) -> int: ...
    @property
    def balance(self) -> str: ...
    def epoch_at(self, step: int) -> int: ...
    def image_size_at(self, step: int) -> int: ...
    def class_shares(self, counts: Sequence[int]) -> list[float]: ...
