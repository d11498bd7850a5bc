"""Mixup and cutmix: two images of a global batch, and their labels, become two mixes of both.

Promise: what is mixed with what, and how, is a function of (seed, step), whatever the number of processes. Why that holds:
partners are neighbours, positions 2k and 2k + 1 of the global batch, which every pass holds together (its size is even, or
the plan refuses it), and what is drawn for pair k is addressed by (seed, step, k). torchvision's own two roll a pass by one
with the default generator's draws, so partners would follow the number of processes.

mixup: Zhang et al., "mixup: Beyond Empirical Risk Minimization", 2018. cutmix: Yun et al., "CutMix", 2019. As in timm's
pair mode both images of a pair share the draw; with both on, a coin chooses for each pair. One rule serves both: in a part
of the picture the partner is laid over with a weight; mixup's part is all of it, cutmix's weight is 1.
"""

import numpy as np
import torch
from torch import Tensor

from pipeline.config.schema import Augment
from pipeline.randomness import derive

WIDTH = 5
"""Of a row: the partner's weight, and the part where it has that: (top, left, bottom, right) in 0..1."""


def draw_mix(options: Augment, seed: int, step: int, first: int, count: int) -> Tensor:
    """[count, 5] float32 for the positions `first`, … of the global batch of `step`; [0, 5] where nothing is mixed."""
    kinds = [kind for kind, alpha in (("mixup", options.mixup), ("cutmix", options.cutmix)) if alpha]
    if not kinds:
        return torch.empty((0, WIDTH))
    rows = np.empty((count, WIDTH), np.float32)
    for row in range(0, count, 2):
        draw = np.random.Generator(np.random.PCG64(derive(seed, "mix", step, (first + row) // 2)))
        if kinds[int(draw.integers(len(kinds)))] == "mixup":
            rows[row : row + 2] = draw.beta(options.mixup, options.mixup), 0, 0, 1, 1
        else:
            side = np.sqrt(draw.beta(options.cutmix, options.cutmix)) / 2
            down, across = draw.random(2)
            rows[row : row + 2] = 1, *np.clip([down - side, across - side, down + side, across + side], 0, 1)
    return torch.from_numpy(rows)


def partners(tensor: Tensor) -> Tensor:
    """The rows of each row's partner."""
    return tensor.view(-1, 2, *tensor.shape[1:]).flip(1).flatten(0, 1)


def mixed(images: Tensor, mix: Tensor) -> Tensor:
    """images: [B, 3, H, W] float, mix: [B, 5] on the same device -> the mixes, [B, 3, H, W]."""
    rows, columns = _covered(mix, *images.shape[2:])
    weight = mix[:, 0, None, None, None] * rows[:, None, :, None] * columns[:, None, None, :]
    return images.lerp(partners(images), weight.to(images.dtype))


def own_shares(mix: Tensor, height: int, width: int) -> Tensor:
    """[B]: how much of each image's label is its own, by the pixels that are really covered."""
    rows, columns = _covered(mix, height, width)
    return 1 - mix[:, 0] * rows.float().mean(1) * columns.float().mean(1)


def _covered(mix: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Which rows, [B, H], and columns, [B, W], the part has: those whose middle is in it."""

    def within(low: Tensor, high: Tensor, size: int) -> Tensor:
        middles = (torch.arange(size, device=mix.device) + 0.5) / size
        return (middles >= low[:, None]) & (middles < high[:, None])

    top, left, bottom, right = mix[:, 1:].unbind(1)
    return within(top, bottom, height), within(left, right, width)
