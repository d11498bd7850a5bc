"""Pretrained weights: what matches is loaded, the head is new, and anything else is refused."""

import re
from pathlib import Path

import torch
from harness import SMALL, Job, assert_resumes
from torchvision import models

from pipeline.addons.models.pretrained import freeze
from pipeline.config.sections import Model
from pipeline.model.architectures import build


def test_a_run_starts_with_the_weights_of_another_and_frozen_ones_stay_bit_identical(
    tmp_path: Path, digits: Path
) -> None:
    words = ["digits", f"data.root={digits}", *SMALL, "data.workers=0"]
    first = Job(tmp_path / "first", [*words, "train.max_steps=2"]).finished()
    before = first.contents()["model"]
    init = f"model.init={first.folder}"
    other = ["digits", *SMALL, "data.source=synthetic", "data.num_classes=7", "data.num_images=96"]
    no_training = ["train.max_steps=1", "optimizer.lr=1e-12", "optimizer.weight_decay=0", "schedule.warmup=0"]
    second = Job(tmp_path / "second", [*other, "data.workers=0", *no_training, init], nproc=2)
    assert f"first weights from {first.folder}; fc.weight, fc.bias start random" in second.finished().log()
    after = second.contents()["model"]
    assert after["fc.weight"].shape[0] == 7
    matching = [name for name in before if not re.search(r"^fc\.|running|num_", name)]
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in matching)

    words += [init, "model.freeze=backbone", "train.epochs=1", "evaluate.every=6 steps", "run.seed=1"]
    uninterrupted = assert_resumes(tmp_path, words, 13)
    assert "frozen: 10,250 of 352,042 weights are trained" in uninterrupted.log()
    after = uninterrupted.contents()["model"]
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"fc.weight", "fc.bias"}


def test_with_a_frozen_backbone_only_the_head_is_trained() -> None:
    transformer = models.VisionTransformer(32, 16, num_layers=1, num_heads=1, hidden_dim=8, mlp_dim=8)
    deit = build(Model(arch="timm/deit_tiny_distilled_patch16_224", args={"img_size": 32}), 10)
    cases = ((models.resnet18(), ("fc",)), (transformer, ("heads.head",)), (deit, ("head", "head_dist")))
    for model, heads in cases:
        freeze(model, "backbone")
        trained = {name for name, param in model.named_parameters() if param.requires_grad}
        assert trained == {f"{head}.{part}" for head in heads for part in ("weight", "bias")}
