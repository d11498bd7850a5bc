"""Model FLOPs utilisation, as in PaLM (Chowdhery et al. 2022, appendix B).

The numerator is the arithmetic of the model, forward and backward, which torch counts once from
shapes alone (a multiplication and an addition are two). The denominator is the peak that the maker
states for dense matrices in the precision of the run. A device that is not in the table, or a
precision without such a rate, has no figure.
"""

import re
from contextlib import suppress

import torch
from torch.utils.flop_counter import FlopCounterMode

from pipeline.addons.models.functions import meta_model
from pipeline.config.schema import Config
from pipeline.config.sections import Model
from pipeline.group import Group
from pipeline.plan import Plan

# dense bf16 and fp16 in FLOP/s, from NVIDIA's data sheets; the first whose words are in the
# device's own name; none for a part of a device (MIG)
_PEAKS = (
    ("B200", 2.25e15), ("GH200", 989e12), ("H200 NVL", 835e12), ("H200", 989e12), ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12), ("H100", 989e12), ("A100", 312e12), ("L40S", 362e12), ("L4", 121e12),
)  # fmt: skip
_SHARE_OF_PEAK = {"bf16": 1.0, "fp16": 1.0, "tf32": 0.5}


class MfuMeter:
    """Measures a job whose devices are all like this one."""

    def __init__(self, config: Config, plan: Plan, group: Group) -> None:
        name = torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else ""
        known = (peak for words, peak in _PEAKS if re.search(rf"\b{words}\b", name) and "MIG" not in name)
        self._peak = plan.world * next(known, 0) * _SHARE_OF_PEAK.get(config.train.precision, 0)
        self._flops: dict[int, int] = {}
        """FLOPs of one image, by its side in px."""
        if self._peak and group.is_main:  # which alone reports
            with suppress(Exception):  # a model of the user's that needs values, not only shapes
                for size in plan.image_sizes:
                    self._flops[size] = flops_per_image(config.model, plan.num_classes, size)

    def metrics(self, images_per_s: float, size: int) -> dict[str, float]:
        """Return the metrics of a job at `images_per_s` images of `size` × `size` px."""
        flops = self._flops.get(size)
        return {"time/mfu": images_per_s * flops / self._peak} if flops else {}


def flops_per_image(options: Model, num_classes: int, size: int) -> int:
    """Return the FLOPs of one image of `size` × `size` px in training, forward and backward."""
    model = meta_model(options, num_classes).train()
    images = torch.empty((2, 3, size, size), device="meta")  # two: batch norm refuses one value a channel
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    return int(counter.get_total_flops()) // 2
