"""Mixup and cutmix: each pair of images of a global batch, and their labels, becomes two mixes.

Promise: which images are mixed, and how, is a function of (seed, step) at any number of processes.
Partners are neighbours, positions 2k and 2k + 1 of the global batch. Both are in the same
micro-batch, because the plan requires an even size. The draws of pair k are seeded by (seed, step,
k). torchvision's MixUp and CutMix roll a batch by one and draw from the default generator, so their
partners would depend on the number of processes.

mixup: Zhang et al., "mixup: Beyond Empirical Risk Minimization", 2018. cutmix: Yun et al.,
"CutMix", 2019. As in timm's pair mode, both images of a pair share the draw; with both methods on,
one of them is drawn for each pair. Both blend the partner into a box of the image with a weight:
the box of mixup is the whole image, the weight of cutmix is 1.
"""

import numpy as np
import torch
from torch import Tensor

from pipeline.data.interface import Options
from pipeline.randomness import derive

MIX_COLUMNS = 5
"""Columns of a row: the partner's weight, and its box (top, left, bottom, right), each in 0..1."""


def draw_mix(options: Options, seed: int, step: int, first: int, count: int) -> Tensor:
    """Draw the mix of `count` images from position `first` on of the global batch of `step`.

    Returns [count, 5] float32, the partner's weight and its box, or [0, 5] if nothing is mixed.
    """
    kinds = [kind for kind, alpha in (("mixup", options.mixup), ("cutmix", options.cutmix)) if alpha]
    if not kinds:
        return torch.empty((0, MIX_COLUMNS))
    rows = np.empty((count, MIX_COLUMNS), np.float32)
    for row in range(0, count, 2):
        draw = np.random.Generator(np.random.PCG64(derive(seed, "mix", step, (first + row) // 2)))
        if kinds[int(draw.integers(len(kinds)))] == "mixup":
            rows[row : row + 2] = draw.beta(options.mixup, options.mixup), 0, 0, 1, 1
        else:
            side = np.sqrt(draw.beta(options.cutmix, options.cutmix)) / 2
            down, across = draw.random(2)
            rows[row : row + 2] = 1, *np.clip([down - side, across - side, down + side, across + side], 0, 1)
    return torch.from_numpy(rows)


def swap_partners(tensor: Tensor) -> Tensor:
    """Return `tensor` with the rows of each pair swapped: row i is that of i's partner."""
    return tensor.view(-1, 2, *tensor.shape[1:]).flip(1).flatten(0, 1)


def mix_images(images: Tensor, mix: Tensor) -> Tensor:
    """Return the mixed images, [B, 3, H, W] float. mix: [B, 5] on the same device."""
    rows, columns = _box_masks(mix, *images.shape[2:])
    weight = mix[:, 0, None, None, None] * rows[:, None, :, None] * columns[:, None, None, :]
    return images.lerp(swap_partners(images), weight.to(images.dtype))


def own_label_weights(mix: Tensor, height: int, width: int) -> Tensor:
    """Return the weight of each image's own label, [B], by the pixels that its partner covers."""
    rows, columns = _box_masks(mix, height, width)
    return 1 - mix[:, 0] * rows.float().mean(1) * columns.float().mean(1)


def _box_masks(mix: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the rows [B, H] and columns [B, W] of each box: those whose centre is inside."""

    def within(low: Tensor, high: Tensor, size: int) -> Tensor:
        centres = (torch.arange(size, device=mix.device) + 0.5) / size
        return (centres >= low[:, None]) & (centres < high[:, None])

    top, left, bottom, right = mix[:, 1:].unbind(1)
    return within(top, bottom, height), within(left, right, width)
