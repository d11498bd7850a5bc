"""Sanity checks for `pipeline doctor --sanity`: three short trainings on the user's own data.

They follow Karpathy, "A Recipe for Training Neural Networks" (2019): initial loss is about
ln(classes); one batch overfits; shuffled labels give chance accuracy. A check fails if labels, loss
or model are wired incorrectly. So they use few images, and steps of their own (AdamW at a small
learning rate, no schedule). They leave nothing behind.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.config.schema import Config
from pipeline.data.batch import NO_LABEL
from pipeline.data.loader import EvalBatches, TrainBatches
from pipeline.data.sources import Source
from pipeline.device import choose_device
from pipeline.errors import RequestError
from pipeline.model.architectures import build
from pipeline.model.normalise import Normalise
from pipeline.plan import Plan
from pipeline.randomness import generator, seed_network
from pipeline.world import World

_IMAGES = 32
_STEPS = 60
_LEARNING_RATE = 1e-3
_OVERFIT_LOSS = 0.1  # highest loss of an overfitted batch, as a fraction of ln(classes)
_SIGMAS = 4
_EVAL_BATCHES = 8


class SanityChecks:
    """The three checks. Each returns a line for the user, or raises RequestError."""

    def __init__(self, config: Config, plan: Plan, source: Source, here: World) -> None:
        self._config, self._classes = config, plan.num_classes
        self._chance_loss, self._total_steps = math.log(plan.num_classes), plan.total_steps
        self._device = choose_device(config, here)
        self._normalise = Normalise(self._device, channels_last=config.model.channels_last)
        small = replace(plan, micro_batch=min(_IMAGES, plan.global_batch), accumulate=1)
        self._batches = TrainBatches(source.train, config, small, 0)
        self._val_batches = EvalBatches(source.val, config)

    def check_initial_loss(self) -> str:
        """Check that an untrained model's loss is about that of a random guess, ln(classes)."""
        model, (images, labels) = self._build_model(), self._batch(0)
        with torch.no_grad():
            loss = float(functional.cross_entropy(model(images), labels))
        if not 0.5 * self._chance_loss < loss < 2 * self._chance_loss + 1:
            chance = f"a random guess among {self._classes:,} classes has {self._chance_loss:.2f}"
            remedy = "look at model.init, at the last layer and at the labels"
            raise RequestError(f"the initial loss is {loss:.2f}, but {chance}", remedy)
        return f"{loss:.2f}; a random guess has {self._chance_loss:.2f}"

    def check_one_batch_overfits(self) -> str:
        """Check that the model learns a single batch by heart."""
        images, labels = self._batch(0)
        loss = self._train(self._build_model(), lambda _: (images, labels))
        if not loss <= _OVERFIT_LOSS * self._chance_loss:  # also true for NaN
            problem = (
                f"the model does not overfit {len(labels)} images in {_STEPS} steps, to a loss of {loss:.2f}"
            )
            remedy = "lower augment.* (report/augmentation.png of a run shows what is left of the images)"
            raise RequestError(problem, f"{remedy}, then look at the labels")
        return f"the model overfits {len(labels)} images to a loss of {loss:.2f}"

    def check_shuffled_labels_give_chance(self) -> str:
        """Check that training on shuffled labels gives chance accuracy on validation images."""
        model, rng = self._build_model(), generator(self._config.run.seed, "sanity")

        def batch(step: int) -> tuple[Tensor, Tensor]:
            images, labels = self._batch(step)
            return images, _shuffled(labels, rng)

        self._train(model, batch)
        correct, labels = self._evaluate(model)
        total = len(labels)
        chance = (
            float(labels.bincount().max()) / total
        )  # accuracy of always answering the most frequent class
        if correct / total > chance + _SIGMAS * math.sqrt(chance * (1 - chance) / total):
            problem = f"trained on shuffled labels, the model classifies {correct} of {total} validation images right"
            reason = f"above chance ({chance:.1%}), so something other than the picture reveals the label"
            raise RequestError(f"{problem}, {reason}", "look for images that are in both splits")
        return f"{correct} of {total} validation images correct; chance is {chance:.0%}"

    def _build_model(self) -> nn.Module:
        seed_network(self._config.run.seed, "sanity")
        return build(self._config.model, self._classes).to(self._device).train()

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        batch = self._batches[step % self._total_steps].readable()
        return self._normalise(batch.images), batch.labels.to(self._device)

    def _train(self, model: nn.Module, batch: Callable[[int], tuple[Tensor, Tensor]]) -> float:
        """Train for a few steps; return the last loss."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
        for step in range(_STEPS):
            images, labels = batch(step)
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach())

    def _evaluate(self, model: nn.Module) -> tuple[int, Tensor]:
        """Return correct predictions and labels [N], for batches from all of validation."""
        count = len(self._val_batches)
        found = [self._val_batches[at].readable() for at in range(0, count, max(1, count // _EVAL_BATCHES))]
        with torch.inference_mode():
            predicted = [model.eval()(self._normalise(batch.images)).argmax(1).cpu() for batch in found]
        labels = torch.cat([batch.labels for batch in found])
        return int((torch.cat(predicted) == labels).sum()), labels[labels != NO_LABEL]


def _shuffled(labels: Tensor, rng: torch.Generator) -> Tensor:
    return labels[torch.randperm(len(labels), generator=rng).to(labels.device)]
