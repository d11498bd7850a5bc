"""An update, its mix and its average, and what is saved of it: the loop in one process.

A non-finite loss makes no update, even if the host learns of it a step later, as on a GPU.
"""

from pathlib import Path

import pytest
import torch
from streams import make_trainer
from timm.optim import Muon
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from pipeline.addons.models.timm_optimizers import batched
from pipeline.config.sections import Augment, Train
from pipeline.data.batch import Batch, Defect
from pipeline.data.interface import OutageError
from pipeline.data.loader import TrainBatches
from pipeline.data.mix import draw_mix, mix_images, own_label_weights, swap_partners
from pipeline.errors import NotFiniteError
from pipeline.guards.nonfinite import DeviceLossGuard, LossGuard
from pipeline.model.ema import MovingAverage, make_ema
from pipeline.model.loss import Targets, classification_loss
from pipeline.record.checkpoint import copy_to_host
from pipeline.train import loop
from pipeline.train.evaluation import Evaluation
from pipeline.train.listener import Evaluated, Listener
from pipeline.train.loop import Trainer
from pipeline.train.records import Records

SMALL = ("model.arch=shufflenet_v2_x0_5", "batch.global=24", "schedule.warmup=0")


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


def test_muon_iterates_on_gpus_once_for_all_matrices_of_a_shape() -> None:
    shapes = [(8, 4, 3, 3), (8, 4, 3, 3), (8, 36), (16, 8), (8,)]
    start = [torch.randn(shape) for shape in shapes]
    found, products = [], []
    for kind in (Muon, batched(Muon)):
        weights = [nn.Parameter(weight.clone()) for weight in start]
        optimizer = kind([{"params": weights[:-1], "weight_decay": 0.1}, {"params": weights[-1:]}], lr=0.1)
        for step in range(3):
            for weight, like in zip(weights, start, strict=True):
                weight.grad = like.roll(step).clone()
            with torch.profiler.profile() as profile:  # the first step is timm's
                optimizer.step()
        names = [event.name for event in profile.events()]
        products.append(names.count("aten::addmm") + names.count("aten::baddbmm"))
        found.append(weights)
    assert products == [15 * 4, 15 * 2]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3)


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


class Reports(Listener):
    """Keeps each report's step, loss and learning rate."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, ...]] = []

    def reported(self, step: int, metrics: dict[str, float], best: Evaluation | None) -> None:
        self.rows.append((step, metrics["train/loss"], metrics["train/lr"]))


class Run:
    """A run on the CPU that trains on one batch with LossGuard or DeviceLossGuard."""

    def __init__(self, digits: Path, *words: str, on_device: bool = False) -> None:
        self.trainer = make_trainer(digits, *SMALL, "track.every=1 step", *words)
        self.state, self.batch = self.trainer.state, batch_of(self.trainer, 0)
        if on_device:
            timer = self.trainer.process.timer
            self.state.loss_guard = DeviceLossGuard(self.state.strategy, timer, "start again")

    def step(self, *, with_nan: bool = False) -> bool:
        """Train one step; return True, without an update, if the guard found a bad loss."""
        step, guard = self.trainer.step, self.state.loss_guard
        loss = step.forward_backward(iter([self.batch]))
        # gradients stay finite: only the guard can stop the update
        loss = loss * torch.nan if with_nan else loss
        try:
            guard.agree(self.state.step + 1, loss, step.used, is_asked=False)
        except NotFiniteError as error:
            self.error = str(error)
            return True
        step.apply_gradients()
        return False

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
    assert run.error.startswith("the loss is nan at step 2 on rank 0 (sample ids ")
    for reader in (
        lambda: run.state.confirm_step(),
        lambda: run.state.to_dict(run.state.totals),
        lambda: run.trainer.metrics.after_update(run.state, []),
        lambda: loop.evaluate(run.trainer),
        lambda: loop.save(run.trainer, is_last=True),
    ):
        with pytest.raises(NotFiniteError, match="the loss is nan at step 2 on rank 0"):
            reader()


def test_the_device_guard_tells_of_bad_images_and_of_an_outage_one_step_later(digits: Path) -> None:
    run = Run(digits, "data.max_bad=1", "track.every=9 steps", "run.trace=false", on_device=True)
    trainer, known = run.trainer, run.state.bad_images
    bad, worse = (run.batch._replace(defects=[Defect(sample, "empty file")]) for sample in (7, 8))
    loop.update_once(trainer, iter([bad]))
    assert not known
    loop.update_once(trainer, iter([worse]))
    assert list(known) == [7]
    loop.save(trainer, is_last=True)
    assert list(known) == [7, 8], "a checkpoint has those of its step"
    loop.update_once(trainer, iter([run.batch._replace(outage=OutageError("the data is away"))]))
    with pytest.raises(OutageError, match="the data is away"):
        loop.update_once(trainer, iter(()))  # it waits for no other batch


def test_a_report_that_is_made_a_step_later_says_the_same(digits: Path) -> None:
    runs = Run(digits), Run(digits, on_device=True)
    runs[1].trainer.metrics.is_late = True  # as on a GPU
    told = [Reports(), Reports()]
    for run, reports in zip(runs, told, strict=True):
        run.trainer.records = Records([reports])
        for step in (1, 2, 3):
            loop.update_once(run.trainer, iter([run.batch]))
            assert len(reports.rows) == step - (run is runs[1])
        loop.save(run.trainer, is_last=True)
        assert len(reports.rows) == 3, "a checkpoint has no totals that are reported again"
        assert not run.state.totals.any()
        loop.update_once(run.trainer, iter([run.batch]))
        loop.evaluate(run.trainer)
    assert told[0].rows == told[1].rows
    assert [step for step, *_ in told[0].rows] == [1, 2, 3, 4]


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
    assert "the loss is nan at step 1 on rank 0" in run.error


def mixed(options: Augment) -> tuple[torch.Tensor, ...]:
    """Return 64 mixed images, each of which is its number, their numbers, and label weights."""
    mix, numbers = draw_mix(options, 1, 7, 0, 64), torch.arange(64.0).view(-1, 1, 1, 1)
    seen = mix_images(numbers.expand(-1, 3, 32, 48).contiguous(), mix)
    return seen, numbers, own_label_weights(mix, 32, 48)


def test_mixup_is_the_weighted_sum_of_both_images() -> None:
    seen, numbers, weights = mixed(Augment(mixup=0.4))
    own = weights.view(-1, 1, 1, 1)
    expected = own * numbers + (1 - own) * swap_partners(numbers)
    torch.testing.assert_close(seen, expected.expand_as(seen))
    assert torch.equal(weights[0::2], weights[1::2]), "both of a pair share the draw"
    assert 0.3 < float(weights.mean()) < 0.7


def test_the_label_weights_of_cutmix_are_the_shares_of_the_pixels() -> None:
    seen, numbers, weights = mixed(Augment(cutmix=1.0))
    own = (seen == numbers).float().mean((1, 2, 3))
    torch.testing.assert_close(weights, own)
    assert ((seen == numbers) | (seen == swap_partners(numbers))).all()
    assert float(own.std()) > 0.1


def test_the_mix_depends_on_the_position_in_the_global_batch() -> None:
    options = Augment(mixup=0.2, cutmix=1.0)
    whole = draw_mix(options, 3, 5, 0, 48)
    assert torch.equal(whole, torch.cat([draw_mix(options, 3, 5, first, 12) for first in range(0, 48, 12)]))
    assert not torch.equal(whole, draw_mix(options, 3, 6, 0, 48))
    assert draw_mix(Augment(), 3, 5, 0, 48).shape == (0, 5)
    is_mixup = (draw_mix(options, 3, 0, 0, 400)[:, 1:] == torch.tensor([0.0, 0, 1, 1])).all(1)
    assert 120 < int(is_mixup.sum()) < 280, "each pair gets one of both"


def test_the_loss_of_a_mix_equals_the_loss_of_its_soft_target() -> None:
    mix = draw_mix(Augment(mixup=0.4, cutmix=1.0), 1, 7, 0, 16)
    own, labels = own_label_weights(mix, 32, 48), torch.arange(16) % 10
    logits = torch.randn(16, 10, generator=torch.Generator().manual_seed(0))
    one_hot = functional.one_hot(labels, 10).float()
    soft = own[:, None] * one_hot + (1 - own[:, None]) * swap_partners(one_hot)
    found = classification_loss(
        logits, Targets(labels, swap_partners(labels), own), Train(label_smoothing=0.1)
    )
    torch.testing.assert_close(found, functional.cross_entropy(logits, soft, label_smoothing=0.1))


def test_the_ema_follows_its_decay_and_moves_faster_at_first() -> None:
    model = nn.BatchNorm1d(3)
    ema = make_ema(model)
    average = MovingAverage(ema, model, 0.9)
    expected = [tensor.double() for tensor in ema.state_dict().values()]
    for step in range(1, 101):
        for tensor in model.state_dict().values():
            tensor.add_(1)
        model.running_mean = model.running_mean.clone()  # as a module may: a new tensor
        average.update(step)
        rate = 1 - min(0.9, (1 + step) / (10 + step))
        new = model.state_dict().values()
        expected = [mean + rate * (tensor - mean) for mean, tensor in zip(expected, new, strict=True)]
    for tensor, mean in zip(ema.state_dict().values(), expected, strict=True):
        exact = mean if tensor.is_floating_point() else torch.tensor(100.0).double()  # counters are copied
        torch.testing.assert_close(tensor.double(), exact, rtol=1e-5, atol=0)
