"""torchvision's augmentation policies, by the names of `augment.policy`.

Its sharpening and its translation would take half of a policy's time. Others, with the same result,
are registered for `_Crop`, by torchvision's interface for such classes.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2 as transforms
from torchvision.transforms.v2 import functional

from pipeline.data.augment import MEAN_COLOUR


class _Crop(tv_tensors.Image):  # type: ignore[misc]
    """A crop, [3, H, W] uint8."""


def transform(crop: Tensor, policy: str, magnitude: int, erase: float) -> Tensor:
    """Return a crop after a policy and random erasing. Draws from torch's default generator."""
    image: Any = crop.as_subclass(_Crop)
    for each in _transforms(policy, magnitude, erase):
        image = each(image)
    return image.as_subclass(Tensor)  # type: ignore[no-any-return]


@lru_cache
def _transforms(policy: str, magnitude: int, erase: float) -> list[Any]:
    """Return torchvision's policy and random erasing, in the order of its reference training."""
    policies: dict[str, Any] = {
        "randaugment": lambda: transforms.RandAugment(magnitude=magnitude),
        "autoaugment": transforms.AutoAugment,
        "trivialaugment": transforms.TrivialAugmentWide,
        "augmix": transforms.AugMix,
    }
    erasing = [transforms.RandomErasing(erase, value=MEAN_COLOUR)] if erase else []
    return [policies[policy](), *erasing]


@functional.register_kernel(functional.affine, _Crop)  # type: ignore[untyped-decorator]
def _affine(image: Any, angle: float, translate: list[int], *others: Any, **named: Any) -> Any:
    if not any(translate):  # a shear
        plain = image.as_subclass(Tensor)
        return functional.affine_image(plain, angle, translate, *others, **named).as_subclass(_Crop)
    moved, (right, down), (height, width) = torch.zeros_like(image), translate, image.shape[1:]
    seen = image[:, max(0, -down) : max(0, height - down), max(0, -right) : max(0, width - right)]
    moved[:, max(0, down) : max(0, height + down), max(0, right) : max(0, width + right)] = seen
    return moved.as_subclass(_Crop)


@functional.register_kernel(functional.adjust_sharpness, _Crop)  # type: ignore[untyped-decorator]
def _adjust_sharpness(image: Any, sharpness_factor: float) -> Any:
    pixels = image.as_subclass(Tensor).to(torch.float32)
    inner = pixels[:, 1:-1, 1:-1]
    rows = pixels[:, :-2] + pixels[:, 1:-1] + pixels[:, 2:]
    blurred = (rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * inner).div_(13).round_()
    inner.add_(blurred.sub_(inner), alpha=1 - sharpness_factor)
    return pixels.clamp_(0, 255).to(torch.uint8).as_subclass(_Crop)
