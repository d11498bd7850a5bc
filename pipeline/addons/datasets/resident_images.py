"""Training images that live on the training device: nothing is read, decoded or copied again.

Promise: each batch is the loader's, byte for byte. Why this holds: both draw with the functions of
`data.augment`, from generators with the same addresses. Here the workers send only what they drew,
a few integers an image; shift, flip and erasing are then one lookup on the device.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.addons.datasets.resident_limits import mib
from pipeline.addons.models.eval_batches import EvalBatches
from pipeline.config.schema import Config
from pipeline.data.augment import MEAN_COLOUR, draw_erasing, draw_shift, shifted_places
from pipeline.data.batch import Batch
from pipeline.data.loader import TrainBatches, batches, sample_digests
from pipeline.data.workers import Allocate

_CHUNK = 500
_PATIENCE = 1 / 8  # of run.timeout: the other ranks wait meanwhile, and the loader needs its half


@dataclass
class Draws(TrainBatches):
    """Batches without pixels. Their `images` are rows of integers, one for each image.

    They are: the sample's first pixel, its shift down and to the right from 0 on, with a flip above
    those without, and with augment.erase the box that is erased (top, left, bottom, right).
    """

    def make_batch(self, position: int, following: Sequence[int], allocate: Allocate) -> Batch:
        options, seed = self.config.augment, self.config.run.seed
        keys, drawn = self._keys(position), []
        for key in keys:
            down, right, is_flipped = draw_shift(options, seed, key)
            right += 2 * options.pad + 1 if is_flipped else 0
            row = [key.sample * options.size**2, down + options.pad, right + options.pad]
            if options.erase:
                top, left, height, width = draw_erasing(options.size, options, seed, key)
                row += [top, left, top + height, left + width]
            drawn.append(row)
        ids = torch.tensor([key.sample for key in keys])
        labels = torch.from_numpy(self.images.labels[ids.numpy()]).long()
        digests = torch.empty((0, 32), dtype=torch.uint8)
        return Batch(torch.tensor(drawn), labels, ids, digests, self.mix(position), [])


class ResidentImages:
    """All training images on the device, [N, size, size, 3] uint8, and how they are augmented."""

    def __init__(self, pixels: Tensor, data: TrainBatches) -> None:
        self._pixels, self._config = pixels, data.config
        self.draws = Draws(data.images, data.config, data.plan, data.rank)
        size, pad = pixels.shape[1], data.config.augment.pad
        places = torch.stack([shifted_places(size, shift) for shift in range(-pad, pad + 1)])
        self._rows = (places * size).to(pixels.device)
        self._columns = torch.cat([places, places.flip(1)]).to(pixels.device)
        self._colour = torch.tensor(MEAN_COLOUR, dtype=torch.uint8, device=pixels.device)

    def augment(self, drawn: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the loader's batches, on the device. drawn: those of `draws`, on the device."""
        for batch in drawn:
            images = self._lookup(*batch.images.unbind(1))
            digests = batch.digests
            if self._config.run.trace:
                digests = sample_digests(images.cpu(), batch.labels.cpu())
            yield batch._replace(images=images, digests=digests)

    def _lookup(self, first: Tensor, down: Tensor, right: Tensor, *box: Tensor) -> Tensor:
        """Return the augmented images, [B, 3, size, size] uint8 in the loader's memory format."""
        rows, columns = first[:, None] + self._rows[down], self._columns[right]
        places = rows[:, :, None] + columns[:, None, :]
        # a fifth of the time on a CPU of indexing by sample, row and column
        images = self._pixels.view(-1, 3).index_select(0, places.view(-1)).view(*places.shape, 3)
        if box:
            top, left, bottom, right = (edge[:, None] for edge in box)
            line = torch.arange(images.shape[1], device=images.device)
            is_row = (line >= top) & (line < bottom)
            is_column = (line >= left) & (line < right)
            is_erased = is_row[:, :, None] & is_column[:, None, :]
            images = torch.where(is_erased[..., None], self._colour, images)
        return images.permute(0, 3, 1, 2)


def load_images(
    data: TrainBatches,
    config: Config,
    device: torch.device,
    log: Callable[[str], None],
    asked_to_stop: Callable[[], bool],
) -> ResidentImages | None:
    """Decode all training images to the device. Return None, and log why, if the loader is needed.

    It is if one cannot be decoded, since another one replaces it in each epoch, or if the storage
    is slow. Processes may differ in this: their batches are the same.
    """
    start, size = time.monotonic(), config.augment.size
    patience_s = _PATIENCE * config.run.timeout
    config = config.replacing("run", timeout=patience_s)
    images = EvalBatches(data.images, config.replacing("evaluate", size=size, resize=size, batch=_CHUNK))
    pixels = torch.empty((len(data.images), size, size, 3), dtype=torch.uint8, device=device)
    with closing(batches(images, range(len(images)), data.plan, pin=False)) as decoded:
        for batch in decoded:
            is_slow = batch.outage or time.monotonic() - start > patience_s
            if batch.defects or is_slow:
                reason = "the storage is slow" if is_slow else "one of them cannot be decoded"
                log(f"the loader reads the training images: {reason}")
                return None
            if asked_to_stop():
                return None
            first = int(batch.ids[0])
            pixels[first : first + len(batch.ids)] = batch.images.permute(0, 2, 3, 1)
    log(f"decoded the training images: {mib(pixels.nbytes)} on {device}")
    return ResidentImages(pixels, data)
