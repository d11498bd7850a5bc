"""In exact mode the weights do not depend on the number of processes, even if it changes."""

import random
import signal
from pathlib import Path

import pytest
import torch
from harness import SMALL, Job, assert_each_sample_once, kill
from torch import nn

from pipeline.config.load import load
from pipeline.errors import NotFiniteError
from pipeline.group import Group
from pipeline.guards.nonfinite import DeviceLossGuard
from pipeline.parallel.exact import ExactStrategy
from pipeline.plan import DataSize
from pipeline.planning import make_plan
from pipeline.timing import StepTimer
from pipeline.world import World


def job(folder: Path, digits: Path, world: int, *more: str) -> Job:
    # The model and settings have batch norm, dropout, momentum and augmentation.
    words = ["digits", f"data.root={digits}", *SMALL, "model.arch=mobilenet_v3_small", "run.exact=true",
             "run.deterministic=false", "train.max_steps=18", "evaluate.every=9 steps",
             "checkpoint.every=4 steps", "data.workers=2", "train.ema=0.9"]  # fmt: skip
    return Job(folder, [*words, *more], nproc=world)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Job:
    """Run the job with one process, a new interpreter: forks of one process share their hashes."""
    run = job(tmp_path_factory.mktemp("one-process") / "run", digits, 1)
    run.interpreter = True
    return run.finished()


@pytest.mark.fault("F1", ci=1, long=20)
@pytest.mark.parametrize("worlds", [(3, 2), pytest.param((4, 2, 3, 1), marks=pytest.mark.full)])
def test_a_killed_run_resumes_exactly_with_other_numbers_of_processes(
    tmp_path: Path, digits: Path, one_process: Job, worlds: tuple[int, ...], seed: int
) -> None:
    draw = random.Random(seed)
    run = job(tmp_path / "run", digits, 1)
    share = 18 // len(worlds)
    for number, run.nproc in enumerate(worlds[:-1]):
        kill_at(run.start(), draw.randint(number * share + 1, (number + 1) * share))
    run.nproc = worlds[-1]
    assert run.start().wait().out == one_process.output()
    assert_each_sample_once(run.trace(), 48)
    assert run.trace() == one_process.trace()


def kill_at(run: Job, step: int) -> None:
    run.wait_for_step(step)
    for rank in run.ranks():
        kill(rank, signal.SIGKILL)
    run.wait_gone(5)


def test_a_killed_run_with_balanced_classes_resumes_exactly_with_another_number_of_processes(
    tmp_path: Path, digits: Path
) -> None:
    alone = job(tmp_path / "alone", digits, 1, "data.balance=sqrt").finished()
    killed = job(tmp_path / "killed", digits, 2, "data.balance=sqrt")
    kill_at(killed.start(), 16)  # in the second epoch
    killed.nproc = 4
    assert killed.run_in_forks().out == alone.output()
    assert killed.trace() == alone.trace()


class Net(nn.Module):
    """A linear layer, batch norm, and a layer that the forward pass does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.idle = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.norm(self.layer(x))
        return output


def make_strategy(shards: int = 4, bits: int = 44, net: Net | None = None) -> ExactStrategy:
    torch.manual_seed(0)
    words = ["run.exact=true", f"exact.shards={shards}", f"exact.fraction_bits={bits}", "batch.global=96"]
    config = load("digits", words)
    plan = make_plan(config, World(), DataSize(960, 96, 10))
    return ExactStrategy(config, plan, net or Net(), Group(World(), torch.device("cpu")))


def loss_of(output: torch.Tensor, images: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return (output * images[:, :3] * scale).sum()


def make_shards() -> list[torch.Tensor]:
    return [torch.randn(8, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]


def step(strategy: ExactStrategy, shards: list[torch.Tensor], scale: float = 1.0) -> None:
    """Compute the gradients of one step, one pass for each shard."""
    strategy.model.zero_grad()
    for micro, images in enumerate(shards):
        with strategy.gradient_sync(micro):
            loss_of(strategy.forward(images), images, scale).backward()


def test_the_gradient_is_the_mean_of_the_shards_gradients() -> None:
    strategy = make_strategy()
    reference = Net()
    reference.load_state_dict(strategy.model.state_dict())
    shards = make_shards()
    step(strategy, shards[::-1], 2)  # of which nothing is left
    strategy.model.norm.reset_running_stats()  # type: ignore[union-attr, operator]
    step(strategy, shards)
    means = []
    for images in shards:
        reference.norm.running_mean.zero_()  # type: ignore[union-attr, operator]
        loss_of(reference(images), images).backward()
        means.append(reference.norm.running_mean.clone())  # type: ignore[union-attr, operator]
    for name, param in reference.named_parameters():
        found = strategy.model.get_parameter(name).grad
        expected = param.grad / 4 if param.grad is not None else torch.zeros_like(param)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(strategy.model.norm.running_mean, torch.stack(means).mean(0))  # type: ignore[union-attr]
    assert int(strategy.model.norm.num_batches_tracked) == 1, "counts one batch for each step"  # type: ignore[union-attr]


class Constants(Net):
    """A model with constants, a running mean and, of images with a value above 10, a minimum."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1), persistent=False)
        self.register_buffer("table", torch.tensor([1e-9, 3e9]), persistent=False)
        self.register_buffer("missing", torch.tensor([torch.nan, 1.0]))
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("lowest", torch.tensor(torch.inf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.centre.lerp_(x.mean(0), 0.5)
        if x.max() > 10:
            self.lowest.copy_(torch.minimum(self.lowest, x.min()))
        return super().forward(x)


def test_constants_and_frozen_statistics_stay_bit_for_bit_and_others_are_averaged() -> None:
    net, shards = Constants(), make_shards()
    net.norm.running_mean = torch.randn(3) * 1e-9  # smaller than 2^-36, the unit of averaged statistics
    net.norm.eval()
    expected = {name: old.clone() for name, old in net.named_buffers() if name != "centre"}
    strategy = make_strategy(net=net)
    step(strategy, shards)
    step(strategy, shards)
    assert not strategy.has_overflow()
    for name, old in expected.items():  # as bytes: NaN is not equal
        assert torch.equal(net.get_buffer(name).view(-1).view(torch.uint8), old.view(-1).view(torch.uint8)), (
            name
        )
    torch.testing.assert_close(net.centre, 0.75 * torch.cat(shards).mean(0))


def test_a_statistic_that_leaves_infinity_in_some_shards_only_is_an_overflow() -> None:
    net, shards = Constants(), make_shards()
    strategy = make_strategy(net=net)
    step(strategy, shards)
    assert not strategy.has_overflow()
    shards[2][0, 0] = 11
    step(strategy, shards)
    assert strategy.has_overflow(), "infinity has no part in a mean"
    net.get_buffer("lowest").fill_(torch.inf)
    for images in shards:
        images[0, 0] = 11
    step(strategy, shards)
    assert not strategy.has_overflow()
    torch.testing.assert_close(net.lowest, torch.stack([images.min() for images in shards]).mean())


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e12])
def test_an_overflow_is_noticed_and_cleared_at_the_next_step(scale: float) -> None:
    strategy = make_strategy()
    shards = make_shards()
    step(strategy, shards)
    assert not strategy.has_overflow()
    step(strategy, shards, scale)
    assert strategy.has_overflow()
    # as on a GPU, where the host reads the flag a step later
    guard = DeviceLossGuard(strategy, StepTimer(), "start again")
    assert not guard.check(2, torch.tensor(1.0), [])
    optimizer = torch.optim.SGD(strategy.model.parameters(), fused=True)
    guard.skip_bad_update(optimizer, has_scaler=False)
    assert optimizer.found_inf == 1, "the device skips the update"  # type: ignore[attr-defined]
    with pytest.raises(NotFiniteError, match="a gradient at step 2 is not finite, or larger than"):
        guard.sync()
    strategy.model.norm.reset_running_stats()  # type: ignore[union-attr, operator]
    step(strategy, shards)
    assert not strategy.has_overflow()


def test_a_gradient_that_is_too_large_ends_the_run_with_3(tmp_path: Path, digits: Path) -> None:
    diverging = ("exact.fraction_bits=52", "exact.shards=24", "optimizer.lr=1e6", "schedule.warmup=0")
    result = job(tmp_path / "run", digits, 1, *diverging).run()
    assert result.code == 3, result.err
