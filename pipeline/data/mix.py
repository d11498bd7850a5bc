"""Mixup and cutmix: two images of a global batch, and their labels, become two mixes of both.

Promise: what is mixed with what, and how, is a function of (seed, step), whatever the number of processes. Why that holds:
partners are neighbours, positions 2k and 2k + 1 of the global batch, which every pass holds together (its size is even, or
the plan refuses it), and what is drawn for pair k is addressed by (seed, step, k).

mixup: Zhang et al., "mixup: Beyond Empirical Risk Minimization", 2018. cutmix: Yun et al., "CutMix", 2019. As in timm's
pair mode both images of a pair share the draw; with both on, a coin chooses for each pair.
"""

import numpy as np
import torch
from torch import Tensor

from pipeline.config import Augment
from pipeline.randomness import derive

WIDTH = 5
"""Of a row: the own image's share of the label, and the part that is the partner's (top, left, bottom, right) in 0..1;
of mixup all of it, in which the partner shows through."""


def draw_mix(options: Augment, seed: int, step: int, first: int, count: int) -> Tensor:
    """[count, 5] float32 for the positions `first`, … of the global batch of `step`; [0, 5] where nothing is mixed."""
    kinds = [kind for kind, alpha in (("mixup", options.mixup), ("cutmix", options.cutmix)) if alpha]
    if not kinds:
        return torch.empty((0, WIDTH))
    rows = np.empty((count, WIDTH), np.float32)
    for row in range(0, count, 2):
        draw = np.random.Generator(np.random.PCG64(derive(seed, "mix", step, (first + row) // 2)))
        kind = kinds[int(draw.integers(len(kinds)))]
        alpha = options.mixup if kind == "mixup" else options.cutmix
        share = draw.beta(alpha, alpha)
        if kind == "mixup":
            rows[row : row + 2] = share, 0, 0, 1, 1
        else:
            side = np.sqrt(1 - share) / 2
            down, across = draw.random(2)
            top, left, bottom, right = np.clip([down - side, across - side, down + side, across + side], 0, 1)
            rows[row : row + 2] = 1 - (bottom - top) * (right - left), top, left, bottom, right
    return torch.from_numpy(rows)


def partners(tensor: Tensor) -> Tensor:
    """The rows of each row's partner."""
    return tensor.view(-1, 2, *tensor.shape[1:]).flip(1).flatten(0, 1)


def mixed(images: Tensor, mix: Tensor) -> Tensor:
    """images: [B, 3, H, W] float, mix: [B, 5] on the same device -> the mixes, [B, 3, H, W]."""
    height, width = images.shape[2:]
    top, left, bottom, right = (edge[:, None, None, None] for edge in mix[:, 1:].unbind(1))
    rows = (torch.arange(height, device=images.device) + 0.5).view(1, 1, -1, 1) / height
    columns = (torch.arange(width, device=images.device) + 0.5).view(1, 1, 1, -1) / width
    inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
    is_mixup = (top <= 0) & (left <= 0) & (bottom >= 1) & (right >= 1)
    theirs = inside * torch.where(is_mixup, 1 - mix[:, 0, None, None, None], 1)
    return images.lerp(partners(images), theirs.to(images.dtype))


def label_shares(mix: Tensor, height: int, width: int) -> Tensor:
    """[B]: how much of each image's label is its own; of cutmix by the pixels that are really covered."""
    top, left, bottom, right = mix[:, 1:].unbind(1)

    def covered(low: Tensor, high: Tensor, size: int) -> Tensor:
        places = (torch.arange(size, device=mix.device) + 0.5) / size
        return ((places >= low[:, None]) & (places < high[:, None])).sum(1) / size

    own = 1 - covered(top, bottom, height) * covered(left, right, width)
    is_mixup = (top <= 0) & (left <= 0) & (bottom >= 1) & (right >= 1)
    return torch.where(is_mixup, mix[:, 0], own)
