"""Exact validation: every image once, at any number of processes, and the run says so.

Why it is exact: batches are cut from the whole set in index order, so their contents do not depend on who computes them;
process r takes batches r, r + world, …; what each finds are integers (correct answers, losses in 2^-20), and integers add
in any order to the same. Nothing is padded.

A NaN or an infinity has no integer. An image whose logits are not finite is counted: it is a wrong answer, and it is in no
sum. The loss of one image counts at most `MAX_LOSS`, so no sum can overflow.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.config.schema import Config
from pipeline.data.batch import NO_LABEL, Batch
from pipeline.data.loader import EvalBatches, batches
from pipeline.data.sources import Images
from pipeline.data.transfer import to_device
from pipeline.group import Group
from pipeline.model.architectures import Normalise
from pipeline.parallel.strategy import autocast
from pipeline.plan import Resources
from pipeline.record.predictions import NO_PREDICTION, Predictions
from pipeline.train.state import Evaluation
from pipeline.train.step import LOSS_UNIT, MAX_LOSS

_CONFIDENCE_UNIT = 2**30


class EvalResult(NamedTuple):
    evaluation: Evaluation
    answers: Predictions
    defects: list[tuple[int, str]]
    """(sample id, reason) of each image that cannot be decoded."""


class Evaluator:
    """Judges a model on a split of images.

    predict: how all processes together do what `model` does alone (`Strategy.predictor`); None: each by itself.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Images,
        config: Config,
        resources: Resources,
        group: Group,
        predict: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.images = images
        self._model = model
        self._predict = predict
        self._data = EvalBatches(images, config)
        self._config = config
        self._resources = resources
        self._group = group
        self._normalise = Normalise(group.device, channels_last=config.model.channels_last)
        self._size = config.evaluate.size or config.augment.size

    def evaluate(self, step: int, asked_to_stop: Callable[[], bool]) -> EvalResult | None:
        """The judgement of the model, which is that of `step`; None at all processes if one is asked to stop meanwhile.

        OutageError at all processes if the images of one are out of reach.
        """
        group, device = self._group, self._group.device
        mine = range(group.rank, len(self._data), group.size)
        loaded = to_device(batches(self._data, mine, self._resources, pin=device.type == "cuda"), device)
        counts = torch.zeros(5, dtype=torch.int64, device=device)
        # each image's label + 1, predicted class and confidence: one process writes it, so the sum is what it wrote
        answers = torch.zeros((3, len(self.images)), dtype=torch.int64, device=device)
        defects: list[tuple[int, str]] = []
        in_training = [module for module in self._model.modules() if module.training]  # what is frozen is not
        self._model.eval()
        try:
            with torch.inference_mode(), autocast(device, self._config):
                for _ in range(-(-len(self._data) // group.size)):
                    batch = next(loaded, None)
                    if batch is not None:
                        counts += self._judge(batch, answers)
                        defects += batch.defects
                    elif self._predict:  # the others want this process's part of the model
                        self._predict(torch.empty((0, 3, self._size, self._size), device=device))
                    outage = batch.outage if batch else None
                    stop, out_of_reach = group.any_rank(asked_to_stop(), outage is not None)
                    if out_of_reach:
                        group.raise_together(outage)
                    if stop:
                        return None
        finally:
            for module in in_training:
                module.training = True
        images, correct1, correct5, loss_sum, not_finite = group.all_reduce(counts).tolist()
        everyones = sorted(defect for part in group.all_gather(defects) for defect in part)
        evaluation = Evaluation(step, images, len(self.images), correct1, correct5, loss_sum, not_finite)
        labels, predicted, confidence = group.all_reduce(answers).numpy()
        said = Predictions(
            (labels - 1).astype(np.int32),
            predicted.astype(np.int32),
            (confidence / _CONFIDENCE_UNIT).astype(np.float32),
        )
        return EvalResult(evaluation, said, everyones)

    def _judge(self, batch: Batch, answers: Tensor) -> Tensor:
        """[images, right at first, right within five, loss in 2^-20, images with logits not finite] int64 on the device;
        fills in the batch's answers."""
        labels = batch.labels.to(self._group.device, non_blocking=True)
        logits: Tensor = (self._predict or self._model)(self._normalise(batch.images)).float()
        finite = logits.isfinite().all(1)
        best = logits.topk(min(5, logits.shape[1]), 1).indices
        ranked = (best == labels[:, None]) & finite[:, None]
        predicted = best[:, 0].where(finite, NO_PREDICTION)
        confidence = logits.softmax(1).amax(1).where(finite, 0).double().mul(_CONFIDENCE_UNIT).to(torch.int64)
        first = int(batch.ids[0])
        answers[:, first : first + len(labels)] = torch.stack([labels + 1, predicted, confidence])
        losses = functional.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="none")
        too_large = finite & ~(losses <= MAX_LOSS)
        summed = labels.where(finite & ~too_large, NO_LABEL)
        loss = functional.cross_entropy(logits, summed, ignore_index=NO_LABEL, reduction="sum")
        loss_sum = (loss.double() * LOSS_UNIT).round().to(torch.int64) + too_large.sum() * (MAX_LOSS * LOSS_UNIT)
        images = torch.full((), len(labels), dtype=torch.int64, device=labels.device)
        return torch.stack([images, ranked[:, 0].sum(), ranked.sum(), loss_sum, (~finite).sum()])
