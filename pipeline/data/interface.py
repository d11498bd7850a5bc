"""The interface of the loader: the images that it reads, the settings a batch depends on."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import TemporaryError
from pipeline.plan import DataSize

AugmentOptions = Any
"""`config.sections.Augment`. The loader imports no configuration, so it can be read alone."""


class Options(Protocol):
    """The sections of `config.schema.Config` that a batch depends on, and no other."""

    @property
    def run(self) -> Any: ...
    @property
    def augment(self) -> AugmentOptions: ...
    @property
    def evaluate(self) -> Any: ...


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


@dataclass(frozen=True)
class Source:
    """The images to train on and to validate on: the same in every process."""

    size: DataSize
    digest: str
    classes: tuple[str, ...]
    train: Images
    val: Images
    index: Any = None
    """The index of a folder or pack (`addons.datasets.index`). Rank 0 sends it to the others."""
