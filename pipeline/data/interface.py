"""The interface of the loader: the images that it reads, the settings a batch depends on."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import TemporaryError
from pipeline.plan import DataSize

if TYPE_CHECKING:
    from torch import Tensor

Options = Any
"""`config.schema.Config` or a section of it: so the loader, without it, can be read alone."""


class UnreadableError(Exception):
    """The defect of one image, as a phrase: it cannot be read or decoded, or has changed."""


class OutageError(TemporaryError):
    """The storage that holds the images cannot be read. It says nothing about any single image."""


class Picture(Protocol):
    """An image of known size. A crop of it is decoded on demand."""

    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...
    def region(self, top: int, left: int, height: int, width: int) -> "Tensor":
        """Return a crop [3, height, width] uint8, maybe as a view. Raises UnreadableError."""


class Images(Protocol):
    """The images of one split."""

    @property
    def labels(self) -> NDArray[np.int32]:
        """The class of each image, [N]; with several labels a picture, see `Source.label_sets`."""

    def __len__(self) -> int: ...
    def name(self, i: int) -> str: ...
    def read(self, i: int) -> bytes | NDArray[np.uint8]:
        """Return the bytes of the file, or decoded pixels [3, H, W] uint8.

        Raises UnreadableError if this image cannot be read, OutageError if its storage cannot.
        """

    def open(self, i: int) -> Picture:
        """Read the image, and of a file its header. Raises what `read` does."""

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
    label_sets: tuple[tuple[int, ...], ...] = ()
    """With several labels a picture: each set of classes that an image has, as sorted numbers. The
    label of an image is then the number of its set. Empty: one class a picture."""
