"""Every recipe loads, has a plan for its number of processes, and names its source and target."""

import re
from pathlib import Path

import pytest

from pipeline.config.load import RECIPES, load
from pipeline.plan import DataSize, make_plan
from pipeline.world import World

IMAGENET = DataSize(1_281_167, 50_000, 1000)
RUNS = {
    "digits": (2, DataSize(1437, 360, 10)),
    "cifar10": (4, DataSize(50_000, 10_000, 10)),
    "imagenette": (8, DataSize(9469, 3925, 10)),
    "resnet50-90": (8, IMAGENET),
    "resnet50-fast": (8, IMAGENET),
    "resnet50-v2": (8, IMAGENET),
    "vit-s16": (8, IMAGENET),
    "vit-l16": (16, IMAGENET),
}
RATES = {"resnet50-90": 2.048, "resnet50-fast": 1.7, "resnet50-v2": 0.5, "vit-s16": 1e-3, "vit-l16": 0.5}
"""Peak learning rates of the sources, for the global batch."""


def test_every_recipe_is_in_this_file_and_in_the_documentation() -> None:
    names = {path.stem for path in RECIPES.glob("*.yaml")}
    assert names == RUNS.keys()
    table = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text()
    assert set(re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE)) == names


@pytest.mark.parametrize("name", RUNS)
def test_a_recipe_has_a_plan_and_names_source_and_target(name: str) -> None:
    size, data = RUNS[name]
    plan = make_plan(load(name, []), World(size=size, local_size=size, cpus=64), data)
    assert plan.total_steps > 0
    assert plan.peak_lr == pytest.approx(RATES.get(name, plan.peak_lr))
    comment = (RECIPES / f"{name}.yaml").read_text().split("\ndata:")[0]
    assert "Target" in comment
    assert re.search(r"[Rr]erun here", comment.replace("\n# ", " "))
    assert "Source:" in comment or name == "digits"


def test_the_models_of_the_recipes_have_the_documented_parameter_counts() -> None:
    from pipeline.model.architectures import count_parameters

    models = {(config.model.arch, config.model) for config in (load(name, []) for name in RUNS)}
    counts = {arch: count_parameters(model, 1000) for arch, model in models}
    # From torchvision's documentation of its weights; vit_s_16 as in DeiT-S.
    assert counts == {"resnet18": 11_689_512, "resnet50": 25_557_032, "vit_s_16": 22_050_664, "vit_l_16": 304_326_632}
