"""The type of a batch, as loaders make it and training and evaluation use it."""

from typing import NamedTuple, Self

from torch import Tensor

from pipeline.errors import TemporaryError, list_first

NO_LABEL = -1
"""Label of a validation image that cannot be decoded: it counts, and no prediction is right."""


class Defect(NamedTuple):
    """An image that could not be decoded."""

    sample: int
    reason: str


class Batch(NamedTuple):
    images: Tensor
    """[B, 3, H, W] uint8. From `resident_images.Draws`, the draws of the images, [B, N]."""
    labels: Tensor
    """[B] int64; with several labels a picture, a step gets [B, classes] float32 of 0 and 1."""
    ids: Tensor
    """[B] int64: sample ids in the epoch's order, also of bad images that were replaced."""
    digests: Tensor
    """[B, 32] uint8: SHA-256 of each sample's pixels and label if `run.trace`, else [0, 32]."""
    mix: Tensor
    """[B, 5] float32: how each image is mixed with its neighbour, see `data.mix`; or [0, 5]."""
    defects: list[Defect]
    outage: TemporaryError | None = None
    """Set if the storage failed while the batch was made: its images must then not be used."""

    def readable(self) -> Self:
        """Return the batch, or raise the storage error that the loader put into it."""
        if self.outage:
            raise self.outage
        return self


def format_sample_ids(ids: list[int]) -> str:
    return f"sample ids {list_first([str(i) for i in ids], 8) or 'none'}"
