"""Augmentation for training and preprocessing for validation, the same on any machine.

Promise: the augmentation of a sample is a function of (seed, epoch, sample id, view), whichever
process or worker makes it, and in any order. Pixels stay uint8; they are normalised on the device.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.data.interface import Options, Picture
from pipeline.lazy import addon
from pipeline.randomness import derive, generator

_ATTEMPTS = 10
MEAN_COLOUR = (124, 116, 104)  # ImageNet's mean, which normalisation maps to 0
_ERASING_ASPECTS = torch.tensor((0.3, 3.3)).log().tolist()
MAX_ASPECT = 16
"""A longer image is cropped first: 1 × 10,000 pixels would be resized to 256 × 2,560,000."""


class SampleKey(NamedTuple):
    """The identity of one row of a batch, which seeds its augmentation."""

    epoch: int
    sample: int
    view: int
    """Which of its repetitions in the epoch this is; 0 without repeated augmentation."""


def augment(picture: Picture, options: Options, size: int, seed: int, key: SampleKey) -> Tensor:
    """Return a random crop, [3, size, size] uint8, after flip, policy and erasing.

    Raises UnreadableError if the crop cannot be decoded.
    """
    if options.pad:
        *shifts, is_flipped = draw_shift(options, seed, key)
        crop = center_crop(picture.region(0, 0, picture.height, picture.width), size, size)
        for dimension, shift in zip((1, 2), shifts, strict=True):
            crop = crop.index_select(dimension, shifted_places(size, shift))
    else:
        box, is_flipped = draw_crop(picture.height, picture.width, options, seed, key)
        crop = resize_image(picture.region(*box), size, size)
    crop = crop.flip(-1) if is_flipped else crop
    if options.policy != "none":
        transform = addon("datasets.policies").transform
        with torch.random.fork_rng(devices=[]):  # torchvision draws from the default generator
            torch.default_generator.manual_seed(derive(seed, "policy", *_address(key)))
            crop = transform(crop, options.policy, options.magnitude, options.erase)
    elif options.erase:
        top, left, height, width = draw_erasing(size, options, seed, key)
        crop = crop.clone()
        crop[:, top : top + height, left : left + width] = torch.tensor(MEAN_COLOUR)[:, None, None]
    return crop


def draw_crop(
    height: int, width: int, options: Options, seed: int, key: tuple[int, int, int]
) -> tuple[tuple[int, int, int, int], bool]:
    """Draw the crop of a sample: return (top, left, height, width), and whether it is flipped.

    key: a SampleKey, or a plain tuple like it.
    """
    source = generator(seed, "augment", *_address(key))
    draws = torch.rand(4 * _ATTEMPTS + 1, generator=source, dtype=torch.float64).tolist()
    return _crop_box(height, width, options, draws), _is_flipped(draws[-1], options, seed, key)


def _crop_box(height: int, width: int, options: Options, draws: list[float]) -> tuple[int, int, int, int]:
    """Return (top, left, height, width), as torchvision's RandomResizedCrop.get_params."""
    low, high = (math.log(bound) for bound in options.ratio)
    for attempt in range(_ATTEMPTS):
        area_draw, aspect_draw, down, right = draws[4 * attempt : 4 * attempt + 4]
        target = height * width * (options.scale[0] + area_draw * (options.scale[1] - options.scale[0]))
        aspect = math.exp(low + aspect_draw * (high - low))
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(down * (height - h + 1)), int(right * (width - w + 1)), h, w
    # the largest box in the middle whose aspect ratio is allowed
    h = max(1, min(height, round(width / options.ratio[0])))
    w = max(1, min(width, round(height * options.ratio[1])))
    return (height - h) // 2, (width - w) // 2, h, w


def draw_shift(options: Options, seed: int, key: SampleKey) -> tuple[int, int, bool]:
    """Draw the shift of a sample, down and right, of up to `options.pad`, and if it is flipped."""
    source = generator(seed, "shift", *_address(key))
    *shifts, draw = torch.rand(3, generator=source, dtype=torch.float64).tolist()
    down, right = (int(shift * (2 * options.pad + 1)) - options.pad for shift in shifts)
    return down, right, _is_flipped(draw, options, seed, key)


def shifted_places(size: int, shift: int) -> Tensor:
    """Return the row (or column) of an image that each row of the shifted one shows, [size].

    The rest is filled by reflection, as by `functional.pad(mode="reflect")`, which takes no uint8.
    """
    places = (torch.arange(size) + shift).abs()
    return torch.minimum(places, 2 * (size - 1) - places)


def draw_erasing(size: int, options: Options, seed: int, key: SampleKey) -> tuple[int, int, int, int]:
    """Draw the box (top, left, height, width) that is erased; height 0: none.

    These are the draws of torchvision's RandomErasing, which takes 20 times as long.
    """
    source = generator(seed, "policy", *_address(key))
    if torch.rand(1, generator=source) >= options.erase:
        return 0, 0, 0, 0
    for _ in range(_ATTEMPTS):
        area = size * size * torch.empty(1).uniform_(0.02, 0.33, generator=source).item()
        aspect = torch.empty(1).uniform_(*_ERASING_ASPECTS, generator=source).exp().item()
        height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if height < size and width < size:
            top = torch.randint(size - height + 1, (1,), generator=source)
            left = torch.randint(size - width + 1, (1,), generator=source)
            return int(top), int(left), height, width
    return 0, 0, 0, 0


def _is_flipped(draw: float, options: Options, seed: int, key: tuple[int, int, int]) -> bool:
    # alternating flips: Jordan, "94% on CIFAR-10 in 3.29 seconds", 2024
    if options.alternate_flips:
        epoch, sample, view = key
        return (derive(seed, "flip", sample) + epoch + view) % 2 == 1
    return bool(draw < options.flip)


def _address(key: tuple[int, int, int]) -> tuple[int, ...]:
    """Return the key without a view of 0, so that the first view is the one without repetition."""
    epoch, sample, view = key
    return (epoch, sample, view) if view else (epoch, sample)


def center_crop(pixels: Tensor, size: int, resize: int) -> Tensor:
    """Resize the shorter side to `resize` and return the central square, [3, size, size] uint8.

    pixels: [3, H, W] uint8. A `resize` below `size` counts as `size`.
    """
    longest = MAX_ASPECT * min(pixels.shape[1:])
    pixels = _central(pixels, min(pixels.shape[1], longest), min(pixels.shape[2], longest))
    height, width = pixels.shape[1:]
    scale = max(resize, size) / min(height, width)
    pixels = resize_image(pixels, max(size, round(height * scale)), max(size, round(width * scale)))
    return _central(pixels, size, size)


def _central(pixels: Tensor, height: int, width: int) -> Tensor:
    top, left = (pixels.shape[1] - height) // 2, (pixels.shape[2] - width) // 2
    return pixels[:, top : top + height, left : left + width]


def resize_image(pixels: Tensor, height: int, width: int) -> Tensor:
    """Return `pixels` [3, H, W] uint8 resized to [3, height, width], bilinear with antialiasing."""
    if pixels.shape[1:] == (height, width):
        return pixels
    # a channels-last batch: as the memory is laid out that way, torch takes a third less time
    batch = pixels.permute(1, 2, 0)[None].permute(0, 3, 1, 2)
    return functional.interpolate(
        batch, (height, width), mode="bilinear", antialias=True, align_corners=False
    )[0]
