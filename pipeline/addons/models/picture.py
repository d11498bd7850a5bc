"""The preprocessing of validation inside an exported model: a picture of any size to probabilities.

Promise: the model sees the pixels of `data.augment.center_crop`, but for a few that differ by one
of 255 levels. Resizing is a product with two matrices, and torch's rounding after each of them is
modelled: it rounds the weights to 16 bits, and the pixels to bytes. The matrices have as many rows
as the crop, so only the picture's own sides are dynamic, and every runtime can multiply matrices.
"""

import torch
from torch import Tensor, nn

from pipeline.addons.models.trained import ExportedModel
from pipeline.config.sections import Model
from pipeline.data.augment import MAX_ASPECT

_MAX_WEIGHT, _MAX_PRECISION = 2**15 - 0.5, 22


class PictureModel(ExportedModel):
    """The model with resize, centre crop, normalisation and softmax."""

    def __init__(
        self, model: nn.Module, geometry: tuple[int, int], options: Model, several_labels: bool | None = False
    ) -> None:
        super().__init__(model, options, several_labels)
        self.size, self.resize = geometry

    def forward(self, picture: Tensor) -> Tensor:
        """Return probabilities [classes]. picture: [H, W, 3] uint8 in RGB.

        Of pictures of one size, [B, H, W, 3], it returns [B, classes].
        """
        if picture.dim() == 3:
            return self.forward(picture[None])[0]
        rows, columns = (
            torch.arange(side, dtype=torch.float64, device=picture.device) for side in picture.shape[1:3]
        )
        shorter = torch.minimum(rows[-1], columns[-1]) + 1
        down, across = self._weights(rows, shorter), self._weights(columns, shorter)
        pixels = picture.permute(0, 3, 1, 2).float()
        pixels = _rounded(pixels @ across.T)  # torch's order
        return super().forward(_rounded(down @ pixels))

    def _weights(self, places: Tensor, shorter: Tensor) -> Tensor:
        """Return the weight of each pixel along a side in each pixel of the crop, [size, side].

        places: 0, 1, … side - 1, float64. shorter: the picture's shorter side.
        """
        side = places[-1] + 1
        kept = torch.minimum(side, MAX_ASPECT * shorter)
        places = places - ((side - kept) / 2).floor()
        resized = (kept * (max(self.resize, self.size) / shorter)).round().clamp(min=self.size)
        scale = kept / resized
        crop = torch.arange(self.size, dtype=torch.float64, device=places.device)
        crop = crop + ((resized - self.size) / 2).floor()
        # the resized picture's first row is computed, too: at the edge, weights are the largest
        centres = (torch.cat([torch.zeros_like(crop[:1]), crop]) + 0.5) * scale
        distance = (places + 0.5 - centres[:, None]).abs() / scale.clamp(min=1)
        weights = (1 - distance).clamp(min=0) * ((places >= 0) & (places < kept))
        weights = weights / weights.sum(1, keepdim=True)
        precision = torch.log2(_MAX_WEIGHT / weights.max()).floor().clamp(max=_MAX_PRECISION)
        return (_rounded(weights[1:] * 2**precision) / 2**precision).float()


def _rounded(values: Tensor) -> Tensor:
    return (values + 0.5).floor()
