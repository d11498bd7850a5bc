"""An update, what is saved of it and when: the loop in one process, without a launcher."""

from pathlib import Path

import pytest
import torch
from streams import make_trainer
from torch import nn
from torch.utils._pytree import tree_leaves

from pipeline.data.batch import Batch
from pipeline.data.interface import OutageError
from pipeline.data.loader import TrainBatches
from pipeline.record.checkpoint import copy_to_host
from pipeline.train import loop
from pipeline.train.evaluation import Evaluation
from pipeline.train.listener import Evaluated
from pipeline.train.loop import Trainer

SMALL = ("model.arch=shufflenet_v2_x0_5", "batch.global=24", "schedule.warmup=0")


def batch_of(trainer: Trainer, position: int) -> Batch:
    job = trainer.job
    return TrainBatches(job.source.train, job.config, job.plan, 0)[position]


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_resumed_state_makes_the_same_update(digits: Path) -> None:
    trainer, resumed = (make_trainer(digits, *SMALL, "train.ema=0.5") for _ in range(2))
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
def test_the_best_the_last_and_every_nth_step_are_saved(
    digits: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
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
