"""An update, what is saved of it and when: the loop in one process, without a launcher."""

from pathlib import Path
from typing import Any

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


def is_equal(one: Any, other: Any) -> bool:
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


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
    assert is_equal(contents["average"], state.ema.state_dict())
    resumed.state.load_dict(contents, is_main=True)
    for each in (trainer, resumed):
        loop.update_once(each, iter([batch_of(each, 2)]))
    assert is_equal(*(each.state.to_dict(each.state.totals) for each in (trainer, resumed)))
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


def saves(trainer: Trainer, correct: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the steps that a training saves, whose evaluations find that many correct images."""
    found = []

    def evaluate(trainer: Trainer) -> Evaluated:
        step = trainer.state.step
        evaluation = Evaluation(step, 10, 10, correct[step], 10, 0)
        return Evaluated(evaluation, None, [], is_best=trainer.state.add_evaluation(evaluation))  # type: ignore[arg-type]

    def update_once(trainer: Trainer, _: object) -> bool:
        trainer.state.step += 1
        return False

    monkeypatch.setattr(loop, "evaluate", evaluate)
    monkeypatch.setattr(loop, "update_once", update_once)
    monkeypatch.setattr(loop, "save", lambda trainer, **_: found.append(trainer.state.step))
    loop.train(trainer, iter(()))
    return found


def test_the_best_the_last_and_every_nth_step_are_saved(
    digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("checkpoint.every=4 steps", "evaluate.every=3 steps", "train.max_steps=10")
    correct = {3: 5, 6: 4, 9: 7, 10: 1}
    trainer = make_trainer(digits, *SMALL, *words)
    assert saves(trainer, correct, monkeypatch) == [3, 4, 8, 9, 10]
    trainer = make_trainer(digits, *SMALL, *words)
    trainer.state.step = 3  # a start that was stopped before it evaluated this step
    assert saves(trainer, correct, monkeypatch)[:2] == [3, 4], "the step is saved again with its evaluation"
