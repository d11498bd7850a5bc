"""Copies of batches to the GPU, one ahead: while one is trained on, the next is copied.

Promise: the same batches in the same order. A copy starts when the host asks for the batch, which
is when it has queued the step before it: the device works on that step meanwhile. Copies run on
their own stream, from pinned memory, so that neither the CPU nor that step's kernels wait for them.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

from pipeline.data.batch import Batch

_MOVED = ("images", "labels", "mix")


def pin(batch: Batch) -> Batch:
    """Return the batch in pinned memory, from which a GPU reads by itself."""
    return batch._replace(**{name: getattr(batch, name).pin_memory() for name in _MOVED})


def pinned(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the batches of workers in pinned memory. A thread copies them, one ahead.

    What `batches` raises there is raised here.
    """
    device, source = torch.cuda.current_device(), iter(batches)

    def copy_next() -> Batch | None:
        torch.cuda.set_device(device)  # else the thread makes a context on the first GPU
        batch = next(source, None)
        return batch and pin(batch)

    thread = ThreadPoolExecutor(1, "pinned")
    try:
        ahead = thread.submit(copy_next)
        while batch := ahead.result():
            ahead = thread.submit(copy_next)
            yield batch
    finally:
        thread.shutdown(wait=False)  # it may be waiting for a worker, which is killed after this


def to_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Return the batches with images, labels and mix on the device, ready for its current stream.

    No-op on CPU.
    """
    return _to_gpu(batches, device) if device.type == "cuda" else batches


def _to_gpu(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    stream = _copy_stream(device)
    for batch in batches:
        with torch.cuda.stream(stream):
            moved = batch._replace(
                **{name: getattr(batch, name).to(device, non_blocking=True) for name in _MOVED}
            )
            copied = stream.record_event()
        current = torch.cuda.current_stream()
        current.wait_event(copied)
        for name in _MOVED:
            # else the copying stream, which owns the memory, could reuse it too early
            getattr(moved, name).record_stream(current)
        yield moved


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the device's stream for copies: torch reuses freed memory only on the same stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
