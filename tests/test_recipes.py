"""Every recipe loads, has a plan for its number of processes, and names its source and target."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from harness import DIGITS, plan_of

from pipeline.addons.models import zoo
from pipeline.addons.models.functions import meta_model
from pipeline.config.load import RECIPES, from_yaml, load
from pipeline.plan import DataSize

IMAGENET, CIFAR10 = DataSize(1_281_167, 50_000, 1000), DataSize(50_000, 10_000, 10)
RUNS = {
    "digits": (2, DIGITS, None), "finetune-cpu": (2, DIGITS, None),
    "finetune": (1, DataSize(10_000, 1_000, 20), 1.25e-5), "imagenette": (8, DataSize(9469, 3925, 10), None),
    "cifar10": (4, CIFAR10, None), "cifar10-96": (4, CIFAR10, 9 / (1 + 1 / 0.15)),
    "cifar10-fast": (4, CIFAR10, 11.5 / 2 / (1 + 1 / 0.15)),
    "resnet50-90": (8, IMAGENET, 2.048), "resnet50-fast": (8, IMAGENET, 1.7),
    "resnet50-v2": (8, IMAGENET, 0.5), "vit-s16": (8, IMAGENET, 1e-3), "vit-l16": (16, IMAGENET, 0.5),
}  # fmt: skip
"""Each recipe -> number of processes, data, and the source's peak LR for the global batch."""


def test_every_recipe_is_in_this_file_and_in_the_documentation() -> None:
    names = {path.stem for path in RECIPES.glob("*.yaml")}
    page = (Path(__file__).parents[1] / "docs/getting-started.md").read_text()
    assert names == RUNS.keys() == set(re.findall(r"^\| `([\w-]+)`", page, re.MULTILINE))


@pytest.mark.parametrize("name", RUNS)
def test_a_recipe_has_a_plan_and_says_what_was_run_here(name: str) -> None:
    size, data, rate = RUNS[name]
    _, plan = plan_of(recipe=name, data=data, size=size, cpus=64)
    assert plan.total_steps > 0
    assert rate is None or plan.peak_lr == pytest.approx(rate, rel=1e-3)
    comment = (RECIPES / f"{name}.yaml").read_text().split("\ndata:")[0]
    assert re.search(r"[Rr]erun here", comment.replace("\n# ", " "))


def test_the_published_receipts_are_of_the_recipes_as_they_are_now() -> None:
    receipts = sorted((Path(__file__).parents[1] / "docs" / "receipts").glob("*/receipt.json"))
    assert receipts
    for path in receipts:
        receipt = json.loads(path.read_text())
        start = receipt["starts"][0]
        run = receipt["config"]["run"]
        words = [*start.get("changes", "").split(), f"run.dir={run['dir']}", f"run.trace={run['trace']}"]
        if "portable" not in run:  # of version 0.2
            words += ["data.split_by=file", "data.orientation=ignore", "run.portable=false"]
        found = from_yaml(yaml.safe_dump(receipt["config"]), str(path)).model_dump()
        expected = load(start["recipe"], words).model_dump()
        recorded = {"checkpoint", "track"}  # these keys say what is kept, and are no changes of a recipe
        assert {**found, **{key: expected[key] for key in recorded}} == expected
        assert receipt["done"].startswith(f"done step={receipt['plan']['total_steps']} ")


def test_the_models_of_the_recipes_have_the_documented_parameter_counts() -> None:
    models = {config.model.arch: config.model for config in (load(name, []) for name in RUNS)}
    # From torchvision's documentation of its weights; vit_s_16 as in DeiT-S; resnetblur50d as the
    # resnet50d of timm.
    assert {arch: count(meta_model(model, 1000)) for arch, model in models.items()} == {
        "resnet18": 11_689_512, "resnet50": 25_557_032, "vit_s_16": 22_050_664, "vit_l_16": 304_326_632,
        "airbench94": 2_224_792, "airbench96": 13_224_344, "timm/resnetblur50d": 25_576_264,
        "timm/convnext_tiny.in12k_ft_in1k": 28_589_128,
    }  # fmt: skip


def count(model: torch.nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def test_the_networks_for_small_images_keep_their_resolution() -> None:
    shapes = []
    model = zoo.resnet18_cifar(num_classes=10)
    model.layer1.register_forward_hook(lambda _module, _inputs, result: shapes.append(result.shape))
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert shapes == [(2, 64, 32, 32)]
    assert count(model) == 11_173_962  # pytorch-cifar's ResNet18
    counts = [count(network()) for network in (zoo.airbench94, zoo.airbench95, zoo.airbench96)]
    assert counts == [1_971_352, 4_604_440, 12_717_464]
