"""torchvision's classification models by name, with a head sized by the data, and their parameter groups."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.vision_transformer import VisionTransformer

from pipeline.config.help import nearest
from pipeline.config.schema import Model
from pipeline.errors import RequestError

# ImageNet's channel means and deviations, on the 0..255 scale of uint8 pixels, as every torchvision recipe uses them
MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)

# of the usual sizes the one that torchvision has no builder for (Touvron et al. 2021, DeiT-S; big_vision's S/16)
_OWN: dict[str, Callable[..., nn.Module]] = {
    "vit_s_16": partial(
        VisionTransformer, image_size=224, patch_size=16, num_layers=12, num_heads=6, hidden_dim=384, mlp_dim=1536
    ),
}

# an auxiliary head would make the model's answer in training a tuple
_OPTIONS: dict[str, dict[str, Any]] = {
    "googlenet": {"aux_logits": False, "init_weights": True},
    "inception_v3": {"aux_logits": False, "init_weights": True},
}


def try_out(options: Model, num_classes: int, batch: int, size: int, eval_size: int) -> None:
    """Let shapes alone go through: RequestError for a name that torchvision lacks, or images or passes too small for it."""
    model = skeleton(options, num_classes)
    with torch.device("meta"), torch.no_grad():
        for mode, images, side in (("augment.size", batch, size), ("evaluate.size", 2, eval_size)):
            model.train(mode == "augment.size")
            try:
                model(torch.empty(images, 3, side, side))
            except (
                RuntimeError,
                ValueError,
                AssertionError,
            ) as error:  # batch norm wants more than one value a channel
                raise RequestError(
                    f"{options.arch} cannot take passes of {images} images of {side} px ({error}): raise {mode}, or have"
                    " more images in a pass (batch.global, batch.accumulate, exact.shards, number of processes)"
                ) from None


def published_weights(arch: str) -> dict[str, Any]:
    """torchvision's weights of an architecture, by their names."""
    return {} if arch in _OWN else dict(torchvision.models.get_model_weights(arch).__members__)


def _check(options: Model) -> None:
    names = [*torchvision.models.list_models(module=torchvision.models), *_OWN]
    if options.arch not in names:
        raise RequestError(
            f"model.arch={options.arch} is not a classification model of torchvision {torchvision.__version__}"
            + (nearest(options.arch, names) or f": there are {', '.join(names)}")
        )


def build(options: Model, num_classes: int) -> nn.Module:
    """The model with fresh weights from the default generator. RequestError for a name that torchvision lacks."""
    _check(options)
    builder = _OWN.get(options.arch) or partial(torchvision.models.get_model, options.arch, weights=None)
    model: nn.Module = builder(num_classes=num_classes, **_OPTIONS.get(options.arch, {}))
    return model.to(memory_format=torch.channels_last) if options.channels_last else model


def count_parameters(options: Model, num_classes: int) -> int:
    """How many weights the model has, without making them."""
    return sum(parameter.numel() for parameter in skeleton(options, num_classes).parameters())


def skeleton(options: Model, num_classes: int) -> nn.Module:
    """The model's shapes, without its numbers."""
    try:
        with torch.device("meta"):
            return build(options, num_classes)
    except NotImplementedError:  # RegNet reckons its widths with tensors
        return build(options, num_classes).to("meta")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weights that decay, then norms and biases (fewer than two dimensions) that do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


class Normalise:
    """uint8 pixels to what a model reads, on the device: half of the loader's bytes are saved by waiting this long."""

    def __init__(self, device: torch.device, *, channels_last: bool) -> None:
        self._device = device
        self._mean = torch.tensor(MEAN, device=device).view(1, 3, 1, 1)
        self._scale = 1 / torch.tensor(STD, device=device).view(1, 3, 1, 1)
        self._format = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, images: Tensor) -> Tensor:
        """images: [B, 3, H, W] uint8, anywhere -> the same shape, float32, on the device."""
        images = images.to(self._device, non_blocking=True)
        return images.to(torch.float32, memory_format=self._format).sub_(self._mean).mul_(self._scale)


class Served(nn.Module):
    """The model as others call it: pixels as they come from a file in, probabilities out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(MEAN).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(STD).view(1, 3, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels: [B, 3, H, W] float32 of 0..255 -> [B, classes] probabilities."""
        logits: Tensor = self.model((pixels - self.mean) / self.std)
        return logits.softmax(1)
