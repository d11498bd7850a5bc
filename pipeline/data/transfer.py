"""Copies of batches to the GPU, one ahead: while one is trained on, the next is copied.

Promise: the same batches in the same order. Copies run on their own stream, from pinned memory, so
that neither the CPU nor the kernels of the step wait for them.
"""

from collections.abc import Iterator
from functools import cache

import torch

from pipeline.data.batch import Batch


def to_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Return the batches with images, labels and mix on the device, ready for its current stream.

    No-op on CPU.
    """
    return _to_gpu(batches, device) if device.type == "cuda" else batches


def _to_gpu(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    stream = _copy_stream(device)
    previous: tuple[Batch, torch.cuda.Event] | None = None
    for batch in batches:
        with torch.cuda.stream(stream):
            names = ("images", "labels", "mix")
            moved = batch._replace(**{name: getattr(batch, name).to(device, non_blocking=True) for name in names})
            copied = stream.record_event()
        if previous:
            yield _ready(*previous)
        previous = moved, copied
    if previous:
        yield _ready(*previous)


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the device's stream for copies: torch reuses freed memory only on the same stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _ready(batch: Batch, copied: torch.cuda.Event) -> Batch:
    current = torch.cuda.current_stream()
    current.wait_event(copied)
    for tensor in (batch.images, batch.labels, batch.mix):
        tensor.record_stream(current)  # else the copying stream, which owns the memory, could reuse it too early
    return batch
