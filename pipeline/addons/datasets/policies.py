"""torchvision's augmentation policies, by the names of `augment.policy`."""

from collections.abc import Callable
from functools import lru_cache

from torch import Tensor
from torchvision.transforms import v2 as transforms

from pipeline.data.augment import MEAN_COLOUR


@lru_cache
def transforms_of(policy: str, magnitude: int, erase: float) -> list[Callable[[Tensor], Tensor]]:
    """Return torchvision's policy and random erasing, in the order of its reference training."""
    policies: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
        "randaugment": lambda: transforms.RandAugment(magnitude=magnitude),
        "autoaugment": transforms.AutoAugment,
        "trivialaugment": transforms.TrivialAugmentWide,
        "augmix": transforms.AugMix,
    }
    erasing = [transforms.RandomErasing(erase, value=MEAN_COLOUR)] if erase else []
    return [policies[policy](), *erasing]
