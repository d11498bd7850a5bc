"""MFU is the FLOPs counted from shapes over a documented peak, and absent for an unknown device."""

import pytest
import torch

from pipeline.addons.ops.mfu import MfuMeter, flops_per_image
from pipeline.config.load import load
from pipeline.config.sections import Model


def test_a_resnet50_step_is_three_times_its_published_forward_flops() -> None:
    # torchvision documents 4.089 G multiply-adds for the forward pass. The backward pass takes
    # twice that, except for the gradient of the first layer's input.
    flops = flops_per_image(Model(arch="resnet50"), 1000, 224)
    assert flops == pytest.approx(3 * 2 * 4.089e9, rel=0.02)


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [("NVIDIA H100 PCIe", "fp16", 756e12), ("NVIDIA A100-SXM4-80GB", "tf32", 156e12),
     ("NVIDIA A100-SXM4-80GB", "fp32", None), ("Some GPU", "bf16", None)],
)  # fmt: skip
def test_a_device_without_a_known_peak_has_no_mfu(
    monkeypatch: pytest.MonkeyPatch, name: str, precision: str, peak: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    config = load("digits", [f"train.precision={precision}"])
    meter = MfuMeter(config, 10, 2, torch.device("cuda"))
    flops = 1000 * flops_per_image(config.model, 10, 32)
    assert meter.metrics(1000, 32) == ({} if peak is None else {"time/mfu": pytest.approx(flops / peak / 2)})
    assert MfuMeter(config, 10, 2, torch.device("cpu")).metrics(1000, 32) == {}
