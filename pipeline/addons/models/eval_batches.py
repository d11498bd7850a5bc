"""The batches of an evaluation."""

import math
from typing import Any

from torch import Tensor

from pipeline.data.augment import SampleKey, center_crop
from pipeline.data.batch import NO_LABEL, Defect
from pipeline.data.interface import Options, UnreadableError
from pipeline.data.loader import Batches, Patience


class EvalBatches(Batches):
    """Batches of the validation images in index order, the same at any world size."""

    def __len__(self) -> int:
        batch: int = self.config.evaluate.batch
        return math.ceil(len(self.images) / batch)

    def _keys(self, position: int) -> list[SampleKey]:
        start, count = position * self.config.evaluate.batch, self.config.evaluate.batch
        return [SampleKey(0, sample, 0) for sample in range(start, min(start + count, len(self.images)))]

    def _size_at(self, position: int) -> int:
        return evaluation_geometry(self.config.evaluate, self.config.augment)[0]

    def _load(self, key: SampleKey, out: Tensor, defects: list[Defect], patience: Patience) -> int:
        try:
            picture = patience.open(key.sample)
            pixels = picture.region(0, 0, picture.height, picture.width)
            out.copy_(center_crop(pixels, *evaluation_geometry(self.config.evaluate, self.config.augment)))
            return int(self.images.labels[key.sample])
        except UnreadableError as error:
            out.zero_()
            defects.append(Defect(key.sample, str(error)))
            return NO_LABEL  # it is not replaced, and so counts as wrong


def evaluation_geometry(evaluate: Any, options: Options) -> tuple[int, int]:
    """Return (size, resize) of validation images, with the defaults of what is not configured."""
    size = evaluate.size or options.size
    return size, evaluate.resize or round(size * 8 / 7)
