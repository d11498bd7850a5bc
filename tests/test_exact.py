"""In exact mode the weights do not depend on the number of processes, even if it changes."""

import copy
import random

import pytest
import torch
from harness import SMALL, Job, MakeJob, plan_of
from torch import nn

from pipeline.errors import NotFiniteError
from pipeline.group import Group
from pipeline.guards.nonfinite import DeviceLossGuard
from pipeline.parallel.exact import ExactStrategy
from pipeline.timing import StepTimer
from pipeline.world import World

# The model and settings have batch norm, dropout, momentum and augmentation.
EXACT = ("model.arch=mobilenet_v3_small", "run.exact=true", "run.deterministic=false", "train.max_steps=18",
         "evaluate.every=9 steps", "checkpoint.every=4 steps", "data.workers=2",
         "train.ema=0.9", "exact.shards=6")  # fmt: skip


@pytest.fixture(scope="module")
def one_process(job: MakeJob) -> Job:
    """Run the job with one process, a new interpreter: forks of one process share their hashes."""
    return job(*EXACT, interpreter=True).finished()


@pytest.mark.fault("F1", ci=1, long=20)
@pytest.mark.parametrize("worlds", [(3, 2), pytest.param((6, 2, 3, 1), marks=pytest.mark.full)])
def test_a_killed_run_resumes_exactly_with_other_numbers_of_processes(
    job: MakeJob, one_process: Job, worlds: tuple[int, ...], seed: int
) -> None:
    draw = random.Random(seed)
    run = job(*EXACT)
    share = 18 // len(worlds)
    for number, run.nproc in enumerate(worlds[:-1]):
        run.start().kill_at(draw.randint(number * share + 1, (number + 1) * share))
    run.nproc = worlds[-1]
    assert run.start().wait().out == one_process.output()
    run.assert_each_sample_once()
    assert run.trace() == one_process.trace()


def test_a_killed_run_with_balanced_classes_resumes_exactly_too(job: MakeJob) -> None:
    words = (*EXACT, SMALL[0], "data.balance=sqrt")
    alone, killed = job(*words).finished(), job(*words, nproc=2)
    killed.start().kill_at(16)  # in the second epoch
    killed.nproc = 3
    assert killed.run_in_forks().out == alone.output()
    assert killed.trace() == alone.trace()


class Net(nn.Module):
    """A model with constants, statistics, and a layer that the forward pass does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.idle = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(2, 2)
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1), persistent=False)
        self.register_buffer("table", torch.tensor([1e-9, 3e9]), persistent=False)
        self.register_buffer("missing", torch.tensor([torch.nan, 1.0]))
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.centre.lerp_(x.mean(0), 0.5)
        return self.norm(self.layer(x))


class Exact:
    """The exact strategy with a small model, whose steps have four shards."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = Net()
        config, plan = plan_of("run.exact=true", "exact.shards=4", "batch.global=96")
        self.strategy = ExactStrategy(config, plan, self.net, Group(World(), torch.device("cpu")))
        self.shards = [torch.randn(8, 4) for _ in range(4)]

    def step(self, scale: float = 1) -> bool:
        """Compute the gradients of one step; return True if one overflows."""
        self.net.zero_grad()
        for micro, images in enumerate(self.shards):
            with self.strategy.gradient_sync(micro):
                backward(self.strategy.forward(images), images, scale)
        return bool(self.strategy.has_overflow())


def backward(output: torch.Tensor, images: torch.Tensor, scale: float = 1) -> None:
    (output * images[:, :3] * scale).sum().backward()  # type: ignore[no-untyped-call]


def test_the_gradient_is_the_mean_of_the_shards_gradients() -> None:
    exact = Exact()
    net, reference, means = exact.net, copy.deepcopy(exact.net), []
    exact.step(2)  # of which nothing is left
    net.norm.reset_running_stats()
    exact.step()
    for images in exact.shards:
        reference.norm.reset_running_stats()
        backward(reference(images), images)
        means.append(reference.norm.running_mean.clone())
    for name, param in reference.named_parameters():
        expected = param.grad / 4 if param.grad is not None else torch.zeros_like(param)
        torch.testing.assert_close(net.get_parameter(name).grad, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(net.norm.running_mean, torch.stack(means).mean(0))
    assert net.norm.num_batches_tracked == 1, "counts one batch for each step"


def test_constants_and_frozen_statistics_stay_bit_for_bit_and_others_are_averaged() -> None:
    exact = Exact()
    net = exact.net
    net.norm.running_mean = torch.randn(3) * 1e-9  # smaller than 2^-36, the unit of averaged statistics
    net.norm.eval()
    expected = {name: old.clone() for name, old in net.named_buffers() if name != "centre"}
    assert [exact.step(), exact.step()] == [False, False]
    for name, old in expected.items():  # as bytes: NaN is not equal
        assert net.get_buffer(name).numpy().tobytes() == old.numpy().tobytes(), name
    torch.testing.assert_close(net.centre, 0.75 * torch.cat(exact.shards).mean(0))


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e12])
def test_an_overflow_is_noticed_and_cleared_at_the_next_step(scale: float) -> None:
    exact = Exact()
    assert [exact.step(), exact.step(scale)] == [False, True]
    # as on a GPU, where the host reads the flag a step later
    guard = DeviceLossGuard(exact.strategy, StepTimer(), "start again")
    assert not guard.agree(2, torch.tensor(1.0), [], is_asked=False)[0]
    optimizer = torch.optim.SGD(exact.net.parameters(), fused=True)
    guard.skip_bad_update(optimizer, has_scaler=False)
    assert optimizer.found_inf == 1, "the device skips the update"  # type: ignore[attr-defined]
    with pytest.raises(NotFiniteError, match="a gradient at step 2 is not finite, or larger than"):
        guard.sync()
    exact.net.norm.reset_running_stats()
    assert not exact.step()
