"""Pretrained weights: what matches is loaded, the head is new, and anything else is refused."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from harness import SMALL, Job, assert_resumes, quick
from torch import nn
from torchvision import models

from pipeline.addons.models.pretrained import freeze
from pipeline.config.load import load
from pipeline.config.sections import Model
from pipeline.errors import RequestError
from pipeline.model.architectures import build
from pipeline.record.checkpoint import decode
from pipeline.record.checkpoint_files import read_verified


@pytest.mark.full
def test_a_run_starts_with_the_weights_of_another(tmp_path: Path, digits: Path) -> None:
    words = ["digits", f"data.root={digits}", *SMALL, "data.workers=0", "train.max_steps=4"]
    first = Job(tmp_path / "first", words)
    assert first.run().code == 0
    synthetic = [
        *SMALL,
        "data.source=synthetic",
        "data.num_classes=7",
        "data.num_images=96",
        "data.workers=0",
    ]
    no_training = ["train.max_steps=1", "optimizer.lr=1e-12", "optimizer.weight_decay=0", "schedule.warmup=0"]
    second = Job(
        tmp_path / "second", ["digits", *synthetic, *no_training, f"model.init={first.folder}"], nproc=2
    )
    result = second.run_in_forks()
    assert result.code == 0, result.err
    assert f"first weights from {first.folder}; fc.weight, fc.bias start random" in result.err
    before, after = (
        decode(read_verified(run.checkpoints()[-1]), run.folder)["model"] for run in (first, second)
    )
    assert after["fc.weight"].shape[0] == 7
    weights = [
        name for name in before if not name.startswith("fc.") and "running" not in name and "num_" not in name
    ]
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in weights)


@pytest.mark.full
def test_frozen_weights_stay_bit_identical_also_after_an_evaluation(tmp_path: Path, digits: Path) -> None:
    words = ["digits", f"data.root={digits}", *SMALL, "data.workers=0"]
    first = Job(tmp_path / "first", [*words, "train.max_steps=2"])
    assert first.run().code == 0
    before = decode(read_verified(first.checkpoints()[-1]), first.folder)["model"]
    words += [
        f"model.init={first.folder}",
        "model.freeze=backbone",
        "train.epochs=1",
        "evaluate.every=6 steps",
    ]
    uninterrupted = assert_resumes(tmp_path, [*words, "run.seed=1"], 13)
    assert (
        "conv1, stage2, stage3, stage4, conv5 frozen: 10,250 of 352,042 weights are trained"
        in uninterrupted.log()
    )
    after = decode(read_verified(uninterrupted.checkpoints()[-1]), uninterrupted.folder)["model"]
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"fc.weight", "fc.bias"}


@pytest.mark.parametrize(
    ("make", "frozen", "head"),
    [(models.resnet18, "conv1, bn1, layer1, layer2, layer3, layer4", "fc"),
     (partial(models.VisionTransformer, 32, 16, num_layers=1, num_heads=1, hidden_dim=8, mlp_dim=8),
      "class_token, conv_proj, encoder", "heads.head")],
    ids=["resnet", "vit"],
)  # fmt: skip
def test_with_a_frozen_backbone_only_the_head_is_trained(
    make: Callable[[], nn.Module], frozen: str, head: str
) -> None:
    model = make()
    assert freeze(model, "backbone").startswith(f"{frozen} frozen: ")
    assert {name for name, param in model.named_parameters() if param.requires_grad} == {
        f"{head}.weight",
        f"{head}.bias",
    }


@pytest.mark.parametrize(
    ("names", "line"),
    [("layer5", "has no module 'layer5'; did you mean layer"),
     ("conv1,bn1,layer1,layer2,layer3,layer4,fc", "leaves nothing to train: do not freeze the head, fc"),
     (" , ", "has no module ''")],
)  # fmt: skip
def test_modules_that_cannot_be_frozen_are_refused(names: str, line: str) -> None:
    with pytest.raises(RequestError) as refusal:
        freeze(build(Model(arch="resnet18"), 10), names)
    assert line in str(refusal.value)


def test_random_weights_cannot_be_frozen() -> None:
    with pytest.raises(RequestError, match=r"would keep random weights"):
        load("digits", ["model.freeze=backbone"])


@pytest.mark.full
def test_unknown_pretrained_weights_are_refused_in_one_line(tmp_path: Path, digits: Path) -> None:
    words = ["digits", f"data.root={digits}", *SMALL, "data.workers=0", "train.max_steps=1"]
    result = quick("train", *words, "model.init=IMAGENET1K_V9", f"run.dir={tmp_path / 'run'}")
    assert result.code == 2
    assert "did you mean IMAGENET1K_V1?" in result.error
