"""An exponential moving average (EMA) of the weights, to be evaluated, saved as best and exported.

Promise: the EMA resumes bit for bit and is the same on every process. Why this holds: its decay is
a function of the step, it is computed from weights that are equal on every process, and it is saved
with them. Running statistics are averaged like weights, as in timm's `ModelEmaV3`. Counters are
copied; torch's `AveragedModel` averages them, too, and keeps its own counter.
"""

import copy

import torch
from torch import Tensor, nn

Pairs = tuple[list[Tensor], list[Tensor]]


def make_ema(model: nn.Module) -> nn.Module:
    """Return a copy of the model that `MovingAverage` moves towards it at each step."""
    return copy.deepcopy(model).requires_grad_(False)


class MovingAverage:
    """Moves `ema` towards `model`, in place, after each update."""

    def __init__(self, ema: nn.Module, model: nn.Module, decay: float) -> None:
        self._decay = decay
        # looked up once: two state dicts a step cost the host 2 ms for ResNet-50
        self._parameters: Pairs = list(ema.parameters()), list(model.parameters())
        # a module may assign a new tensor to a buffer, so that buffers are looked up at each step
        self._buffers = [
            (average, latest, name)
            for average, latest in zip(ema.modules(), model.modules(), strict=True)
            for name, _ in average.named_buffers(recurse=False)
        ]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move it by 1 - decay after update `step`.

        In the first steps the decay is lower, (1 + step) / (10 + step), so that the initial weights
        are forgotten; this is the rule of TensorFlow's ExponentialMovingAverage.
        """
        weight = 1 - min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(*self._parameters, weight)
        statistics: Pairs = [], []
        counters: Pairs = [], []
        for average, latest, name in self._buffers:
            mean: Tensor = getattr(average, name)
            averages, values = statistics if mean.is_floating_point() else counters
            averages.append(mean)
            values.append(getattr(latest, name))
        if statistics[0]:  # torch refuses empty lists
            torch._foreach_lerp_(*statistics, weight)
        if counters[0]:
            torch._foreach_copy_(*counters)
