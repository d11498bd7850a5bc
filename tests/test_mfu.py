"""MFU is the FLOPs counted from shapes over a documented peak, and absent for an unknown device."""

from dataclasses import replace

import pytest
import torch

from pipeline.addons.run import mfu
from pipeline.addons.run.mfu import MfuMeter, flops_per_image
from pipeline.config.load import load
from pipeline.config.sections import Model
from pipeline.group import Group
from pipeline.plan import DataSize
from pipeline.planning import make_plan
from pipeline.world import World


def test_a_resnet50_step_is_three_times_its_published_forward_flops() -> None:
    # torchvision documents 4.089 G multiply-adds for the forward pass. The backward pass takes
    # twice that, except for the gradient of the first layer's input.
    flops = flops_per_image(Model(arch="resnet50"), 1000, 224)
    assert flops == pytest.approx(3 * 2 * 4.089e9, rel=0.02)


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [("NVIDIA H100 PCIe", "fp16", 756e12), ("NVIDIA A100-SXM4-80GB", "tf32", 156e12),
     ("NVIDIA L4", "bf16", 121e12), ("NVIDIA A100-SXM4-80GB", "fp32", None), ("Some GPU", "bf16", None),
     ("NVIDIA L40", "bf16", None), ("NVIDIA RTX A1000", "bf16", None), ("NVIDIA GB200", "bf16", None),
     ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None)],
)  # fmt: skip
def test_a_device_without_a_known_peak_has_no_mfu(
    monkeypatch: pytest.MonkeyPatch, name: str, precision: str, peak: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    config = load("digits", [f"train.precision={precision}"])
    plan = make_plan(config, World(), DataSize(1437, 360, 10))
    gpu = Group(World(), torch.device("cuda"))
    flops = 1000 * flops_per_image(config.model, 10, 32)
    meter = MfuMeter(config, replace(plan, world=2), gpu)
    monkeypatch.setattr(mfu, "flops_per_image", lambda *_: pytest.fail("it counts again"))
    assert meter.metrics(1000, 32) == ({} if peak is None else {"time/mfu": pytest.approx(flops / peak / 2)})
    for group in (Group(World(), torch.device("cpu")), Group(World(2, 2, 1, 1), torch.device("cuda"))):
        assert MfuMeter(config, plan, group).metrics(1000, 32) == {}
