"""A non-finite loss makes no update, even if the host learns of it a step later, as on a GPU."""

from pathlib import Path

import pytest
import torch
from streams import make_trainer
from torch.distributed.tensor import DTensor

from pipeline.data.loader import TrainBatches
from pipeline.errors import NotFiniteError
from pipeline.guards.nonfinite import DeviceLossGuard, LossGuard
from pipeline.record.checkpoint import copy_to_host
from pipeline.train import loop


class Run:
    """A run on the CPU that trains on one batch with LossGuard or DeviceLossGuard."""

    def __init__(self, digits: Path, *words: str, on_device: bool = False) -> None:
        small = ("model.arch=shufflenet_v2_x0_5", "batch.global=24", "track.every=1 step")
        self.trainer = make_trainer(digits, *small, *words)
        self.state, job = self.trainer.state, self.trainer.job
        if on_device:
            timer = self.trainer.process.timer
            self.state.loss_guard = DeviceLossGuard(self.state.strategy, timer, "start again")
        self.batch = TrainBatches(job.source.train, job.config, job.plan, 0)[0]

    def step(self, *, with_nan: bool = False) -> bool:
        """Train one step; return True, without an update, if the guard found a bad loss."""
        step = self.trainer.step
        loss = step.forward_backward(iter([self.batch]))
        # gradients stay finite: only the guard can stop the update
        loss = loss * torch.nan if with_nan else loss
        is_bad = self.state.loss_guard.check(self.state.step + 1, loss, step.used)
        if not is_bad:
            step.apply_gradients()
        return is_bad

    def weights(self) -> list[torch.Tensor]:
        """Return copies of the parameters and the optimizer's state."""
        moments = [tensor for state in self.state.optimizer.state.values() for tensor in state.values()]
        tensors = [*self.state.model.parameters(), *moments]
        whole = [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        return [tensor.detach().clone() for tensor in whole]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "words", ["", "optimizer.name=adamw", "train.precision=fp16", "parallel=fsdp optimizer.name=adamw"]
)
def test_the_device_guard_skips_the_update_and_reports_it_one_step_later(digits: Path, words: str) -> None:
    run = Run(digits, *words.split(), on_device=True)
    assert not run.step()
    before = run.weights()
    assert not run.step(with_nan=True), "the host does not know yet"
    assert all(map(torch.equal, before, run.weights()))
    assert run.step()
    assert str(run.state.loss_guard.error()).startswith("the loss is nan at step 2 on rank 0 (sample ids ")
    for reader in (
        lambda: run.state.confirm_step(),
        lambda: run.state.to_dict(run.state.totals),
        lambda: run.trainer.metrics.after_update(run.state),
        lambda: loop.evaluate(run.trainer),
        lambda: loop.save(run.trainer, is_last=True),
    ):
        with pytest.raises(NotFiniteError, match="the loss is nan at step 2 on rank 0"):
            reader()


def test_the_device_guard_does_not_change_finite_steps(digits: Path) -> None:
    runs = Run(digits), Run(digits, on_device=True)
    for run in runs:
        assert [run.step(), run.step()] == [False, False]
    assert runs[1].state.confirm_step() == 2
    assert all(map(torch.equal, runs[0].weights(), runs[1].weights()))


def test_the_cpu_guard_finds_a_bad_loss_before_the_update(digits: Path) -> None:
    run = Run(digits)
    assert type(run.state.loss_guard) is LossGuard
    assert run.step(with_nan=True)
    assert "the loss is nan at step 1 on rank 0" in str(run.state.loss_guard.error())


def test_lamb_with_the_kernels_of_a_gpu_makes_the_same_step_and_resumes(digits: Path) -> None:
    """On a GPU, timm's LAMB updates all tensors of a group at once (`foreach`)."""
    one_by_one, at_once, resumed = (Run(digits, "optimizer.name=lamb") for _ in range(3))
    for run, foreach in ((one_by_one, False), (at_once, True), (resumed, True)):
        for group in run.state.optimizer.param_groups:
            group["foreach"] = foreach
    before = at_once.weights()
    one_by_one.step()
    at_once.step()
    assert not torch.equal(before[0], at_once.weights()[0])
    for expected, found in zip(one_by_one.weights(), at_once.weights(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    resumed.state.load_dict(copy_to_host(at_once.state.to_dict(at_once.state.totals)), is_main=True)
    at_once.step()
    resumed.step()
    assert all(map(torch.equal, at_once.weights(), resumed.weights()))
