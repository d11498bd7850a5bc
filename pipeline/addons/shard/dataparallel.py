"""DataParallel: one process drives all GPUs of a machine, as in the oldest guides.

It is here for comparison. Each GPU normalises its own part of a pass; the running statistics are
those of the first GPU. On a CPU it does nothing.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipeline.parallel.strategy import Strategy


class DataParallelStrategy(Strategy):
    def forward(self, pixels: Tensor) -> Tensor:
        return self.make_predictor(self.model)(pixels)

    def make_predictor(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        if self.group.device.type == "cpu":
            return model
        # cuDNN's findings are kept by thread, and each forward pass has new threads
        torch.backends.cudnn.benchmark = False
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
