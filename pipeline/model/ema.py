"""An exponential moving average of the weights: what is judged, kept as best and served, where a recipe asks for one.

Promise: it resumes to the bit and is the same at every process. Why that holds: its rate is a function of the step, it is
made of weights that are equal everywhere, and it is saved with them. Running statistics are averaged like weights, as timm
does (`ModelEmaV3`); what counts is taken over (torch's `AveragedModel` averages it too, and keeps a count of its own).
"""

import copy
from collections import defaultdict

import torch
from torch import Tensor, nn


def make_ema(model: nn.Module) -> nn.Module:
    """A copy of the model, to be moved towards it step by step."""
    return copy.deepcopy(model).requires_grad_(False)


@torch.no_grad()
def update_ema(average: nn.Module, model: nn.Module, step: int, decay: float) -> None:
    """Move `average` towards `model`, the model after update `step`, by 1 - decay; by more in the first steps.

    The early decay, (1 + step) / (10 + step), is that of TensorFlow's ExponentialMovingAverage: so the first weights are
    forgotten.
    """
    weight = 1 - min(decay, (1 + step) / (10 + step))
    theirs = dict(model.state_dict())
    moving = [(mine, theirs[name]) for name, mine in average.state_dict().items()]
    floats: dict[type, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    counts: tuple[list[Tensor], list[Tensor]] = [], []
    for mine, their in moving:
        # a list for one call is sliced (fsdp) or it is not
        mine_of_kind, their_of_kind = floats[type(mine)] if mine.is_floating_point() else counts
        mine_of_kind.append(mine)
        their_of_kind.append(their)
    for mine_of_kind, their_of_kind in floats.values():
        torch._foreach_lerp_(mine_of_kind, their_of_kind, weight)
    if counts[0]:
        torch._foreach_copy_(*counts)
