"""Batches to the device, one ahead: while one is trained on, the next is copied.

Promise: the same batches in the same order. The copies run on a stream of their own, out of pinned memory, so that neither
the processor nor the kernels of the step wait for them; a CPU's batches are where they should be already.
"""

from collections.abc import Iterator

import torch

from pipeline.data.batch import Batch


def to_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Each batch with `images`, `labels` and `mix` on the device, whose current stream may use them at once."""
    return _copied(batches, device) if device.type == "cuda" else batches


def _copied(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    before: tuple[Batch, torch.cuda.Event] | None = None
    for batch in batches:
        with torch.cuda.stream(stream):
            moved = batch._replace(
                **{name: getattr(batch, name).to(device, non_blocking=True) for name in ("images", "labels", "mix")}
            )
            arrival = stream.record_event()
        if before:
            yield _ready(*before)
        before = moved, arrival
    if before:
        yield _ready(*before)


def _ready(batch: Batch, arrival: torch.cuda.Event) -> Batch:
    current = torch.cuda.current_stream()
    current.wait_event(arrival)
    for tensor in (batch.images, batch.labels, batch.mix):
        tensor.record_stream(current)  # its memory is the copying stream's, which must not reuse it too early
    return batch
