"""Splitting a model into pipeline stages: consecutive layers, balanced by their FLOPs.

torchvision writes the forward pass of a model by hand. So this module has the list of layers of
each model family: names of modules (a `Sequential` means its members) and the few functions between
them. Promise: all stages in sequence compute what the model computes, and a stage's weights have
the names that they have in the model. Other models are refused, because a wrong list of layers
would silently train another model.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from torchvision import models

from pipeline.errors import RequestError


class Layer(NamedTuple):
    """One step of the forward pass, which works with any copy of the model."""

    owns: tuple[str, ...]
    """Names of the modules and parameters that it uses and that have weights."""
    run: Callable[[nn.Module, Tensor], Tensor]


def _embed(model: nn.Module, images: Tensor) -> Tensor:
    """Return the input of the first block, as VisionTransformer and its encoder compute it."""
    patches = model._process_input(images)  # type: ignore[operator]
    tokens = torch.cat([model.class_token.expand(len(patches), -1, -1), patches], 1)  # type: ignore[operator]
    embedded: Tensor = model.encoder.dropout(tokens + model.encoder.pos_embedding)  # type: ignore[union-attr, operator]
    return embedded


_FLATTEN = Layer((), lambda _, x: x.flatten(1))
_POOL = Layer((), lambda _, x: functional.adaptive_avg_pool2d(x, 1).flatten(1))
_COMMON: tuple[str | Layer, ...] = ("features", "avgpool", _FLATTEN, "classifier")

_LAYERS: dict[type[nn.Module], tuple[str | Layer, ...]] = {
    models.AlexNet: _COMMON,
    models.ConvNeXt: ("features", "avgpool", "classifier"),
    models.EfficientNet: _COMMON,
    models.MobileNetV2: ("features", _POOL, "classifier"),
    models.MobileNetV3: _COMMON,
    models.RegNet: ("stem", "trunk_output", "avgpool", _FLATTEN, "fc"),
    models.ResNet: (
        "conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool", _FLATTEN, "fc",
    ),
    models.ShuffleNetV2: ("conv1", "maxpool", "stage2", "stage3", "stage4", "conv5", _POOL, "fc"),
    models.SwinTransformer: ("features", "norm", "permute", "avgpool", "flatten", "head"),
    models.VGG: _COMMON,
    models.VisionTransformer: (
        Layer(("conv_proj", "class_token", "encoder.pos_embedding"), _embed), "encoder.layers", "encoder.ln",
        Layer((), lambda _, x: x[:, 0]), "heads",
    ),
}  # fmt: skip


class StageModule(nn.Module):
    """A stage: some layers of a model, with their inputs and outputs contiguous."""

    def __init__(
        self,
        model: nn.Module,
        layers: list[Layer],
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__()
        self.model = model
        self._layers = layers
        self._autocast = autocast

    def forward(self, x: Tensor) -> Tensor:
        with self._autocast():
            x = _contiguous(x)
            for layer in self._layers:
                x = layer.run(self.model, x)
            return _contiguous(x)


def split_into_stages(model: nn.Module, arch: str, count: int, size: int) -> list[list[Layer]]:
    """Return the layers of `count` stages with the smallest possible maximum of FLOPs.

    size: side of the images, in pixels. Raises RequestError if the model cannot be split so.
    """
    units: list[list[Layer]] = []
    for layer in _layers(model, arch):
        # a layer without weights joins the one before it, so that every stage has weights
        if layer.owns or not units:
            units.append([])
        units[-1].append(layer)
    if count > len(units):
        remedy = f"set stages.count to at most {len(units)}, or use parallel=fsdp"
        raise RequestError(f"stages.count={count} is too large for {arch}", remedy)
    ends = _balance(_flops(model, units, size), count)
    return [list(chain.from_iterable(units[start:end])) for start, end in pairwise((0, *ends))]


def remove_layers(model: nn.Module, layers: list[Layer]) -> None:
    """Remove the weights of `layers` from the model, in place."""
    modules = dict(model.named_modules())
    for name in [name for layer in layers for name in layer.owns]:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Identity() if name in modules else None)


def _layers(model: nn.Module, arch: str) -> list[Layer]:
    """Return all layers of a model in the order of its forward pass."""
    listed = _LAYERS.get(type(model))
    if listed is None:
        families = ", ".join(sorted(family.__name__ for family in _LAYERS))
        remedy = f"use one of torchvision's {families}, or parallel=fsdp"
        raise RequestError(f"parallel=stages cannot split model.arch={arch}", remedy)
    weights = list(model.state_dict())

    def members(item: str | Layer) -> Iterator[Layer]:
        if isinstance(item, Layer):
            yield item
        elif type(module := model.get_submodule(item)) is nn.Sequential:
            for name, _ in module.named_children():
                yield from members(f"{item}.{name}")
        else:
            has_weights = any(name.startswith(f"{item}.") for name in weights)
            yield Layer((item,) if has_weights else (), lambda model, x: model.get_submodule(item)(x))

    layers = [layer for item in listed for layer in members(item)]
    owned = tuple(f"{name}." for layer in layers for name in layer.owns)
    missed = [name for name in weights if not f"{name}.".startswith(owned)]
    assert not missed, f"the layers of {arch} miss {missed}"
    return layers


def _flops(model: nn.Module, units: list[list[Layer]], size: int) -> list[int]:
    was_training = model.training
    x = torch.zeros((1, 3, size, size), device=next(model.parameters()).device)
    flops = []
    with torch.no_grad():
        for unit in units:
            with FlopCounterMode(display=False) as counter:
                x = StageModule(model, unit).eval()(x)
            flops.append(counter.get_total_flops())
    model.train(was_training)
    return flops


def _balance(costs: list[int], count: int) -> tuple[int, ...]:
    """Return the ends of `count` non-empty runs of costs with the smallest possible largest sum."""
    sums = [0, *accumulate(costs)]

    @cache
    def best(end: int, runs: int) -> tuple[int, tuple[int, ...]]:
        if runs == 1:
            return sums[end], (end,)
        before = [(start, *best(start, runs - 1)) for start in range(runs - 1, end)]
        return min((max(largest, sums[end] - sums[start]), (*ends, end)) for start, largest, ends in before)

    return best(len(costs), count)[1]


def _contiguous(x: Tensor) -> Tensor:
    # its gradient, too: only these can be sent, and ConvNeXt and channels_last produce others
    return x.flatten().view(x.shape)
