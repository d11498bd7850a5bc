"""Learning rates by layer: `optimizer.layer_decay` (Bao et al., "BEiT", 2021) and `head_lr`."""

from torch import nn

from pipeline.addons.models.pretrained import heads
from pipeline.addons.shard.fsdp import blocks
from pipeline.config.sections import Optimizer


def rate_scales(model: nn.Module, options: Optimizer) -> dict[str, float]:
    """Return the factor of the learning rate of each parameter, by name.

    Layers are the groups of timm's `group_matcher`, or else the members with weights of the
    outermost `nn.Sequential`s, in order: other weights belong to the layer before them, and the
    classifier is the last layer.
    """
    head = tuple(f"{name}." for name in heads(model))
    layers: dict[str, int] = {}
    if matcher := getattr(model, "group_matcher", None):
        from timm.models import group_parameters

        layers = group_parameters(model, matcher(coarse=False), reverse=True)
        last = max(layers.values())
    else:
        ends = {id(param): i for i, block in enumerate(blocks(model), 1) for param in block.parameters()}
        layer = 0
        for name, param in model.named_parameters():
            layers[name] = layer = layer if name.startswith(head) else ends.get(id(param), layer)
        last = layer + 1
        layers |= {name: last for name in layers if name.startswith(head)}
    decay = options.layer_decay or 1.0
    scales = {name: decay ** (last - layers.get(name, last)) for name, _ in model.named_parameters()}
    if options.head_lr:
        scales |= {name: options.head_lr / options.lr for name in scales if name.startswith(head)}
    return scales
