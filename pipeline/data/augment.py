"""What a sample looks like in training and in validation: geometry on uint8, the same on any machine.

Promise: the augmentation of a sample is a function of (seed, epoch, sample id, view), so it does not matter which process
or worker makes it, or in which order. Pixels stay uint8; normalisation is the device's work.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional
from torchvision.transforms import v2 as transforms

from pipeline.config.schema import Augment, Evaluate
from pipeline.data.images import Picture
from pipeline.randomness import derive, generator

_ATTEMPTS = 10
_MEAN_COLOUR = (124, 116, 104)  # what normalisation makes 0 of
_STRIP = 16  # of a longer picture the middle is taken first: 1 × 10,000 pixels would be resized to 256 × 2,560,000


Draw = tuple[int, int, int]
"""What one row of a batch is: (epoch, sample id, which view of it in that epoch)."""


def augment(picture: Picture, options: Augment, size: int, seed: int, what: Draw) -> Tensor:
    """Random resized crop and flip -> [3, size, size] uint8. BadImageError if the picture cannot be decoded there."""
    box, is_flipped = draw(picture.height, picture.width, options, seed, what)
    crop = resized(picture.region(*box), size, size)
    crop = crop.flip(-1) if is_flipped else crop
    further = _transforms(options)
    if not further:
        return crop
    with torch.random.fork_rng(devices=[]):  # torchvision draws from the default generator
        torch.manual_seed(derive(seed, "policy", *_address(what)))
        for transform in further:
            crop = transform(crop)
    return crop


@lru_cache
def _transforms(options: Augment) -> tuple[Callable[[Tensor], Tensor], ...]:
    """torchvision's own, in the order of its references: a policy, then random erasing."""
    policies: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
        "randaugment": lambda: transforms.RandAugment(magnitude=options.magnitude),
        "autoaugment": transforms.AutoAugment,
        "trivialaugment": transforms.TrivialAugmentWide,
        "augmix": transforms.AugMix,
    }
    chosen = [policies[options.policy]()] if options.policy != "none" else []
    if options.erase:
        chosen.append(transforms.RandomErasing(options.erase, value=_MEAN_COLOUR))
    return tuple(chosen)


def draw(height: int, width: int, options: Augment, seed: int, what: Draw) -> tuple[tuple[int, int, int, int], bool]:
    """What is drawn for a sample: the crop's (top, left, height, width), and whether it is flipped."""
    draws = torch.rand(
        4 * _ATTEMPTS + 1, generator=generator(seed, "augment", *_address(what)), dtype=torch.float64
    ).tolist()
    return _crop_box(height, width, options, draws), draws[-1] < options.flip


def _address(what: Draw) -> tuple[int, ...]:
    epoch, sample, view = what
    return (epoch, sample, view) if view else (epoch, sample)


def centre(pixels: Tensor, size: int, resize: int) -> Tensor:
    """Shorter side to `resize`, then the central square. pixels: [3, H, W] uint8 -> [3, size, size] uint8."""
    longest = _STRIP * min(pixels.shape[1:])
    pixels = _central(pixels, min(pixels.shape[1], longest), min(pixels.shape[2], longest))
    height, width = pixels.shape[1:]
    scale = max(resize, size) / min(height, width)
    pixels = resized(pixels, max(size, round(height * scale)), max(size, round(width * scale)))
    return _central(pixels, size, size)


def _central(pixels: Tensor, height: int, width: int) -> Tensor:
    top, left = (pixels.shape[1] - height) // 2, (pixels.shape[2] - width) // 2
    return pixels[:, top : top + height, left : left + width]


def evaluation_geometry(evaluate: Evaluate, options: Augment) -> tuple[int, int]:
    """(size, resize) of `centre`, with what the configuration leaves open filled in."""
    size = evaluate.size or options.size
    return size, evaluate.resize or round(size * 8 / 7)


def _crop_box(height: int, width: int, options: Augment, draws: list[float]) -> tuple[int, int, int, int]:
    """torchvision's RandomResizedCrop.get_params, from given draws: (top, left, height, width)."""
    area = height * width
    low, high = (math.log(bound) for bound in options.ratio)
    for attempt in range(_ATTEMPTS):
        share, shape, down, right = draws[4 * attempt : 4 * attempt + 4]
        target = area * (options.scale[0] + share * (options.scale[1] - options.scale[0]))
        aspect = math.exp(low + shape * (high - low))
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(down * (height - h + 1)), int(right * (width - w + 1)), h, w
    ratio = width / height
    if ratio < options.ratio[0]:
        w, h = width, round(width / options.ratio[0])
    elif ratio > options.ratio[1]:
        h, w = height, round(height * options.ratio[1])
    else:
        h, w = height, width
    h, w = max(1, min(h, height)), max(1, min(w, width))
    return (height - h) // 2, (width - w) // 2, h, w


def resized(pixels: Tensor, height: int, width: int) -> Tensor:
    if pixels.shape[1:] == (height, width):
        return pixels
    # in memory the three colours of a pixel lie together: told so, torch takes two thirds of the time
    batch = pixels.permute(1, 2, 0)[None].permute(0, 3, 1, 2)
    return functional.interpolate(batch, (height, width), mode="bilinear", antialias=True, align_corners=False)[0]
