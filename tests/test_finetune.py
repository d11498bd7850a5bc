"""Fine-tuning: first weights, frozen layers, class weights, rates by layer, patience, a teacher."""

import pickle
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from harness import SMALL, Job, MakeJob, assert_resumes, plan_of, quick, save_checkpoint
from huggingface_hub import constants
from safetensors.torch import save_file
from sklearn.utils.class_weight import compute_class_weight
from timm.data import ImageNetInfo
from timm.optim import param_groups_layer_decay
from torch.nn import functional
from torchvision import models

from pipeline.addons.models import class_weights, pretrained, teacher
from pipeline.addons.models.layers import rate_scales
from pipeline.addons.models.trained import weights_digest
from pipeline.addons.ops.plan_table import table
from pipeline.addons.run.receipt import best_checkpoint
from pipeline.config.load import from_yaml, load
from pipeline.config.sections import Model, Optimizer, Train
from pipeline.errors import RequestError, RunError, TemporaryError
from pipeline.group import Group
from pipeline.model.architectures import build
from pipeline.model.loss import Targets, classification_loss
from pipeline.model.normalise import Normalise
from pipeline.train.optimizer import parameter_groups
from pipeline.world import World

HEAD = ("classifier.weight", "classifier.bias")


@pytest.fixture(scope="module")
def first(job: MakeJob) -> Job:
    return job("data.workers=0", "train.max_steps=6").finished()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """Lay out huggingface_hub's cache by hand, with the weights of a small ViT, and no network."""
    model = timm.create_model("test_vit")
    folder = tmp_path / "hub/models--timm--test_vit.r160_in1k"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    save_file(model.state_dict(), folder / "snapshots" / ("0" * 40) / "model.safetensors")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return model


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_with_class_weights_is_torchs_with_a_mean_over_images(smoothing: float) -> None:
    logits, labels = torch.randn(12, 5), torch.arange(12) % 5
    weights = torch.tensor([0.5, 1, 2, 4, 8])
    options = Train(label_smoothing=smoothing)

    def per_image(labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits, labels, weights, reduction="none", label_smoothing=smoothing)

    loss = classification_loss(logits, Targets(labels), options, weights)
    torch.testing.assert_close(loss, per_image(labels).mean())
    halves = [classification_loss(logits[i::2], Targets(labels[i::2]), options, weights) for i in (0, 1)]
    torch.testing.assert_close(torch.stack(halves).mean(), loss, msg="depends on the passes")
    partners, share = labels.flip(0), torch.rand(12)
    mixed = classification_loss(logits, Targets(labels, partners, share), options, weights)
    expected = share * per_image(labels) + (1 - share) * per_image(partners)
    torch.testing.assert_close(mixed, expected.mean())


def test_balanced_weights_are_scikit_learns_and_a_file_names_each_class(tmp_path: Path) -> None:
    labels, classes = np.array([0] * 7 + [1] * 2 + [3]), ("a", "b", "none", "d")
    source: Any = SimpleNamespace(classes=classes, train=SimpleNamespace(labels=labels), label_sets=())

    def found(words: str) -> torch.Tensor:
        config = load("digits", [f"train.class_weights={words}"])
        config = from_yaml(config.to_yaml(), "the checkpoint")  # which needs no file
        class_weights.check(config, source)
        return class_weights.tensor(config, source, torch.device("cpu"))

    balanced = found("balanced")
    expected = compute_class_weight("balanced", classes=np.array([0, 1, 3]), y=labels)
    assert balanced[[0, 1, 3]].tolist() == pytest.approx(expected)
    assert balanced[2] == 1
    torch.testing.assert_close(found("sqrt"), balanced.sqrt())
    (tmp_path / "w.yaml").write_text("a: 1\nb: 2.5\nnone: 1\nd: 8")
    (tmp_path / "w.json").write_text('{"a": 1, "b": 2.5, "none": 1, "d": 8}')
    for name in ("w.yaml", "w.json"):
        assert found(f"{tmp_path / name}").tolist() == [1, 2.5, 1, 8]


def fine_tune(folder: Path, digits: Path, teacher: Path, world: int) -> Job:
    words = [
        "digits", f"data.root={digits}", *SMALL, f"model.init={teacher}", f"model.teacher={teacher}",
        "model.freeze=backbone", "model.freeze_until=6 steps", "train.class_weights=balanced",
        "train.distill=[0.5,2]", "train.patience=2", "train.watch=val/loss", "optimizer.layer_decay=0.9",
        "optimizer.head_lr=1", "augment.mixup=0.2", "schedule.warmup=2 steps", "evaluate.every=3 steps",
        "checkpoint.every=3 steps", "checkpoint.keep=20", "train.ema=0.5", "train.max_steps=60",
        "run.exact=true", "run.deterministic=false", "exact.shards=4", "data.workers=1", "optimizer.lr=2",
    ]  # fmt: skip
    return Job(folder, words, nproc=world)


def test_a_fine_tuning_is_the_same_at_any_world_size(tmp_path: Path, digits: Path, first: Job) -> None:
    teacher = Path(shutil.copytree(first.folder, tmp_path / "teacher"))
    alone = fine_tune(tmp_path / "alone", digits, teacher, 1)
    expected = alone.run_in_forks()
    step = int(expected.done["step"])
    assert 12 <= step < 60, "not before the warm-up and the frozen steps have ended"
    assert "no better evaluation for train.patience=2" in expected.err
    losses = {at: loss for at, _, loss in alone.journal("val/loss")}
    best = min(losses, key=lambda at: losses[at])
    assert best_checkpoint(str(alone.folder)).name.startswith(f"step-{best:08}"), losses
    before = first.contents()["model"]
    for at, changed in ((6, {*HEAD}), (9, {*before})):
        found = alone.contents(at)["model"]
        assert {name for name in before if not torch.equal(before[name], found[name])} == changed

    for world in (2, 4):
        again = fine_tune(tmp_path / f"world-{world}", digits, teacher, world).run_in_forks()
        assert again.out == expected.out
    killed = fine_tune(tmp_path / "killed", digits, teacher, 2)
    for at in sorted(random.Random(39).sample(range(1, step), 2)):
        killed.start().kill_at(at)
        killed.nproc = 3 - killed.nproc
    assert killed.run_in_forks().out == expected.out
    assert killed.trace() == alone.trace()
    again = killed.run_in_forks()
    assert (again.out, "already finished" in again.err) == (expected.out, True)

    assert killed.contents()["teacher"] == weights_digest(before)
    for word, line in {
        "train.patience=3": "train.patience: 2 -> 3",
        "model.freeze_until=9 steps": "model.freeze_until: 6 steps -> 9 steps",
    }.items():
        assert line in quick(*killed.train_words(), word, code=2).error
    shutil.copytree(alone.folder / "checkpoints", teacher / "checkpoints", dirs_exist_ok=True)
    refused = quick(*killed.train_words(), code=2)
    assert "other weights than the teacher that the run was started with" in refused.error


def test_published_weights_say_what_they_were_trained_with(hub: torch.nn.Module) -> None:
    words = ["data.source=synthetic", "model.arch=timm/test_vit", "model.init=timm"]
    config, plan = plan_of(*words)
    assert config.model.mean == config.model.std == (0.5, 0.5, 0.5)
    assert (config.augment.size, config.evaluate.resize) == (32, 32), "as the recipe says"
    assert "mean and deviation (0.5, 0.5, 0.5) and (0.5, 0.5, 0.5), model.init=timm" in table(plan)
    black = Normalise(torch.device("cpu"), config.model)(torch.zeros((1, 3, 1, 1), dtype=torch.uint8))
    assert black.flatten().tolist() == [-1, -1, -1]
    found = load("vit-s16", ["model.arch=resnet50", "model.init=torchvision", "augment.size=112"])
    assert (found.augment.size, found.evaluate.resize, found.model.mean) == (112, 256, (0.485, 0.456, 0.406))
    own = load("resnet50-90", [*words[1:], "model.mean=[0.1,0.2,0.3]", "augment.size=120"])
    assert (own.model.mean, own.evaluate.resize) == ((0.1, 0.2, 0.3), 256), "as given, and as the recipe says"

    options = Model(arch="timm/test_vit", init="timm")
    for args, size in (({}, 101), ({"img_size": 32}, 5)):
        given = options.model_copy(update={"args": args})
        weights = pretrained.read(given, build(given, 10))
        assert weights["pos_embed"].shape[1] == size
        assert {"head.weight", "head.bias"} == {*hub.state_dict()} - {*weights}
        assert torch.equal(weights["norm.weight"], hub.state_dict()["norm.weight"])
    for arch, kind, line in (
        ("timm/test_resnet", TemporaryError, "HF_HOME"),  # offline, and not in the cache
        ("timm/test_mambaout", RequestError, "timm knows none"),
    ):
        with pytest.raises(kind, match=line):
            pretrained.read(Model(arch=arch, init="timm"), hub)
    path = next(Path(constants.HF_HUB_CACHE).rglob("model.safetensors"))
    path.write_bytes(pickle.dumps(print))
    with pytest.raises(RequestError, match="cannot be read"):
        pretrained.read(options, hub)


def test_a_teacher_has_its_own_normalisation_and_the_datas_classes(hub: torch.nn.Module, first: Job) -> None:
    names = ImageNetInfo().label_names()
    config = load("digits", ["model.teacher=timm/test_vit"])
    group = Group(World(), torch.device("cpu"))
    found = teacher.Teacher(config, tuple(names), [160], group)
    pixels = torch.randint(256, (2, 3, 160, 160), dtype=torch.uint8)
    logits = found(Normalise(group.device, config.model)(pixels))
    with torch.no_grad():
        expected = hub.eval()((pixels / 255 - 0.5) / 0.5)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
    for given, classes, line in (
        ("timm/test_vit", names[1:], "has the class 'n01440764' where the data has 'n01443537'"),
        ("timm/test_vit", names[:-1], "has the class 'n15075141' where the data has 'missing'"),
        (str(first.folder), [*"0123456789"][::-1], "has the class '0' where the data has '9'"),
    ):
        with pytest.raises(RunError, match=line):
            teacher.Teacher(load("digits", [f"model.teacher={given}"]), tuple(classes), [160], group)
    with pytest.raises(RequestError, match=r"cannot take the images .*augment.size"):
        teacher.Teacher(config, tuple(names), [8], group)

    student, target = torch.randn(4, 3), torch.randn(4, 3)
    loss = teacher.distil(torch.tensor(2.0), student, target, (0.25, 3.0))
    soft = (target / 3).softmax(1)
    divergence = (soft * (soft.log() - (student / 3).log_softmax(1))).sum() / 4
    torch.testing.assert_close(loss, 0.75 * torch.tensor(2.0) + 0.25 * 9 * divergence)


def test_each_layer_has_its_rate_by_timms_groups_or_by_the_blocks_of_torchvision() -> None:
    vit = timm.create_model("test_vit")
    names = {id(param): name for name, param in vit.named_parameters()}

    def rates(groups: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
        params = [(names[id(param)], group) for group in groups for param in group["params"]]
        return {name: (group["lr_scale"], group["weight_decay"]) for name, group in params}

    options = Optimizer(layer_decay=0.5, weight_decay=0.05)
    expected = param_groups_layer_decay(vit, 0.05, vit.no_weight_decay(), layer_decay=0.5)
    assert rates(parameter_groups(vit, options)) == rates(expected)
    resnet = models.resnet18()
    found = rate_scales(resnet, Optimizer(layer_decay=0.5, head_lr=0.7, lr=0.1))
    assert found["fc.weight"] == pytest.approx(7)
    blocks = [f"layer{number}.{block}" for number in range(1, 5) for block in range(2)]
    assert [found[f"{block}.conv1.weight"] for block in blocks] == [0.5**i for i in range(8, 0, -1)]
    assert found["conv1.weight"] == found["bn1.bias"] == 0.5**9
    assert rate_scales(models.vit_b_16(), options)["encoder.ln.weight"] == 0.5
    assert rate_scales(models.convnext_tiny(), options)["features.7.2.layer_scale"] == 0.5
    assert "lr_scale" not in parameter_groups(resnet, Optimizer())[0], "as in checkpoints of before"


def test_a_run_starts_with_weights_of_another(tmp_path: Path, digits: Path, first: Job) -> None:
    before = first.contents()["model"]
    init = f"model.init={first.folder}"
    other = ["digits", *SMALL, "data.source=synthetic", "data.num_classes=7", "data.num_images=96"]
    no_training = ["train.max_steps=1", "optimizer.lr=1e-12", "optimizer.weight_decay=0", "schedule.warmup=0"]
    second = Job(tmp_path / "second", [*other, "data.workers=0", *no_training, init], nproc=2)
    line = f"first weights from {first.folder}; {', '.join(HEAD)} start random"
    assert line in second.finished().log()
    after = second.contents()["model"]
    assert after[HEAD[0]].shape[0] == 7
    matching = [name for name in before if not re.search(r"^classifier|running|num_", name)]
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in matching)

    contents, own = first.contents(), "model.mean=[0.5,0.5,0.5] model.std=[0.25,0.25,0.25]"
    config = from_yaml(contents["config"], "", own.split()).to_yaml()
    run = save_checkpoint(tmp_path / "mean", contents | {"config": config}, 1)
    with pytest.raises(RequestError, match=re.escape(f"add {own}")):
        pretrained.read(Model(init=str(run)), build(Model(), 10))

    words = [*first.arguments[:-1], init, "model.freeze=backbone", "train.epochs=1", "run.seed=1"]
    uninterrupted = assert_resumes(tmp_path, [*words, "evaluate.every=6 steps"], 13)
    assert "frozen: 2,570 of 101,766 weights are trained" in uninterrupted.log()
    after = uninterrupted.contents()["model"]
    assert {name for name in before if not torch.equal(before[name], after[name])} == {*HEAD}


def test_with_a_frozen_backbone_only_the_head_is_trained() -> None:
    transformer = models.VisionTransformer(32, 16, num_layers=1, num_heads=1, hidden_dim=8, mlp_dim=8)
    deit = build(Model(arch="timm/deit_tiny_distilled_patch16_224", args={"img_size": 32}), 10)
    cases = ((models.resnet18(), ("fc",)), (transformer, ("heads.head",)), (deit, ("head", "head_dist")))
    for model, heads in cases:
        pretrained.freeze(model, "backbone")
        trained = {name for name, param in model.named_parameters() if param.requires_grad}
        assert trained == {f"{head}.{part}" for head in heads for part in ("weight", "bias")}
