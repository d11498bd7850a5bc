"""A model cut into stages: chains of its own modules, one after another, balanced by their arithmetic.

torchvision writes a model's forward pass by hand, so it is told here, family by family, as a chain of links: names of
modules, a `Sequential` standing for its members, and the few steps between them that are no module. Promise: the chain of
all stages is the model, and a stage's weights keep the names that they have in the whole model. What is not in the list is
refused: a wrong chain would train another model without a word.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from torchvision import models

from pipeline.config.schema import Model
from pipeline.errors import RequestError
from pipeline.model.architectures import skeleton


@dataclass(frozen=True)
class Link:
    """A step of the forward pass. It names what it uses, so that it runs on any copy of the model."""

    owns: tuple[str, ...]
    """Modules and parameters of the model."""
    run: Callable[[nn.Module, Tensor], Tensor]


def _function(run: Callable[[Tensor], Tensor]) -> Link:
    return Link((), lambda _, x: run(x))


def _tokens(model: nn.Module, images: Tensor) -> Tensor:
    """A vision transformer up to its first block, as its own `forward` and that of its encoder begin."""
    patches = model._process_input(images)  # type: ignore[operator]
    together = torch.cat([model.class_token.expand(len(patches), -1, -1), patches], 1)  # type: ignore[operator]
    tokens: Tensor = model.encoder.dropout(together + model.encoder.pos_embedding)  # type: ignore[union-attr, operator]
    return tokens


_FLATTEN = _function(lambda x: x.flatten(1))
_POOL = _function(lambda x: functional.adaptive_avg_pool2d(x, 1).flatten(1))
_PLAIN: tuple[str | Link, ...] = ("features", "avgpool", _FLATTEN, "classifier")

_CHAINS: dict[type[nn.Module], tuple[str | Link, ...]] = {
    models.AlexNet: _PLAIN,
    models.ConvNeXt: ("features", "avgpool", "classifier"),
    models.EfficientNet: _PLAIN,
    models.MobileNetV2: ("features", _POOL, "classifier"),
    models.MobileNetV3: _PLAIN,
    models.RegNet: ("stem", "trunk_output", "avgpool", _FLATTEN, "fc"),
    models.ResNet: (
        "conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool", _FLATTEN, "fc",
    ),
    models.ShuffleNetV2: ("conv1", "maxpool", "stage2", "stage3", "stage4", "conv5", _POOL, "fc"),
    models.SwinTransformer: ("features", "norm", "permute", "avgpool", "flatten", "head"),
    models.VGG: _PLAIN,
    models.VisionTransformer: (
        Link(("conv_proj", "class_token", "encoder.pos_embedding"), _tokens), "encoder.layers", "encoder.ln",
        _function(lambda x: x[:, 0]), "heads",
    ),
}  # fmt: skip


class Part(nn.Module):
    """A stage: some links of a model, run on what this process has of it."""

    def __init__(self, model: nn.Module, links: list[Link]) -> None:
        super().__init__()
        self.model = model
        self._links = links

    def forward(self, x: Tensor) -> Tensor:
        x = _row_by_row(x)
        for link in self._links:
            x = link.run(self.model, x)
        return _row_by_row(x)


def try_to_cut(options: Model, num_classes: int, count: int, size: int) -> None:
    """RequestError for a model that cannot be cut into so many stages; from shapes alone."""
    cut(skeleton(options, num_classes), options.arch, count, size)


def cut(model: nn.Module, arch: str, count: int, size: int) -> list[list[Link]]:
    """`count` stages whose costliest, counted in multiplications for images of `size` px, is as cheap as can be."""
    steps = _joined(model, _links(model, arch))
    if count > len(steps):
        raise RequestError(f"stages.count={count} is more than {arch} can be cut into: it has {len(steps)} parts")
    ends = _balanced(_costs(model, steps, size), count)
    return [[link for step in steps[start:end] for link in step] for start, end in zip((0, *ends), ends, strict=False)]


def drop(model: nn.Module, links: list[Link]) -> None:
    """Take from the model, in place, the weights that the links use."""
    modules = dict(model.named_modules())
    for name in [name for link in links for name in link.owns]:
        if name in modules:
            model.set_submodule(name, nn.Identity())
        else:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, None)


def _links(model: nn.Module, arch: str) -> list[Link]:
    chain = _CHAINS.get(type(model))
    if chain is None:
        families = ", ".join(sorted(family.__name__ for family in _CHAINS))
        raise RequestError(
            f"parallel=stages cannot cut model.arch={arch}: it can cut torchvision's {families}; take one of them, or fsdp"
        )
    links = [link for step in chain for link in ([step] if isinstance(step, Link) else _members(model, step))]
    owned = [name for link in links for name in link.owns]
    assert all(_is_within(name, owned) for name in model.state_dict()), f"the chain of {arch} misses weights"
    return links


def _members(model: nn.Module, name: str) -> list[Link]:
    """A link for a module, or one for each member of a Sequential."""
    module = model.get_submodule(name)
    if type(module) is nn.Sequential:
        return [link for inner, _ in module.named_children() for link in _members(model, f"{name}.{inner}")]
    return [Link((name,), lambda model, x: model.get_submodule(name)(x))]


def _joined(model: nn.Module, links: list[Link]) -> list[list[Link]]:
    """Links without weights stay with the one before them, so that no stage is without."""
    weights = list(model.state_dict())
    steps: list[list[Link]] = []
    for link in links:
        if not steps or any(_is_within(name, link.owns) for name in weights):
            steps.append([])
        steps[-1].append(link)
    return steps


def _costs(model: nn.Module, steps: list[list[Link]], size: int) -> list[int]:
    was_training = model.training
    x = torch.zeros((1, 3, size, size), device=next(model.parameters()).device)
    costs = []
    with torch.no_grad():
        for step in steps:
            with FlopCounterMode(display=False) as counter:
                x = Part(model, step).eval()(x)
            costs.append(counter.get_total_flops())
    model.train(was_training)
    return costs


def _balanced(costs: list[int], count: int) -> tuple[int, ...]:
    """Ends of `count` runs of costs, none empty, of which the costliest is as cheap as can be."""
    sums = [0, *accumulate(costs)]

    @cache
    def best(end: int, runs: int) -> tuple[int, tuple[int, ...]]:
        if runs == 1:
            return sums[end], (end,)
        return min(
            (max(best(at, runs - 1)[0], sums[end] - sums[at]), (*best(at, runs - 1)[1], end))
            for at in range(runs - 1, end)
        )

    return best(len(costs), count)[1]


def _row_by_row(x: Tensor) -> Tensor:
    """The same, contiguous, and so its gradient: nothing else can be sent, and ConvNeXt and channels_last make others."""
    return x.flatten().view(x.shape)


def _is_within(name: str, owners: list[str] | tuple[str, ...]) -> bool:
    return any(name == owner or name.startswith(f"{owner}.") for owner in owners)
