"""What a batch is, wherever it is made and used."""

from typing import NamedTuple

from torch import Tensor

from pipeline.data.manifest import OutageError

NO_LABEL = -1
"""Label of a validation image that cannot be decoded: it counts, and no answer is right."""


class Defect(NamedTuple):
    """Of one image. Named, because torch's loader hands on a bare tuple as a list."""

    sample: int
    reason: str


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
    outage: OutageError | None = None
    """Set if the storage failed while the batch was made: its images are then not to be used."""


def format_sample_ids(ids: list[int]) -> str:
    """As an account of a failure shows them: the first few."""
    more = f" and {len(ids) - 8} more" if len(ids) > 8 else ""
    return f"sample ids {', '.join(map(str, ids[:8])) or 'none'}{more}"
