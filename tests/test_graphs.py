"""Dynamo makes one whole graph of each model per image size, and makes it once.

A dummy backend takes the graphs, so nothing is compiled to code.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from pipeline.addons.models.functions import meta_model
from pipeline.config.load import load, recipe_names
from pipeline.group import Group
from pipeline.model.architectures import build
from pipeline.model.loss import Targets
from pipeline.parallel.ddp import DDPStrategy
from pipeline.parallel.strategy import Strategy
from pipeline.plan import DataSize, Plan
from pipeline.planning import make_plan
from pipeline.world import World

CPU = torch.device("cpu")


class SmallModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3)

    def forward(self, pixels: Tensor) -> Tensor:
        logits: Tensor = self.conv(pixels).mean((2, 3))
        return logits


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the graphs that are made from now on; they run as they are."""
    found: list[Any] = []
    torch._dynamo.reset()
    counters.clear()

    def keep(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        found.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    return found


def train(strategy: Strategy, plan: Plan, epochs: int) -> None:
    """Run the passes of one update with each image size, that many times."""
    labels = Targets(torch.zeros(plan.micro_batch, dtype=torch.int64))
    for size in epochs * plan.image_sizes:
        for micro in range(plan.accumulate):
            strategy.forward_backward(micro, torch.zeros(plan.micro_batch, 3, size, size), labels)
        strategy.model.zero_grad()


def make_ddp(net: nn.Module | None, *words: str) -> tuple[DDPStrategy, Plan]:
    config = load("digits", ["train.compile=on", "batch.accumulate=2", "batch.global=4", *words])
    plan = make_plan(config, World(), DataSize(8, 8, 10))
    return DDPStrategy(config, plan, net or build(config.model, 10), Group(World(), CPU)), plan


@pytest.mark.usefixtures("alone")
def test_ddp_has_one_graph_per_size_with_and_without_gradient_sync(graphs: list[Any]) -> None:
    sizes = ("augment.first_size=32", "augment.size=64", "augment.growth=[0 epochs, 1 epoch]")
    strategy, plan = make_ddp(None, *sizes)
    train(strategy, plan, epochs=1)
    assert counters["stats"]["unique_graphs"] == len(plan.image_sizes) == 2
    pieces = len(graphs)
    assert pieces > 2, "cut at the buckets, so that one is sent while the next is computed"
    train(strategy, plan, epochs=2)
    assert len(graphs) == pieces, "buckets, passes and sizes seen before are not compiled again"


@pytest.mark.usefixtures("alone")
def test_more_sizes_than_torch_recompiles_by_default_are_each_compiled_once(graphs: list[Any]) -> None:
    sizes = ("augment.first_size=32", "augment.size=384", "augment.growth=[0 epochs, 39 epochs]")
    strategy, plan = make_ddp(SmallModel(), "train.epochs=40", *sizes)
    train(strategy, plan, epochs=2)
    assert len(graphs) == len(plan.image_sizes) == 12


@pytest.mark.parametrize("recipe", recipe_names())
def test_a_recipe_is_one_graph_per_size_without_a_break(
    recipe: str, graphs: list[Any], full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(recipe, ["train.compile=on", "parallel=ddp", "data.root=/data"])
    plan = make_plan(config, World(), DataSize(1_281_167, 50_000, 1000))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, fullgraph=True))  # a break is an error
    strategy = Strategy(config, plan, meta_model(config.model, 1000), Group(World(), torch.device("meta")))
    sizes = plan.image_sizes if full else plan.image_sizes[:2]
    for size in 2 * sizes:
        strategy.forward(torch.empty(2, 3, size, size, device="meta"))
    assert len(graphs) == len(sizes)


@pytest.mark.usefixtures("graphs")
def test_the_compilers_threads_are_shared_among_the_processes_of_a_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load("digits", ["train.compile=on"])
    plan = make_plan(config, World(), DataSize(96, 8, 10))
    for cpus, local_size, is_set, threads in (
        (24, 8, False, 3), (2, 8, False, 1), (200, 2, False, 32), (24, 8, True, 32),
    ):  # fmt: skip
        monkeypatch.setattr(inductor, "compile_threads", 32)
        if is_set:
            monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "32")
        Strategy(config, plan, SmallModel(), Group(World(cpus=cpus, local_size=local_size), CPU))
        assert inductor.compile_threads == threads
