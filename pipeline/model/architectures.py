"""Classification models by name, their parameter groups, and input normalisation."""

from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from pipeline.config.schema import Model
from pipeline.config.trust import is_function
from pipeline.errors import RequestError, nearest, one_line
from pipeline.lazy import part

# ImageNet's channel means and standard deviations, as in torchvision's recipes, for 0..255
MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)

_NOT_AN_ARGUMENT = (
    "num_classes", "weights", "weights_backbone", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay",
    "checkpoint_path", "cache_dir", "scriptable", "exportable", "no_jit", "features_only", "in_chans",
)  # fmt: skip
"""Arguments that would fetch or open weights, or make another kind of model."""

# With an auxiliary head, the model returns a tuple in training.
_OPTIONS = {name: {"aux_logits": False, "init_weights": True} for name in ("googlenet", "inception_v3")}


def pretrained_weights(arch: str) -> dict[str, Any]:
    """Return torchvision's pretrained weights of an architecture, by name."""
    names = torchvision.models.list_models(module=torchvision.models)
    return dict(torchvision.models.get_model_weights(arch).__members__) if arch in names else {}


def build(options: Model, num_classes: int) -> nn.Module:
    """Return the model with random weights from torch's default generator.

    Raises RequestError if there is no such model, or if it does not take its arguments.
    """
    arch, args = options.arch, options.args
    if is_function(arch):
        builder = part("function")(arch)
    else:
        _check_arguments(args)
        builder = part("timm")(arch) if arch.startswith("timm/") else _torchvision_builder(arch)
    try:
        model = builder(num_classes=num_classes, **args)
    except RequestError:
        raise
    except Exception as error:
        if not args and not is_function(arch):
            raise
        given = f" with model.args={args}" if args else ""
        problem = f"{type(error).__name__}: {one_line(error)}"
        raise RequestError(f"model.arch={arch} cannot be made{given} ({problem})", "correct its arguments") from error
    if not isinstance(model, nn.Module) or not any(True for _ in model.parameters()):
        raise RequestError(f"model.arch={arch} returns a {type(model).__name__}, not a torch.nn.Module with parameters")
    return model.to(memory_format=torch.channels_last) if options.channels_last else model


def _check_arguments(args: dict[str, Any]) -> None:
    """Raise RequestError for an argument that a model of torchvision or timm must not get."""
    for name in args:
        if name in _NOT_AN_ARGUMENT:
            raise RequestError(
                f"model.args.{name} cannot be set", "weights come from model.init, classes from the data"
            )


def _torchvision_builder(arch: str) -> Callable[..., nn.Module]:
    zoo = part("zoo")
    names = [*torchvision.models.list_models(module=torchvision.models), *zoo]
    if arch not in names:
        problem = f"model.arch={arch} is not a classification model of torchvision {torchvision.__version__}"
        for task in ("detection", "segmentation", "video", "optical_flow", "quantization"):
            if arch in torchvision.models.list_models(module=getattr(torchvision.models, task)):
                raise RequestError(
                    f"{problem}, but one for {task.replace('_', ' ')}", f"the models are {', '.join(names)}"
                )
        close = nearest(arch, names, 0.7)
        raise RequestError(problem + close, "" if close else f"the models are {', '.join(names)}")
    builder = zoo.get(arch) or partial(torchvision.models.get_model, arch, weights=None)
    return partial(builder, **_OPTIONS.get(arch, {}))


def count_parameters(options: Model, num_classes: int) -> int:
    """Return the number of parameters of the model, without allocating them."""
    return sum(param.numel() for param in meta_model(options, num_classes).parameters())


def meta_model(options: Model, num_classes: int) -> nn.Module:
    """Return the model on the meta device: shapes without values."""
    try:
        with torch.device("meta"):
            return build(options, num_classes)
    except (NotImplementedError, RuntimeError, RequestError):  # RegNet computes its widths with tensors
        return build(options, num_classes).to("meta")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the weights, with weight decay, and the norms (ndim < 2) and biases, without.

    A model may name more parameters without weight decay, or patterns of them, as timm's do
    (`no_weight_decay`). Raises RequestError if it gives anything else.
    """
    patterns = getattr(model, "no_weight_decay", ())
    if callable(patterns):
        patterns = patterns()
    is_collection = isinstance(patterns, Collection) and not isinstance(patterns, str)
    if not is_collection or not all(isinstance(pattern, str) for pattern in patterns):
        problem = f"no_weight_decay of {type(model).__name__} gives a {type(patterns).__name__}"
        raise RequestError(problem, "give a set of parameters' names, as strings")
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, param in model.named_parameters():
        if param.requires_grad:
            is_named = any(fnmatchcase(name, pattern) for pattern in patterns)
            groups[param.ndim >= 2 and not name.endswith("bias") and not is_named].append(param)
    return [
        {"params": groups[True], "weight_decay": weight_decay},
        {"params": groups[False], "weight_decay": 0.0},
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
