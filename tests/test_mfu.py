"""MFU: work counted from shapes against a peak that is known, and no figure where it is not."""

import pytest
import torch

from pipeline.config.load import load
from pipeline.config.schema import Model
from pipeline.telemetry.mfu import MfuMeter, flops_per_image, make_mfu_meter


def test_a_resnet50_at_224_px_is_three_passes_of_its_published_work() -> None:
    # torchvision documents 4.089 GFLOPS of multiply-adds forward; backward is twice that, less the
    # first layer's input
    flops = flops_per_image(Model(arch="resnet50"), 1000, 224)
    assert flops == pytest.approx(3 * 2 * 4.089e9, rel=0.02)


def test_the_share_is_work_a_second_over_the_peak_of_all_devices() -> None:
    options = Model(arch="resnet18")
    flops = flops_per_image(options, 10, 32)
    assert MfuMeter(options, 10, 1e12).metrics(1000, 32) == {"time/mfu": pytest.approx(1000 * flops / 1e12)}
    assert flops_per_image(options, 10, 64) > 3 * flops


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [("NVIDIA H200", "bf16", 989e12), ("NVIDIA H100 PCIe", "fp16", 756e12), ("NVIDIA A100-SXM4-80GB", "tf32", 156e12),
     ("NVIDIA L40S", "bf16", 362e12), ("NVIDIA A100-SXM4-80GB", "fp32", None), ("Some GPU", "bf16", None)],
)  # fmt: skip
def test_what_has_no_known_peak_has_no_figure(
    monkeypatch: pytest.MonkeyPatch, name: str, precision: str, peak: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    config = load("digits", [f"train.precision={precision}"])
    found = make_mfu_meter(config, 10, 2, torch.device("cuda"))
    figures = found.metrics(1000, 32)
    expected = (
        {} if peak is None else {"time/mfu": pytest.approx(1000 * flops_per_image(config.model, 10, 32) / peak / 2)}
    )
    assert figures == expected
    assert make_mfu_meter(config, 10, 2, torch.device("cpu")).metrics(1000, 32) == {}
