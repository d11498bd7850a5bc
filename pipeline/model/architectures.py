"""torchvision's classification models by name, their parameter groups, and input normalisation."""

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

# ImageNet's channel means and standard deviations, as in torchvision's recipes, for 0..255
MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)

# torchvision has no ViT-S/16 (Touvron et al. 2021, DeiT-S; big_vision's S/16).
_OWN_MODELS: dict[str, Callable[..., nn.Module]] = {
    "vit_s_16": partial(
        VisionTransformer, image_size=224, patch_size=16, num_layers=12, num_heads=6, hidden_dim=384, mlp_dim=1536
    ),
}

# With an auxiliary head, the model returns a tuple in training.
_OPTIONS = {name: {"aux_logits": False, "init_weights": True} for name in ("googlenet", "inception_v3")}

# Layers for images whose gradient torch's deterministic mode refuses on CUDA: those that its
# documentation lists and whose kernels call alertNotDeterministic (torch 2.14). Of torchvision's
# classification models AlexNet and VGG have one.
_NOT_DETERMINISTIC = (
    "AdaptiveAvgPool2D", "AdaptiveMaxPool2D", "FractionalMaxPool2D", "GridSampler2D", "MaxUnpool2D",
    "UpsampleBicubic2D",
)  # fmt: skip


def check_shapes(options: Model, num_classes: int, batch: int, size: int, eval_size: int) -> None:
    """Try a training and an evaluation pass on the meta device, which computes only shapes.

    Raises RequestError if torchvision does not have the model, or if the images or the batch are
    too small for it.
    """
    model = meta_model(options, num_classes)
    with torch.device("meta"), torch.no_grad():
        for key, images, side in (("augment.size", batch, size), ("evaluate.size", 2, eval_size)):
            model.train(key == "augment.size")
            try:
                model(torch.empty(images, 3, side, side))
            except (RuntimeError, ValueError, AssertionError) as error:
                # a ValueError is that of batch norm, which needs more than one value per channel
                raise RequestError(
                    f"{options.arch} cannot take passes of {images} images of {side} px ({error}): raise {key}, or have"
                    " more images in a pass (batch.global, batch.accumulate, exact.shards, number of processes)"
                ) from None


def check_gradients_are_deterministic(model: nn.Module, arch: str, batch: int, size: int) -> None:
    """Check that CUDA can compute the gradients of `model`, on the meta device, the same each time.

    Raises RequestError if it cannot: in its deterministic mode torch refuses such a layer, but only
    in the first backward pass. It refuses it also if the layer changes no size; in a frozen part of
    the model there is no gradient.
    """
    with torch.device("meta"):
        nodes = [model.train()(torch.empty(batch, 3, size, size)).grad_fn]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        layer = node.name().removesuffix("Backward0")
        if layer in _NOT_DETERMINISTIC:
            raise RequestError(
                f"{arch} has the layer {layer.replace('2D', '2d')}, whose gradient on a GPU differs each time:"
                " choose another model.arch, or train without run.deterministic and run.exact, or with run.device=cpu"
            )
        new = {before for before, _ in node.next_functions if before} - seen
        seen |= new
        nodes += new


def pretrained_weights(arch: str) -> dict[str, Any]:
    """Return torchvision's pretrained weights of an architecture, by name."""
    return {} if arch in _OWN_MODELS else dict(torchvision.models.get_model_weights(arch).__members__)


def build(options: Model, num_classes: int) -> nn.Module:
    """Return the model with random weights from torch's default generator.

    Raises RequestError if torchvision does not have the model.
    """
    names = [*torchvision.models.list_models(module=torchvision.models), *_OWN_MODELS]
    if options.arch not in names:
        problem = f"model.arch={options.arch} is not a classification model of torchvision {torchvision.__version__}"
        for task in ("detection", "segmentation", "video", "optical_flow", "quantization"):
            if options.arch in torchvision.models.list_models(module=getattr(torchvision.models, task)):
                raise RequestError(
                    f"{problem}, but one for {task.replace('_', ' ')}: the models are {', '.join(names)}"
                )
        raise RequestError(problem + (nearest(options.arch, names, 0.7) or f": the models are {', '.join(names)}"))
    builder = _OWN_MODELS.get(options.arch) or partial(torchvision.models.get_model, options.arch, weights=None)
    model: nn.Module = builder(num_classes=num_classes, **_OPTIONS.get(options.arch, {}))
    return model.to(memory_format=torch.channels_last) if options.channels_last else model


def count_parameters(options: Model, num_classes: int) -> int:
    """Return the number of parameters of the model, without allocating them."""
    return sum(param.numel() for param in meta_model(options, num_classes).parameters())


def meta_model(options: Model, num_classes: int) -> nn.Module:
    """Return the model on the meta device: shapes without values."""
    try:
        with torch.device("meta"):
            return build(options, num_classes)
    except NotImplementedError:  # RegNet computes its widths with tensors
        return build(options, num_classes).to("meta")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the weights, with weight decay, and the norms and biases (ndim < 2), without."""
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in params if param.ndim >= 2], "weight_decay": weight_decay},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
    ]


class Normalise:
    """Conversion of uint8 pixels to the model's input.

    It runs on the device, so that images are transferred as bytes and not as floats.
    """

    def __init__(self, device: torch.device, *, channels_last: bool) -> None:
        self._device = device
        self._mean = torch.tensor(MEAN, device=device).view(1, 3, 1, 1)
        self._scale = 1 / torch.tensor(STD, device=device).view(1, 3, 1, 1)
        self._format = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, images: Tensor) -> Tensor:
        """Return float32 images on the device. images: [B, 3, H, W] uint8, on any device."""
        images = images.to(self._device, non_blocking=True)
        return images.to(torch.float32, memory_format=self._format).sub_(self._mean).mul_(self._scale)


class ExportedModel(nn.Module):
    """The model for export, with normalisation and softmax."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(MEAN).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(STD).view(1, 3, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        """Return probabilities [B, classes]. pixels: [B, 3, H, W] float32 in 0..255."""
        logits: Tensor = self.model((pixels - self.mean) / self.std)
        return logits.softmax(1)
