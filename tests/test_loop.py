"""An update, what is saved of it and when: the loop in one process, without a launcher.

A non-finite loss makes no update, even if the host learns of it a step later, as on a GPU.
"""

from pathlib import Path

import pytest
import torch
from streams import make_trainer
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from pipeline.data.batch import Batch
from pipeline.data.interface import OutageError
from pipeline.data.loader import TrainBatches
from pipeline.errors import NotFiniteError
from pipeline.guards.nonfinite import DeviceLossGuard, LossGuard
from pipeline.record.checkpoint import copy_to_host
from pipeline.train import loop
from pipeline.train.evaluation import Evaluation
from pipeline.train.listener import Evaluated
from pipeline.train.loop import Trainer

SMALL = ("model.arch=shufflenet_v2_x0_5", "batch.global=24", "schedule.warmup=0", "track.every=1 step")


def batch_of(trainer: Trainer, position: int) -> Batch:
    job = trainer.job
    return TrainBatches(job.source.train, job.config, job.plan, 0)[position]


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("optimizer", ["sgd", "lamb"])
def test_a_resumed_state_makes_the_same_update(digits: Path, optimizer: str) -> None:
    words = ("train.ema=0.5", f"optimizer.name={optimizer}")
    trainer, resumed = (make_trainer(digits, *SMALL, *words) for _ in range(2))
    for group in trainer.state.optimizer.param_groups + resumed.state.optimizer.param_groups:
        group["foreach"] = optimizer == "lamb"  # as on a GPU
    state, before = trainer.state, weights(trainer.state.model)
    for position in range(2):
        loop.update_once(trainer, iter([batch_of(trainer, position)]))
    state.bad_images[7] = "empty file"
    assert state.ema
    moved = [(weights(model) - before).norm() for model in (state.ema, state.model)]
    assert 0 < moved[0] < moved[1], "it follows"
    contents = copy_to_host(state.to_dict(state.totals))
    for found, expected in zip(contents["average"].values(), state.ema.state_dict().values(), strict=True):
        assert torch.equal(found, expected)
    resumed.state.load_dict(contents, is_main=True)
    for each in (trainer, resumed):
        loop.update_once(each, iter([batch_of(each, 2)]))
    ours, theirs = (tree_leaves(each.state.to_dict(each.state.totals)) for each in (trainer, resumed))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert (state.step, state.totals[2]) == (3, 72)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_true_gradient_is_clipped(digits: Path, precision: str) -> None:
    plain = ("optimizer.momentum=0", "optimizer.nesterov=false", "optimizer.weight_decay=0")
    trainer = make_trainer(digits, *SMALL, *plain, "train.clip=0.01", f"train.precision={precision}")
    before = weights(trainer.state.model)
    change, step = torch.zeros(()), -1
    while not change and step < 20:  # fp16 leaves the first updates out, which overflow
        step += 1
        loop.update_once(trainer, iter([batch_of(trainer, step)]))
        change = (weights(trainer.state.model) - before).norm()
    assert float(change) == pytest.approx(0.01 * trainer.job.plan.learning_rate(step), rel=0.01)


def test_images_that_could_not_be_read_are_not_trained_on(digits: Path) -> None:
    trainer = make_trainer(digits, *SMALL)
    before = weights(trainer.state.model)
    away = batch_of(trainer, 0)._replace(outage=OutageError("the data is away", "wait for it"))
    with pytest.raises(OutageError, match="the data is away"):
        loop.update_once(trainer, iter([away]))
    assert torch.equal(weights(trainer.state.model), before)


@pytest.mark.parametrize("first", [0, 3])  # 3 was saved without its evaluation, and is saved again
def test_which_steps_are_saved(digits: Path, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    every = ("checkpoint.every=4 steps", "evaluate.every=3 steps", "train.max_steps=10")
    trainer = make_trainer(digits, *SMALL, *every)
    trainer.state.step = first
    correct, saved = {3: 5, 6: 4, 9: 7, 10: 1}, []

    def evaluate(trainer: Trainer) -> Evaluated:
        step = trainer.state.step
        evaluation = Evaluation(step, 10, 10, correct[step], 10, 0)
        return Evaluated(evaluation, None, [], is_best=trainer.state.add_evaluation(evaluation))  # type: ignore[arg-type]

    def update_once(trainer: Trainer, _: object) -> bool:
        trainer.state.step += 1
        return False

    monkeypatch.setattr(loop, "evaluate", evaluate)
    monkeypatch.setattr(loop, "update_once", update_once)
    monkeypatch.setattr(loop, "save", lambda trainer, **_: saved.append(trainer.state.step))
    loop.train(trainer, iter(()))
    assert saved == [3, 4, 8, 9, 10]


class Run:
    """A run on the CPU that trains on one batch with LossGuard or DeviceLossGuard."""

    def __init__(self, digits: Path, *words: str, on_device: bool = False) -> None:
        self.trainer = make_trainer(digits, *SMALL, *words)
        self.state, self.batch = self.trainer.state, batch_of(self.trainer, 0)
        if on_device:
            timer = self.trainer.process.timer
            self.state.loss_guard = DeviceLossGuard(self.state.strategy, timer, "start again")

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
        tensors = tree_leaves([*self.state.model.parameters(), *self.state.optimizer.state.values()])
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
