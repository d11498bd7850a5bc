"""The model for export, with normalisation and softmax."""

import torch
from torch import Tensor, nn

from pipeline.model.normalise import MEAN, STD


class ExportedModel(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(MEAN).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(STD).view(1, 3, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        """Return probabilities [B, classes]. pixels: [B, 3, H, W] float32 in 0..255."""
        logits: Tensor = self.model((pixels - self.mean) / self.std)
        return logits.softmax(1)
