"""Exact mode: the weights do not know how many processes there were, nor when their number changed."""

import random
import signal
from pathlib import Path

import pytest
import torch
from harness import SMALL, Job, assert_each_sample_once, kill, pipeline, read_rows
from torch import nn

from pipeline.config.load import load
from pipeline.group import Group
from pipeline.parallel.exact import ExactStrategy
from pipeline.plan import DataSize, make_plan
from pipeline.world import World


def job(folder: Path, digits: Path, world: int, *more: str) -> Job:
    # batch norm, dropout, momentum, augmentation
    words = ["digits", f"data.root={digits}", *SMALL, "model.arch=mobilenet_v3_small", "run.exact=true",
             "run.deterministic=false", "train.max_steps=18", "evaluate.every=9 steps", "checkpoint.every=4 steps",
             "data.workers=2", "train.ema=0.9"]  # fmt: skip
    return Job(folder, [*words, *more], nproc=world)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Job:
    """The run of one process."""
    run = job(tmp_path_factory.mktemp("alone") / "run", digits, 1)
    assert run.run().code == 0
    return run


@pytest.mark.fault("F1")
@pytest.mark.full
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long), 4])
def test_the_weights_are_those_of_one_process(tmp_path: Path, digits: Path, alone: Job, world: int) -> None:
    more = job(tmp_path / "run", digits, world)
    assert more.run().out == alone.folder.with_suffix(".out").read_text()
    assert more.journal("train/loss", "train/top1", "val/") == alone.journal("train/loss", "train/top1", "val/")


@pytest.mark.fault("F1", ci=1, long=20)
@pytest.mark.parametrize("worlds", [(3, 2), pytest.param((4, 2, 3, 1), marks=pytest.mark.full)])
def test_killed_and_gone_on_with_other_numbers_it_ends_the_same(
    tmp_path: Path, digits: Path, alone: Job, worlds: tuple[int, ...], seed: int
) -> None:
    draw = random.Random(seed)
    run = job(tmp_path / "run", digits, 1)
    for number, world in enumerate(worlds):
        run.nproc = world
        run.start()
        if number < len(worlds) - 1:
            share = 18 // len(worlds)
            run.wait_for_step(draw.randint(number * share + 1, (number + 1) * share))
            for rank in run.ranks():
                kill(rank, signal.SIGKILL)
            run.wait_gone(5)
    assert run.wait().out == alone.folder.with_suffix(".out").read_text()
    trace = read_rows(run.folder / "trace.jsonl")
    assert_each_sample_once(trace, 48)
    assert trace == read_rows(alone.folder / "trace.jsonl")


def test_what_cannot_be_shared_is_refused_with_what_can(tmp_path: Path, digits: Path) -> None:
    words = ("digits", f"data.root={digits}", "run.exact=true", f"run.dir={tmp_path / 'run'}")
    five = pipeline("train", *words, "--nproc", "5")
    assert (five.code, "worlds that work are 1, 2, 3, 4, 6, 12" in five.error) == (2, True), five.error
    odd = pipeline("train", *words, "exact.shards=7")
    assert (odd.code, "batch.global=96 does not divide by exact.shards=7" in odd.error) == (2, True), odd.error
    many = pipeline("train", *words, "batch.accumulate=13")
    assert (many.code, "raise exact.shards" in many.error) == (2, True), many.error


class Net(nn.Module):
    """A layer, batch norm, and a layer that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.idle = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.norm(self.layer(x))
        return answer


def exact(shards: int = 4, bits: int = 44, net: Net | None = None) -> ExactStrategy:
    torch.manual_seed(0)
    words = ["run.exact=true", f"exact.shards={shards}", f"exact.fraction_bits={bits}", "batch.global=96"]
    config = load("digits", words)
    plan = make_plan(config, World(), DataSize(960, 96, 10))
    return ExactStrategy(config, plan, net or Net(), Group(World(), torch.device("cpu")))


def loss_of(answer: torch.Tensor, images: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return (answer * images[:, :3] * scale).sum()


def step(strategy: ExactStrategy, shards: list[torch.Tensor], scale: float = 1.0) -> None:
    strategy.model.zero_grad()
    for micro, images in enumerate(shards):
        with strategy.gradient_sync(micro):
            loss_of(strategy.forward(images), images, scale).backward()


def test_the_gradient_is_the_mean_of_the_shards_gradients() -> None:
    strategy = exact()
    twin = Net()
    twin.load_state_dict(strategy.model.state_dict())
    shards = [torch.randn(8, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    step(strategy, shards)
    means = []
    for images in shards:
        twin.norm.running_mean.zero_()  # type: ignore[union-attr, operator]
        loss_of(twin(images), images).backward()
        means.append(twin.norm.running_mean.clone())  # type: ignore[union-attr, operator]
    for name, parameter in twin.named_parameters():
        found = strategy.model.get_parameter(name).grad
        expected = parameter.grad / 4 if parameter.grad is not None else torch.zeros_like(parameter)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(strategy.model.norm.running_mean, torch.stack(means).mean(0))  # type: ignore[union-attr]
    assert int(strategy.model.norm.num_batches_tracked) == 1, "one shard is counted a step"  # type: ignore[union-attr]


def test_statistics_of_a_frozen_module_stay_bit_for_bit() -> None:
    net = Net()
    net.norm.running_mean = torch.randn(3) * 1e-9  # finer than the unit of 2^-36 in which statistics are averaged
    net.norm.eval()
    expected = [buffer.clone() for buffer in net.buffers()]
    strategy = exact(net=net)
    step(strategy, [torch.randn(8, 4) for _ in range(4)])
    assert not strategy.has_overflow()
    assert all(torch.equal(mine, their) for mine, their in zip(net.buffers(), expected, strict=True))


def test_shards_add_in_any_order_to_the_same_bits() -> None:
    shards = [torch.randn(8, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    found = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        strategy = exact()
        step(strategy, [shards[i] for i in order])
        found.append([one.grad for one in strategy.model.parameters()] + list(strategy.model.buffers()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e12])
def test_what_is_out_of_range_is_noticed_and_forgotten_at_the_next_step(scale: float) -> None:
    strategy = exact()
    shards = [torch.randn(8, 4) for _ in range(4)]
    step(strategy, shards)
    assert not strategy.has_overflow()
    step(strategy, shards, scale)
    assert strategy.has_overflow()
    strategy.model.norm.reset_running_stats()  # type: ignore[union-attr, operator]
    step(strategy, shards)
    assert not strategy.has_overflow()


def test_sums_that_are_coarse_are_remarked_upon() -> None:
    shards = [torch.randn(8, 4) for _ in range(4)]
    fine, coarse = exact(), exact()
    step(fine, shards)
    assert fine.precision_warning() is None
    step(coarse, shards, 1e-13)
    assert "raise exact.fraction_bits" in (coarse.precision_warning() or "")
    step(finer := exact(bits=52), shards, 1e-12)
    assert finer.precision_warning() is None


def test_a_gradient_that_is_too_large_ends_the_run_with_3(tmp_path: Path, digits: Path) -> None:
    wild = ("exact.fraction_bits=52", "exact.shards=24", "optimizer.lr=1e6", "schedule.warmup=0")
    result = job(tmp_path / "run", digits, 1, *wild).run()
    assert result.code == 3, result.err
