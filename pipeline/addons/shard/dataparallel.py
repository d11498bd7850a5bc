"""DataParallel: one process drives all GPUs of a machine, as in the oldest guides.

It is here for comparison. Each GPU normalises its own part of a pass; the running statistics are
those of the first GPU.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipeline.config.schema import Config
from pipeline.group import Group
from pipeline.parallel.strategy import Strategy
from pipeline.plan import Plan


class DataParallelStrategy(Strategy):
    def __init__(self, config: Config, plan: Plan, model: nn.Module, group: Group) -> None:
        super().__init__(config, plan, model, group)
        if group.device.type == "cpu":
            self.notice = "parallel=dataparallel does nothing on a CPU: the model runs in one process"
            return
        self.notice = (
            f"parallel=dataparallel: one process copies the model to {torch.cuda.device_count()} GPUs in every pass and"
            " collects gradients on the first; parallel=ddp with a process for each GPU is faster"
        )

    def forward(self, pixels: Tensor) -> Tensor:
        return self.make_predictor(self.model)(pixels)

    def make_predictor(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        if self.group.device.type == "cpu":
            return model
        parallel = nn.DataParallel(AutocastModel(model))
        return lambda pixels: parallel(pixels, torch.get_autocast_dtype(pixels.device.type))


class AutocastModel(nn.Module):
    """A model in its caller's autocast dtype, which torch 2.14 does not tell replica threads."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor, dtype: torch.dtype) -> Tensor:
        device = pixels.device.type
        with torch.autocast(device, dtype, enabled=torch.is_autocast_enabled(device)):
            logits: Tensor = self.model(pixels)
        return logits
