"""Conversion of pixels to the model's input."""

import torch
from torch import Tensor

from pipeline.config.sections import Model

# ImageNet's channel means and standard deviations, as in torchvision's recipes, for 0..255
MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)


def mean_and_std(options: Model) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of each colour, [1, 3, 1, 1] for 0..255."""
    mean = MEAN if options.mean is None else tuple(255 * value for value in options.mean)
    std = STD if options.std is None else tuple(255 * value for value in options.std)
    return torch.tensor(mean).view(1, 3, 1, 1), torch.tensor(std).view(1, 3, 1, 1)


class Normalise:
    """Runs on the device, so that images are transferred as bytes and not as floats."""

    def __init__(self, device: torch.device, options: Model, *, compiles: bool = False) -> None:
        """compiles: with one kernel in place of three, at the first call with each image size."""
        mean, std = mean_and_std(options)
        self._device = device
        self._mean = mean.to(device)
        self._scale = 1 / std.to(device)
        self._format = torch.channels_last if options.channels_last else torch.contiguous_format
        self._convert = torch.compile(self._to_floats, dynamic=False) if compiles else self._to_floats

    def __call__(self, images: Tensor) -> Tensor:
        """Return float32 images on the device. images: [B, 3, H, W] uint8, on any device."""
        return self._convert(images.to(self._device, non_blocking=True))

    def _to_floats(self, images: Tensor) -> Tensor:
        return images.to(torch.float32, memory_format=self._format).sub_(self._mean).mul_(self._scale)
