"""Conversion of pixels to the model's input."""

import torch
from torch import Tensor

# ImageNet's channel means and standard deviations, as in torchvision's recipes, for 0..255
MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)


class Normalise:
    """Runs on the device, so that images are transferred as bytes and not as floats."""

    def __init__(self, device: torch.device, *, channels_last: bool) -> None:
        self._device = device
        self._mean = torch.tensor(MEAN, device=device).view(1, 3, 1, 1)
        self._scale = 1 / torch.tensor(STD, device=device).view(1, 3, 1, 1)
        self._format = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, images: Tensor) -> Tensor:
        """Return float32 images on the device. images: [B, 3, H, W] uint8, on any device."""
        images = images.to(self._device, non_blocking=True)
        return images.to(torch.float32, memory_format=self._format).sub_(self._mean).mul_(self._scale)
