"""The time that each stage of a loader worker takes, by Python's profiler on the workers' code."""

import time
from collections.abc import Callable, Iterator
from cProfile import Profile
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Any

import torch

from pipeline.data.augment import augment, draw_crop, resize_image
from pipeline.data.batch import Batch
from pipeline.data.images import Picture, decode_jpeg
from pipeline.data.loader import RetryingReader, TrainBatches
from pipeline.data.shared_memory import Allocate, SlotDataset

_STAGES: dict[str, tuple[Callable[..., Any], tuple[Callable[..., Any], ...]]] = {
    "read": (RetryingReader.read, ()),
    "open": (Picture.open, ()),
    "cut": (Picture.region, (decode_jpeg,)),
    "decode": (decode_jpeg, ()),
    "resize": (resize_image, ()),
    "draw": (draw_crop, ()),
    "augment": (augment, (Picture.region, resize_image, draw_crop)),
    "collate": (TrainBatches.make_batch, (RetryingReader.read, Picture.open, augment)),
}
"""Stage -> the function that it is, and the functions in it that are stages of their own."""
HAND_OVER = "hand over"


@dataclass
class StageTurn:
    """A benchmark turn that makes batches in this process, on one thread, and profiles that."""

    dataset: TrainBatches
    steps: int
    ms: dict[str, list[float]] = field(default_factory=lambda: {stage: [] for stage in _STAGES})
    """Stage -> milliseconds of an image in each round, the warm-up included."""
    _positions: Iterator[int] = field(default_factory=count)

    def __call__(self) -> float:
        """Make `steps` batches; return images/s."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in a loader worker
        profile, start, num_images = Profile(builtins=False), time.perf_counter(), 0
        with profile:
            for _ in range(self.steps):
                num_images += len(self.dataset[next(self._positions)].labels)
        speed = num_images / (time.perf_counter() - start)
        torch.set_num_threads(threads)
        seconds = {entry.code: entry.totaltime for entry in profile.getstats()}
        for stage, (function, inner) in _STAGES.items():
            own, *others = (seconds.get(part.__code__, 0.0) for part in (function, *inner))
            self.ms[stage].append(1e3 * (own - sum(others)) / num_images)
        return speed


class EmptyBatches(SlotDataset):
    """Batches of the size of another dataset's that take no time to make, only to hand over."""

    def __init__(self, dataset: TrainBatches) -> None:
        self._batch, self._bytes = dataset[0], dataset.max_image_bytes

    @property
    def max_image_bytes(self) -> int:
        return self._bytes

    def make_batch(self, position: int, allocate: Allocate) -> Batch:
        count, _, size, _ = self._batch.images.shape
        return self._batch._replace(images=allocate(count, size))


def stage_table(turns: dict[str, StageTurn], hand_over_ms: float) -> str:
    """Return the medians of the rounds, in milliseconds of an image, a line for each loader."""
    lines = [f"  {'one worker, ms an image':<24}" + "".join(f"{stage:>10}" for stage in (*_STAGES, HAND_OVER, "sum"))]
    for name, turn in turns.items():
        figures = [*(median(rounds[1:]) for rounds in turn.ms.values()), hand_over_ms]
        lines.append(f"  {name:<24}" + "".join(f"{figure:>10.3f}" for figure in (*figures, sum(figures))))
    return "\n".join(lines)
