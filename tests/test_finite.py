"""A loss that is not finite updates nothing, also where the host learns of it a step later, as on a GPU."""

from pathlib import Path

import pytest
import torch
from streams import prepare

from pipeline.data.loader import TrainBatches
from pipeline.errors import NotFiniteError
from pipeline.group import Group
from pipeline.guards.nonfinite import GuardedLosses, Losses, watch_losses
from pipeline.model.architectures import build
from pipeline.parallel import choose
from pipeline.randomness import seed_network
from pipeline.telemetry.timing import Clock
from pipeline.train.state import TrainState
from pipeline.train.step import LOSS_UNIT, MAX_LOSS, Step
from pipeline.world import World


class Run:
    """A step on the CPU whose losses are looked at in either way."""

    def __init__(self, digits: Path, *words: str) -> None:
        config, plan, source = prepare(digits, 1, "model.arch=shufflenet_v2_x0_5", "batch.global=24", *words)
        group = Group(World(), torch.device("cpu"))
        seed_network(0, "weights")
        self.strategy = choose(config, plan, build(config.model, 10), group)
        self.state = TrainState.build(self.strategy, config)
        self.step = Step(self.state, self.strategy, config, plan, Clock())
        self.batch = TrainBatches(source.train, config, plan, 0)[0]

    def make(self, losses: Losses, *, poisoned: bool = False) -> bool:
        """One step; whether its look said that a loss was bad, in which case there is no update."""
        loss, used = self.step.forward_backward(iter([self.batch]))
        loss = loss * torch.nan if poisoned else loss  # its gradients are finite: the flag alone can stop the update
        bad = losses.look(self.state.step + 1, loss, used)
        if not bad:
            self.step.update(losses.guard)
        return bad

    def weights(self) -> list[torch.Tensor]:
        moments = [one for state in self.state.optimizer.state.values() for one in state.values()]
        return [one.detach().clone() for one in [*self.state.model.parameters(), *moments]]


@pytest.mark.parametrize("words", [(), ("optimizer.name=adamw",), ("train.precision=fp16",)])
def test_a_guarded_update_is_skipped_whole_and_told_of_a_step_later(digits: Path, words: tuple[str, ...]) -> None:
    run = Run(digits, *words)
    losses = GuardedLosses(run.strategy)
    assert not run.make(losses)
    before = run.weights()
    assert not run.make(losses, poisoned=True), "the host does not know yet"
    assert all(torch.equal(mine, their) for mine, their in zip(before, run.weights(), strict=True))
    assert run.make(losses)
    assert str(losses.failure()).startswith("the loss is nan at step 2 on rank 0 (sample ids ")
    with pytest.raises(NotFiniteError, match="at step 2 on rank 0"):
        losses.settle()


def test_what_is_reported_judged_or_saved_asks_first(digits: Path) -> None:
    run = Run(digits)
    losses = GuardedLosses(run.strategy)
    run.make(losses)
    losses.settle()
    run.make(losses, poisoned=True)
    with pytest.raises(NotFiniteError, match="the loss is nan at step 2 on rank 0"):
        losses.settle()


def test_a_guard_that_is_not_needed_changes_no_bit(digits: Path) -> None:
    runs = Run(digits), Run(digits)
    for run, losses in zip(runs, (watch_losses(runs[0].strategy), GuardedLosses(runs[1].strategy)), strict=True):
        for _ in range(2):
            run.make(losses)
    assert all(torch.equal(mine, their) for mine, their in zip(runs[0].weights(), runs[1].weights(), strict=True))


def test_no_loss_is_too_large_for_the_sum_of_a_report(digits: Path) -> None:
    run = Run(digits)
    with torch.no_grad():
        run.state.model.fc.weight.mul_(1e30)  # type: ignore[union-attr, operator]
    assert not run.make(watch_losses(run.strategy)), "it is finite"
    assert int(run.state.totals[0]) == 24 * MAX_LOSS * LOSS_UNIT


def test_on_a_cpu_it_is_known_before_the_update(digits: Path) -> None:
    run = Run(digits)
    losses = watch_losses(run.strategy)
    assert type(losses) is Losses
    assert run.make(losses, poisoned=True)
    assert "the loss is nan at step 1 on rank 0" in str(losses.failure())
