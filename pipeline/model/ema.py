"""An exponential moving average (EMA) of the weights, to be evaluated, saved as best and exported.

Promise: the EMA resumes bit for bit and is the same on every process. Why this holds: its decay is
a function of the step, it is computed from weights that are equal on every process, and it is saved
with them. Running statistics are averaged like weights, as in timm's `ModelEmaV3`. Counters are
copied; torch's `AveragedModel` averages them, too, and keeps its own counter.
"""

import copy
from collections import defaultdict

import torch
from torch import Tensor, nn


def make_ema(model: nn.Module) -> nn.Module:
    """Return a copy of the model that `update_ema` moves towards it at each step."""
    return copy.deepcopy(model).requires_grad_(False)


@torch.no_grad()
def update_ema(ema: nn.Module, model: nn.Module, step: int, decay: float) -> None:
    """Move `ema` towards `model` in place, by 1 - decay, after update `step`.

    In the first steps the decay is lower, (1 + step) / (10 + step), so that the initial weights are
    forgotten; this is the rule of TensorFlow's ExponentialMovingAverage.
    """
    weight = 1 - min(decay, (1 + step) / (10 + step))
    latest = model.state_dict()
    # torch._foreach takes plain tensors or FSDP's sharded ones, not both in one call.
    pairs: dict[tuple[type, bool], tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for name, tensor in ema.state_dict().items():
        averages, values = pairs[type(tensor), tensor.is_floating_point()]
        averages.append(tensor)
        values.append(latest[name])
    for (_, is_average), (averages, values) in pairs.items():
        if is_average:
            torch._foreach_lerp_(averages, values, weight)
        else:
            torch._foreach_copy_(averages, values)
