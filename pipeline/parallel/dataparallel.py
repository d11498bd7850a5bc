"""DataParallel: one process drives all GPUs of a machine, as the oldest guides do it.

At every pass torch copies the model to each GPU, cuts the batch, and collects logits and gradients on the first one, from
threads of one Python process. It is here to be compared with, and for code that cannot have several processes. Each GPU
normalises its own part of a pass; running statistics are those of the first.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipeline.group import Group
from pipeline.parallel.strategy import Strategy
from pipeline.plan import Plan


class Scattered(Strategy):
    def __init__(self, model: nn.Module, group: Group, plan: Plan) -> None:
        super().__init__(model, group, plan)
        if group.device.type == "cpu":
            self.note = "parallel=dataparallel is a pass-through on a CPU: the model runs as if alone"
            return
        self.note = (
            f"parallel=dataparallel: one process copies the model to {torch.cuda.device_count()} GPUs at every pass and"
            " collects gradients on the first; ddp with a process for each GPU does neither, and is faster"
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.predictor(self.model)(images)
        return logits

    def predictor(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        if self.group.device.type == "cpu":
            return model
        scattered = nn.DataParallel(Replicated(model))
        return lambda images: scattered(images, torch.get_autocast_dtype(images.device.type))


class Replicated(nn.Module):
    """A model in the autocast of whoever calls all replicas: torch tells its threads whether, and not in what (2.14)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, kind: torch.dtype) -> Tensor:
        device = images.device.type
        with torch.autocast(device, kind, enabled=torch.is_autocast_enabled(device)):
            logits: Tensor = self.model(images)
        return logits
