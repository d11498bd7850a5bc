"""A loss that is not finite updates nothing, also where the host learns of it a step later, as on a GPU."""

from pathlib import Path

import pytest
import torch
from streams import make_trainer

from pipeline.data.loader import TrainBatches
from pipeline.errors import NotFiniteError
from pipeline.guards.nonfinite import DeviceLossGuard, LossGuard
from pipeline.train import loop
from pipeline.train.state import LOSS_UNIT, MAX_LOSS
from pipeline.train.step import apply_gradients, forward_backward


class Run:
    """A run on the CPU that trains on one batch, with either guard."""

    def __init__(self, digits: Path, *words: str, on_device: bool = False) -> None:
        self.trainer = make_trainer(digits, "model.arch=shufflenet_v2_x0_5", "batch.global=24", *words)
        self.state = self.trainer.state
        if on_device:
            self.state.loss_guard = DeviceLossGuard(self.state.strategy, self.trainer.timer)
        self.batch = TrainBatches(self.trainer.train_images, self.trainer.config, self.trainer.plan, 0)[0]

    def step(self, *, poisoned: bool = False) -> bool:
        """Make one step.

        Return True if its check found a bad loss, in which case there is no update.
        """
        loss, used = forward_backward(self.trainer, iter([self.batch]))
        loss = loss * torch.nan if poisoned else loss  # its gradients are finite: the flag alone can stop the update
        is_bad = self.state.loss_guard.check(self.state.step + 1, loss, used)
        if not is_bad:
            apply_gradients(self.trainer)
        return is_bad

    def weights(self) -> list[torch.Tensor]:
        moments = [tensor for state in self.state.optimizer.state.values() for tensor in state.values()]
        return [tensor.detach().clone() for tensor in [*self.state.model.parameters(), *moments]]


@pytest.mark.parametrize("words", [(), ("optimizer.name=adamw",), ("train.precision=fp16",)])
def test_a_guarded_update_is_skipped_whole_and_noticed_a_step_later(digits: Path, words: tuple[str, ...]) -> None:
    run = Run(digits, *words, on_device=True)
    assert not run.step()
    before = run.weights()
    assert not run.step(poisoned=True), "the host does not know yet"
    assert all(torch.equal(mine, their) for mine, their in zip(before, run.weights(), strict=True))
    assert run.step()
    assert str(run.state.loss_guard.error()).startswith("the loss is nan at step 2 on rank 0 (sample ids ")
    with pytest.raises(NotFiniteError, match="at step 2 on rank 0"):
        run.state.loss_guard.sync()


def test_what_reports_evaluates_or_saves_a_step_asks_first(digits: Path) -> None:
    run = Run(digits, "track.every=1 step", on_device=True)
    run.step()
    assert run.state.confirmed_step == 1
    run.step(poisoned=True)
    for reader in (
        lambda: run.state.to_dict(run.state.totals),
        lambda: run.trainer.metrics.after_update(run.state),
        lambda: loop.evaluate(run.trainer),
        lambda: loop.save(run.trainer, is_last=True),
    ):
        with pytest.raises(NotFiniteError, match="the loss is nan at step 2 on rank 0"):
            reader()


def test_a_guard_that_is_not_needed_changes_no_bit(digits: Path) -> None:
    runs = Run(digits), Run(digits, on_device=True)
    for run in runs:
        for _ in range(2):
            run.step()
    assert all(torch.equal(mine, their) for mine, their in zip(runs[0].weights(), runs[1].weights(), strict=True))


def test_no_loss_is_too_large_for_the_sum_of_a_report(digits: Path) -> None:
    run = Run(digits)
    with torch.no_grad():
        run.state.model.fc.weight.mul_(1e30)  # type: ignore[union-attr, operator]
    assert not run.step(), "it is finite"
    assert int(run.state.totals[0]) == 24 * MAX_LOSS * LOSS_UNIT


def test_on_a_cpu_it_is_known_before_the_update(digits: Path) -> None:
    run = Run(digits)
    assert type(run.state.loss_guard) is LossGuard
    assert run.step(poisoned=True)
    assert "the loss is nan at step 1 on rank 0" in str(run.state.loss_guard.error())
