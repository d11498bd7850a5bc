"""Networks that published recipes use and torchvision lacks.

Promise: each is a function of its arguments and of torch's default generator, like torchvision's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models.vision_transformer import VisionTransformer

_BIAS_SCALE = 8  # a bias that is multiplied by 8 learns 64 times as fast: airbench's bias_scaler
_LOGIT_SCALE = 1 / 9


def resnet18_cifar(num_classes: int = 10, **options: Any) -> nn.Module:
    """Return ResNet-18 for images of 32 px: its first layers do not shrink them.

    The variant of He et al.'s network in github.com/kuangliu/pytorch-cifar: a 3×3 convolution of
    stride 1 in place of the 7×7 of stride 2, and no max pooling.
    """
    model: nn.Module = torchvision.models.resnet18(num_classes=num_classes, **options)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model


class Airbench(nn.Module):
    """The convolutional networks of Jordan, "94% on CIFAR-10 in 3.29 seconds", 2024.

    Source: github.com/KellerJordan/cifar10-airbench. Differences, so that the model is a function
    of its arguments and any optimizer trains it: the whitening filters are fixed numbers and not
    fitted to the data at the start; the scale of the biases' learning rate is in the model; biases
    have no weight decay; the last pooling takes images of any size from 16 px on.

    widths: channels of the three groups. depth: convolutions in a group; with 3, the last two have
    a residual connection. momentum: of the running statistics, as in torch.
    """

    def __init__(
        self, num_classes: int = 10, *, widths: tuple[int, int, int], depth: int, momentum: float
    ) -> None:
        super().__init__()
        self.whitening = _Whitening()
        groups = zip((24, *widths), widths, strict=False)
        self.groups = nn.Sequential(*(_Group(*channels, depth, momentum) for channels in groups))
        self.head = nn.Linear(widths[-1], num_classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, classes]. images: [B, 3, H, W] float32, normalised."""
        features: Tensor = self.groups(self.whitening(images))
        logits: Tensor = self.head(features.amax((2, 3)))
        return logits * _LOGIT_SCALE


class _Group(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, depth: int, momentum: float) -> None:
        super().__init__()
        later = (_convolution(out_channels, out_channels) for _ in range(depth - 1))
        self.convs = nn.ModuleList([_convolution(in_channels, out_channels), *later])
        self.norms = nn.ModuleList(_BiasNorm(out_channels, momentum) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(self.convs[0](x), 2)
        x = shortcut = functional.gelu(self.norms[0](x))
        for conv, norm in zip(self.convs[1:-1], self.norms[1:-1], strict=True):
            x = functional.gelu(norm(conv(x)))
        x = self.norms[-1](self.convs[-1](x))
        return functional.gelu(x + shortcut if len(self.convs) > 2 else x)


def _convolution(in_channels: int, out_channels: int) -> nn.Conv2d:
    """Return a 3×3 convolution whose first filters pass its input through."""
    conv = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
    with torch.no_grad():
        nn.init.dirac_(conv.weight[:in_channels])
    return conv


class _BiasNorm(nn.Module):
    """Batch norm with a bias and without a scale."""

    def __init__(self, channels: int, momentum: float) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, eps=1e-12, momentum=momentum, affine=False)
        self.bias = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        normalised: Tensor = self.norm(x)
        return normalised + _BIAS_SCALE * self.bias


class _Whitening(nn.Module):
    """Fixed 2×2 filters with uncorrelated outputs of about equal variance, and their negatives.

    airbench takes the eigenvectors of the patches of 5,000 training images. Those of natural images
    are, nearly, products of a Haar pattern (mean, vertical, horizontal and diagonal difference) and
    an opponent colour (grey, red to blue, green to magenta): on CIFAR-10 no two of these twelve
    outputs correlate by more than 0.16.
    """

    _VARIANCES = (
        (12.48, 0.495, 0.419, 0.0673),
        (1.032, 0.00712, 0.00464, 0.00025),
        (0.217, 0.00261, 0.00191, 0.00015),
    )
    """The variances of the outputs on CIFAR-10, colour by pattern."""

    def __init__(self) -> None:
        super().__init__()
        patterns = torch.tensor([[1.0, 1, 1, 1], [1, 1, -1, -1], [1, -1, 1, -1], [1, -1, -1, 1]]) / 2
        colours = functional.normalize(torch.tensor([[1.0, 1, 1], [1, 0, -1], [1, -2, 1]]), dim=1)
        filters = torch.einsum("kc,ps->kpcs", colours, patterns).reshape(12, 3, 2, 2)
        filters = filters / (torch.tensor(self._VARIANCES).view(12, 1, 1, 1) + 5e-4).sqrt()
        self.filters: Tensor
        self.register_buffer("filters", torch.cat([filters, -filters]))
        self.bias = nn.Parameter(torch.zeros(24))

    def forward(self, images: Tensor) -> Tensor:
        return functional.gelu(functional.conv2d(images, self.filters, self.bias))


# 1.97, 4.60 and 12.7 million parameters
airbench94 = partial(Airbench, widths=(64, 256, 256), depth=2, momentum=0.4)
airbench95 = partial(Airbench, widths=(128, 384, 384), depth=2, momentum=0.4)
airbench96 = partial(Airbench, widths=(128, 512, 512), depth=3, momentum=0.1)


def vit_s_16(num_classes: int = 1000, **options: Any) -> nn.Module:
    """Return ViT-S/16 (Touvron et al., "DeiT", 2021; big_vision's S/16)."""
    patches = {"image_size": 224, "patch_size": 16}
    width = {"num_layers": 12, "num_heads": 6, "hidden_dim": 384, "mlp_dim": 1536}
    model: nn.Module = VisionTransformer(**patches | width | options, num_classes=num_classes)
    return model


MODELS: dict[str, Callable[..., nn.Module]] = {
    "vit_s_16": vit_s_16, "resnet18_cifar": resnet18_cifar,
    "airbench94": airbench94, "airbench95": airbench95, "airbench96": airbench96,
}  # fmt: skip
