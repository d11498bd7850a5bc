"""Model FLOPs utilisation, as in PaLM (Chowdhery et al. 2022, appendix B).

The numerator is the arithmetic of the model, forward and backward, which torch counts once from
shapes alone (a multiplication and an addition are two). The denominator is the peak that the maker
states for dense matrices in the precision of the run. A device that is not in the table, or a
precision without such a rate, has no figure.
"""

import torch
from torch.utils.flop_counter import FlopCounterMode

from pipeline.config.schema import Config
from pipeline.config.sections import Model
from pipeline.model.architectures import meta_model

# dense bf16 and fp16 in FLOP/s, from NVIDIA's data sheets; the first name that is part of the
# device's own name
_PEAKS = (
    ("B200", 2.25e15), ("H200", 989e12), ("H100 NVL", 835e12), ("H100 PCIe", 756e12), ("H100", 989e12),
    ("A100", 312e12), ("L40S", 362e12), ("L4", 121e12),
)  # fmt: skip
_SHARE_OF_PEAK = {"bf16": 1.0, "fp16": 1.0, "tf32": 0.5}


class MfuMeter:
    """Measures a job on `devices` devices like this one."""

    def __init__(self, config: Config, num_classes: int, devices: int, device: torch.device) -> None:
        self._options, self._num_classes = config.model, num_classes
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        peak = next((peak for part, peak in _PEAKS if part in name), 0)
        self._peak = peak * devices * _SHARE_OF_PEAK.get(config.train.precision, 0)
        self._flops: dict[int, int] = {}

    def metrics(self, images_per_s: float, size: int) -> dict[str, float]:
        """Return the metrics of a job at `images_per_s` images of `size` × `size` px."""
        if not self._peak:
            return {}
        if size not in self._flops:
            try:
                self._flops[size] = flops_per_image(self._options, self._num_classes, size)
            except Exception:  # a model of the user's that needs values, not only shapes
                self._flops[size] = 0
        return {"time/mfu": images_per_s * self._flops[size] / self._peak} if self._flops[size] else {}


def flops_per_image(options: Model, num_classes: int, size: int) -> int:
    """Return the FLOPs of one image of `size` × `size` px in training, forward and backward."""
    model = meta_model(options, num_classes).train()
    images = torch.empty((2, 3, size, size), device="meta")  # two: batch norm refuses one value a channel
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    return int(counter.get_total_flops()) // 2
