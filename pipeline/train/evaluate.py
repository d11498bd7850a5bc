"""Exact validation: every image once, with any number of processes.

Why it is exact: batches are cut from the whole set in index order, so their contents do not depend
on which process evaluates them. Process r evaluates batches r, r + world, …. The results are
integers (correct per_image, losses in 2^-20), whose sum is the same in any order. Nothing is
padded.

On GPUs this holds with one GPU model and version of the software. cuDNN then chooses its kernels by
the shapes of a batch. Benchmarking them, as training does, could choose others in each process.

NaN and infinity have no integer. An image whose logits are not finite is counted: it is a wrong
answer, and it is in no sum. The loss of one image counts at most `MAX_LOSS`, so no sum can
overflow.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.config.schema import Config
from pipeline.data.augment import evaluation_geometry
from pipeline.data.batch import NO_LABEL, Batch
from pipeline.data.loader import EvalBatches, batches
from pipeline.data.sources import Images
from pipeline.data.transfer import to_device
from pipeline.group import Group
from pipeline.model.architectures import Normalise
from pipeline.parallel.strategy import autocast
from pipeline.plan import Resources
from pipeline.record.predictions import NO_PREDICTION, Predictions
from pipeline.record.terminal import Terminal
from pipeline.train.state import LOSS_UNIT, MAX_LOSS, Evaluation

_CONFIDENCE_UNIT = 2**30


@contextmanager
def _fixed_kernels() -> Iterator[None]:
    """Use deterministic cuDNN kernels that are not chosen by a benchmark."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


class EvalResult(NamedTuple):
    evaluation: Evaluation
    predictions: Predictions
    defects: list[tuple[int, str]]
    """(sample id, reason) of each image that cannot be decoded."""
    failed_reads: Sequence[Sequence[int]] = ()
    """See `Batch.failed_reads`: those of this process."""


class Evaluator:
    """Evaluates a model on a split of images.

    predict: the function that all processes call together in place of `model`
    (`Strategy.make_predictor`), or None.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Images,
        config: Config,
        resources: Resources,
        group: Group,
        terminal: Terminal,
        predict: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.images = images
        self._model = model
        self._predict = predict
        self._data = EvalBatches(images, config)
        self._precision = config.train.precision
        self._resources = resources
        self._group = group
        self._terminal = terminal
        self._normalise = Normalise(group.device, channels_last=config.model.channels_last)
        self._size = evaluation_geometry(config.evaluate, config.augment)[0]

    def evaluate(self, step: int, asked_to_stop: Callable[[], bool]) -> EvalResult | None:
        """Return the model's result, or None in all processes if one is asked to stop.

        Raises OutageError in all processes if the images of one stay out of reach.
        """
        group, device = self._group, self._group.device
        mine = range(group.rank, len(self._data), group.size)
        loader = batches(self._data, mine, self._resources, pin=device.type == "cuda")
        loaded = to_device(loader, device)
        counts = torch.zeros(5, dtype=torch.int64, device=device)
        # each image's label + 1, predicted class and confidence: one process sets them, so their
        # sum is what it set
        per_image = torch.zeros((3, len(self.images)), dtype=torch.int64, device=device)
        defects: list[tuple[int, str]] = []
        failed_reads: list[Sequence[int]] = []
        in_training = [module for module in self._model.modules() if module.training]  # frozen modules are not
        self._model.eval()
        try:
            with torch.inference_mode(), _fixed_kernels(), autocast(device, self._precision):
                rounds = -(-len(self._data) // group.size)
                for done in range(1, rounds + 1):
                    batch = next(loaded, None)
                    if batch is not None:
                        counts += self._count(batch, per_image)
                        defects += batch.defects
                        failed_reads.append(batch.failed_reads)
                    elif self._predict:  # the other processes need this one's part of the model
                        self._predict(torch.empty((0, 3, self._size, self._size), device=device))
                    outage = batch.outage if batch else None
                    is_stopping, has_outage = group.any_rank(asked_to_stop(), outage is not None)
                    if has_outage:
                        group.raise_together(outage)
                    if is_stopping:
                        return None
                    self._terminal.progress(f"validation {done / rounds:4.0%}", f"{len(self.images):,} images")
        finally:
            loader.close()
            for module in in_training:
                module.training = True
        images, correct1, correct5, loss_sum, not_finite = group.all_reduce(counts).tolist()
        all_defects = sorted(defect for part in group.all_gather(defects) for defect in part)
        evaluation = Evaluation(step, images, len(self.images), correct1, correct5, loss_sum, not_finite)
        labels, predicted, confidence = group.all_reduce(per_image).numpy()
        predictions = Predictions(
            (labels - 1).astype(np.int32),
            predicted.astype(np.int32),
            (confidence / _CONFIDENCE_UNIT).astype(np.float32),
        )
        return EvalResult(evaluation, predictions, all_defects, failed_reads)

    def _count(self, batch: Batch, per_image: Tensor) -> Tensor:
        """Evaluate a batch, and set its columns of `per_image`, [3, images].

        Return [images, correct, correct within five, loss in 2^-20, images with logits not finite]
        int64 on the device.
        """
        labels = batch.labels
        logits: Tensor = (self._predict or self._model)(self._normalise(batch.images)).float()
        finite = logits.isfinite().all(1)
        top5 = logits.topk(min(5, logits.shape[1]), 1).indices
        correct = (top5 == labels[:, None]) & finite[:, None]
        predicted = top5[:, 0].where(finite, NO_PREDICTION)
        confidence = logits.softmax(1).amax(1).where(finite, 0).double().mul(_CONFIDENCE_UNIT).to(torch.int64)
        first = int(batch.ids[0])
        per_image[:, first : first + len(labels)] = torch.stack([labels + 1, predicted, confidence])
        losses = functional.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="none")
        too_large = finite & ~(losses <= MAX_LOSS)
        summed = labels.where(finite & ~too_large, NO_LABEL)
        loss = functional.cross_entropy(logits, summed, ignore_index=NO_LABEL, reduction="sum")
        loss_sum = (loss.double() * LOSS_UNIT).round().to(torch.int64) + too_large.sum() * (MAX_LOSS * LOSS_UNIT)
        images = torch.full((), len(labels), dtype=torch.int64, device=labels.device)
        return torch.stack([images, correct[:, 0].sum(), correct.sum(), loss_sum, (~finite).sum()])
