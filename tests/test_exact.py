"""In exact mode the weights do not depend on the number of processes, even if it changes."""

import copy
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


def test_a_killed_run_with_balanced_classes_resumes_exactly_too(tmp_path: Path, digits: Path) -> None:
    alone = job(tmp_path / "alone", digits, 1, "data.balance=sqrt").finished()
    killed = job(tmp_path / "killed", digits, 2, "data.balance=sqrt")
    kill_at(killed.start(), 16)  # in the second epoch
    killed.nproc = 4
    assert killed.run_in_forks().out == alone.output()
    assert killed.trace() == alone.trace()


class Net(nn.Module):
    """A model with constants, a mean and, of images with a value above 10, a minimum."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.idle = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(2, 2)
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1), persistent=False)
        self.register_buffer("table", torch.tensor([1e-9, 3e9]), persistent=False)
        self.register_buffer("missing", torch.tensor([torch.nan, 1.0]))
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("lowest", torch.tensor(torch.inf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.centre.lerp_(x.mean(0), 0.5)
        if x.max() > 10:
            self.lowest.copy_(torch.minimum(self.lowest, x.min()))
        output: torch.Tensor = self.norm(self.layer(x))
        return output


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def strategy(net: Net) -> ExactStrategy:
    config = load("digits", ["run.exact=true", "exact.shards=4", "batch.global=96"])
    plan = make_plan(config, World(), DataSize(960, 96, 10))
    return ExactStrategy(config, plan, net, Group(World(), torch.device("cpu")))


@pytest.fixture
def shards() -> list[torch.Tensor]:
    return [torch.randn(8, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]


def backward(output: torch.Tensor, images: torch.Tensor, scale: float = 1) -> None:
    (output * images[:, :3] * scale).sum().backward()  # type: ignore[no-untyped-call]


def step(strategy: ExactStrategy, shards: list[torch.Tensor], scale: float = 1) -> bool:
    """Compute the gradients of one step, one pass for each shard; return True if one overflows."""
    strategy.model.zero_grad()
    for micro, images in enumerate(shards):
        with strategy.gradient_sync(micro):
            backward(strategy.forward(images), images, scale)
    return strategy.has_overflow()


def test_the_gradient_is_the_mean_of_the_shards_gradients(
    strategy: ExactStrategy, net: Net, shards: list[torch.Tensor]
) -> None:
    reference = copy.deepcopy(net)
    step(strategy, shards[::-1], 2)  # of which nothing is left
    net.norm.reset_running_stats()
    step(strategy, shards)
    means = []
    for images in shards:
        reference.norm.reset_running_stats()
        backward(reference(images), images)
        means.append(reference.norm.running_mean.clone())
    for name, param in reference.named_parameters():
        expected = param.grad / 4 if param.grad is not None else torch.zeros_like(param)
        torch.testing.assert_close(net.get_parameter(name).grad, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(net.norm.running_mean, torch.stack(means).mean(0))
    assert net.norm.num_batches_tracked == 1, "counts one batch for each step"


def test_constants_and_frozen_statistics_stay_bit_for_bit_and_others_are_averaged(
    strategy: ExactStrategy, net: Net, shards: list[torch.Tensor]
) -> None:
    net.norm.running_mean = torch.randn(3) * 1e-9  # smaller than 2^-36, the unit of averaged statistics
    net.norm.eval()
    expected = {name: old.clone() for name, old in net.named_buffers() if name != "centre"}
    step(strategy, shards)
    assert not step(strategy, shards)
    for name, old in expected.items():  # as bytes: NaN is not equal
        new = net.get_buffer(name)
        assert new.numpy().tobytes() == old.numpy().tobytes(), name
    torch.testing.assert_close(net.centre, 0.75 * torch.cat(shards).mean(0))


def test_a_statistic_that_leaves_infinity_in_some_shards_only_is_an_overflow(
    strategy: ExactStrategy, net: Net, shards: list[torch.Tensor]
) -> None:
    assert not step(strategy, shards)
    shards[2][0, 0] = 11
    assert step(strategy, shards), "infinity has no part in a mean"
    net.get_buffer("lowest").fill_(torch.inf)
    for images in shards:
        images[0, 0] = 11
    assert not step(strategy, shards)
    torch.testing.assert_close(net.lowest, torch.stack([images.min() for images in shards]).mean())


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e12])
def test_an_overflow_is_noticed_and_cleared_at_the_next_step(
    strategy: ExactStrategy, net: Net, shards: list[torch.Tensor], scale: float
) -> None:
    assert not step(strategy, shards)
    assert step(strategy, shards, scale)
    # as on a GPU, where the host reads the flag a step later
    guard = DeviceLossGuard(strategy, StepTimer(), "start again")
    assert not guard.check(2, torch.tensor(1.0), [])
    optimizer = torch.optim.SGD(net.parameters(), fused=True)
    guard.skip_bad_update(optimizer, has_scaler=False)
    assert optimizer.found_inf == 1, "the device skips the update"  # type: ignore[attr-defined]
    with pytest.raises(NotFiniteError, match="a gradient at step 2 is not finite, or larger than"):
        guard.sync()
    net.norm.reset_running_stats()
    assert not step(strategy, shards)
