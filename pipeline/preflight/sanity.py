"""`pipeline doctor --sanity`: a recipe tried on one's own data, after Karpathy, "A Recipe for Training Neural Networks"
(2019): three short trials that end otherwise than they should where labels, loss or model are wired wrongly.

They take a few images and steps of their own (AdamW at a small rate, no schedule), since they ask about the wiring and not
about the recipe's accuracy, and leave nothing behind.
"""

import math
from collections.abc import Callable, Iterator
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
from pipeline.model.architectures import Normalise, build
from pipeline.plan import Plan
from pipeline.randomness import generator, seed_network
from pipeline.world import World

_IMAGES = 32
_STEPS = 60
_RATE = 1e-3
_BY_HEART = 0.1
"""Of the loss of a guess: what one batch must come down to."""
_SIGMAS = 4
_EVALUATED = 8


def trials(config: Config, plan: Plan, source: Source, here: World) -> Iterator[tuple[str, Callable[[], str]]]:
    """(name, trial): each trial returns a line, or raises a RequestError with a remedy."""
    sane = _Sanity(config, plan, source, here)
    yield "first loss", sane.first_loss
    yield "one batch", sane.one_batch
    yield "shuffled", sane.shuffled_labels


class _Sanity:
    def __init__(self, config: Config, plan: Plan, source: Source, here: World) -> None:
        self._config = config
        self._source = source
        self._classes = plan.num_classes
        self._guess = math.log(plan.num_classes)
        self._device = choose_device(config, here)
        self._normalise = Normalise(self._device, channels_last=config.model.channels_last)
        few = replace(plan, micro_batch=min(_IMAGES, plan.global_batch), accumulate=1)
        self._batches = TrainBatches(source.train, config, few, 0)

    def first_loss(self) -> str:
        """A model that knows nothing guesses: its loss is ln(classes)."""
        model, (images, labels) = self._model(), self._batch(0)
        with torch.no_grad():
            loss = float(functional.cross_entropy(model(images), labels))
        if not 0.5 * self._guess < loss < 2 * self._guess + 1:
            raise RequestError(
                f"the first loss is {loss:.2f}, of a guess among {self._classes:,} classes it would be {self._guess:.2f}:"
                " look at model.init, at the last layer and at the labels"
            )
        return f"{loss:.2f}, of a guess {self._guess:.2f}"

    def one_batch(self) -> str:
        """What cannot learn a few images by heart cannot learn."""
        model, (images, labels) = self._model(), self._batch(0)
        first, last = self._train(model, lambda _: (images, labels))
        if not last <= _BY_HEART * self._guess:  # NaN is not learnt either
            raise RequestError(
                f"{len(labels)} images are not learnt by heart in {_STEPS} steps, loss {first:.2f} -> {last:.2f}: lower"
                " augment.* (report/augmentation.png of a run shows what is left of the images), then look at the labels"
            )
        return f"{len(labels)} images learnt by heart: loss {first:.2f} -> {last:.2f}"

    def shuffled_labels(self) -> str:
        """Labels that say nothing teach nothing about other images."""
        model, draw = self._model(), generator(self._config.run.seed, "sanity")

        def batch(step: int) -> tuple[Tensor, Tensor]:
            images, labels = self._batch(step)
            return images, _shuffled(labels, draw)

        self._train(model, batch)
        right, labels = self._validate(model)
        total = len(labels)
        share = float(labels.bincount().max()) / total  # what one answer to everything has right
        limit = share + _SIGMAS * math.sqrt(share * (1 - share) / total)
        if right / total > limit:
            raise RequestError(
                f"trained on shuffled labels, the model has {right} of {total} held-out images right, more than a guess"
                f" ({share:.1%}): something besides the picture tells the label; look for images in both splits"
            )
        return f"{right} of {total} held-out images right, a guess has {share:.0%}"

    def _model(self) -> nn.Module:
        seed_network(self._config.run.seed, "sanity")
        return build(self._config.model, self._classes).to(self._device).train()

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        batch = self._batches[step % self._batches.plan.total_steps]
        if batch.outage:
            raise batch.outage
        return self._normalise(batch.images), batch.labels.to(self._device)

    def _train(self, model: nn.Module, batch: Callable[[int], tuple[Tensor, Tensor]]) -> tuple[float, float]:
        """First and last loss."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
        losses = []
        for step in range(_STEPS):
            images, labels = batch(step)
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses[0], losses[-1]

    def _validate(self, model: nn.Module) -> tuple[int, Tensor]:
        """Held-out images that the model has right, and the labels of those that were judged: batches from all over."""
        data = EvalBatches(self._source.val, self._config)
        right, judged = 0, []
        model.eval()
        with torch.inference_mode():
            for position in range(0, len(data), max(1, len(data) // _EVALUATED)):
                batch = data[position]
                if batch.outage:
                    raise batch.outage
                right += int((model(self._normalise(batch.images)).argmax(1).cpu() == batch.labels).sum())
                judged.append(batch.labels[batch.labels != NO_LABEL])
        return right, torch.cat(judged)


def _shuffled(labels: Tensor, draw: torch.Generator) -> Tensor:
    return labels[torch.randperm(len(labels), generator=draw).to(labels.device)]
