"""The EMA of the weights is evaluated, digested and served, and a resume restores it.

With `model.batchnorm=average` batch norm's running statistics are the mean over the processes, and
with `sync` each process normalises with those of all.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import SMALL, Job, assert_resumes
from torch import nn

from pipeline.addons.models.trained import weights_digest
from pipeline.config.sections import Model
from pipeline.model.architectures import build
from pipeline.model.ema import MovingAverage, make_ema
from pipeline.parallel.ddp import synchronise_batch_norm


def test_the_ema_follows_its_decay_and_moves_faster_at_first() -> None:
    model = nn.BatchNorm1d(3)
    ema = make_ema(model)
    average = MovingAverage(ema, model, 0.9)
    expected = [tensor.double() for tensor in ema.state_dict().values()]
    for step in range(1, 101):
        for tensor in model.state_dict().values():
            tensor.add_(1)
        model.running_mean = model.running_mean.clone()  # as a module may: a new tensor
        average.update(step)
        rate = 1 - min(0.9, (1 + step) / (10 + step))
        new = model.state_dict().values()
        expected = [mean + rate * (tensor - mean) for mean, tensor in zip(expected, new, strict=True)]
    for tensor, mean in zip(ema.state_dict().values(), expected, strict=True):
        exact = mean if tensor.is_floating_point() else torch.tensor(100.0).double()  # counters are copied
        torch.testing.assert_close(tensor.double(), exact, rtol=1e-5, atol=0)


def test_fp16_skips_overflows_on_all_ranks_and_resumes_bit_identically(tmp_path: Path) -> None:
    words = ["digits", *SMALL, "data.source=synthetic", "data.num_images=480", "data.workers=0",
             "train.precision=fp16", "train.clip=1", "train.epochs=1", "run.watch=1 steps"]  # fmt: skip
    contents = assert_resumes(tmp_path, words, 5).contents()
    assert 0 < contents["scaler"]["scale"] < 2.0**16, "an overflow has lowered the scale"
    weights = [tensor for tensor in contents["model"].values() if tensor.is_floating_point()]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights)


def test_averaged_batch_norm_statistics_equal_those_of_the_global_batch(job: Callable[..., Job]) -> None:
    words = ("train.max_steps=2", "data.workers=0", "run.deterministic=false", "train.ema=0.5")
    found = []
    for nproc, kind in ((1, "local"), (2, "average"), (2, "local")):
        run = job(*words, "checkpoint.every=1 steps", f"model.batchnorm={kind}", nproc=nproc)
        assert run.run_in_forks().code == 0
        found.append(run.contents(1))  # before any evaluation
    for part in ("model", "average"):
        # The first batch norm: its input does not depend on other statistics.
        name = next(name for name in found[0][part] if name.endswith("running_mean"))
        whole, averaged, local = (contents[part][name] for contents in found)
        torch.testing.assert_close(averaged, whole, rtol=0, atol=1e-6)
        assert (local - whole).abs().max() > 1e-4


@pytest.mark.parametrize("arch", ["timm/regnety_002", "shufflenet_v2_x0_5"])
def test_synchronised_batch_norm_keeps_weights_and_activations(arch: str) -> None:
    model = build(Model(arch=arch), 10).eval()
    images = torch.randn(2, 3, 64, 64)
    expected, layers = model(images), sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    weights = weights_digest(model.state_dict())
    synchronise_batch_norm(model)
    assert sum(isinstance(module, nn.SyncBatchNorm) for module in model.modules()) == layers > 0
    assert torch.equal(model(images), expected)
    assert weights_digest(model.state_dict()) == weights
