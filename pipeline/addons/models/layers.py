"""A learning rate for each layer: `optimizer.layer_decay` and `optimizer.head_lr`.

layer_decay is that of Bao et al., "BEiT", 2021: the layers of timm's models are those of its
`group_matcher`. Those of other models are the members with weights of the outermost
`nn.Sequential`s, in order; other weights belong to the layer before them, and the classifier is the
last layer.
"""

from torch import nn

from pipeline.addons.models.pretrained import heads
from pipeline.addons.shard.fsdp import blocks
from pipeline.config.sections import Optimizer


def rate_scales(model: nn.Module, options: Optimizer) -> dict[str, float]:
    """Return the factor of the learning rate of each parameter, by name."""
    layers, last = layer_numbers(model)
    decay = options.layer_decay or 1.0
    scales = {name: decay ** (last - layer) for name, layer in layers.items()}
    if options.head_lr:
        prefixes = tuple(f"{name}." for name in heads(model))
        scales |= {name: options.head_lr / options.lr for name in scales if name.startswith(prefixes)}
    return scales


def layer_numbers(model: nn.Module) -> tuple[dict[str, int], int]:
    """Return the layer of each parameter, from 0 for the first, by name; and the last layer."""
    names = [name for name, _ in model.named_parameters()]
    if matcher := getattr(model, "group_matcher", None):
        from timm.models import group_parameters

        found = group_parameters(model, matcher(coarse=False), reverse=True)
        last = max(found.values())
        return {name: found.get(name, last) for name in names}, last
    of_block = {
        id(param): number for number, block in enumerate(blocks(model), 1) for param in block.parameters()
    }
    prefixes = tuple(f"{name}." for name in heads(model))
    last, layer, layers = max(of_block.values(), default=0) + 1, 0, {}
    for name, param in model.named_parameters():
        layer = of_block.get(id(param), layer)
        layers[name] = last if name.startswith(prefixes) else layer
    return layers, last
