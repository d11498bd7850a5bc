"""Exact validation: every image once, with any number of processes.

Why it is exact: batches are cut from the whole set in index order, so their contents do not depend
on which process evaluates them. Process r evaluates batches r, r + world, …. Each image gives
integers (is it right, its confidence in 2^-30, its loss in 2^-40). Every figure is a function of
these, and one process sets those of an image. Nothing is padded.

On GPUs this holds with one GPU model and version of the software. cuDNN then chooses its kernels by
the shapes of a batch. Benchmarking them, as training does, could choose others in each process.

NaN and infinity have no integer. An image whose logits are not finite is counted: it is a wrong
answer, and it is in no sum. The loss of one image counts at most `MAX_LOSS`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from pipeline.addons.datasets.resident_limits import validation_bytes
from pipeline.addons.models.eval_batches import EvalBatches, evaluation_geometry
from pipeline.addons.report.predictions import Predictions
from pipeline.config.schema import Config
from pipeline.data.batch import NO_LABEL, Batch
from pipeline.data.interface import Source
from pipeline.data.loader import batches
from pipeline.data.transfer import to_device
from pipeline.errors import BadImage
from pipeline.group import Group
from pipeline.lazy import addon
from pipeline.model.normalise import Normalise
from pipeline.parallel.strategy import autocast
from pipeline.plan import Resources
from pipeline.record.terminal import Terminal
from pipeline.train.evaluation import CONFIDENCE_UNIT, LOSS_UNIT, MAX_LOSS, NO_PREDICTION, Evaluation
from pipeline.train.listener import Evaluated

IMAGE_LOSS_UNIT = 2**40


class Evaluator:
    """Evaluates a model on the validation images.

    predict: the function that all processes call together in place of `model`
    (`Strategy.make_predictor`), or None.
    """

    def __init__(
        self,
        model: nn.Module,
        source: Source,
        config: Config,
        resources: Resources,
        group: Group,
        predict: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.images, self._source = source.val, source
        self._model, self._predict = model, predict
        self._data = EvalBatches(source.val, config)
        self._config, self._resources, self._group = config, resources, group
        # of a small set, the batches of the first evaluation serve the later ones
        self._kept: list[Batch] = []
        self._keeps = validation_bytes(config, len(source.val), group.size, group.device.type) > 0
        self._normalise = Normalise(group.device, config.model)

    def evaluate(self, step: int, terminal: Terminal, asked_to_stop: Callable[[], bool]) -> Evaluated | None:
        """Return the model's result, or None in all processes if one is asked to stop.

        Raises OutageError in all processes if the images of one stay out of reach.

        terminal: shows the progress.
        """
        group, device = self._group, self._group.device
        positions = range(group.rank, len(self._data), group.size)[len(self._kept) :]
        loader = batches(self._data, positions, self._resources, pin=device.type == "cuda")
        loaded = chain(tuple(self._kept), to_device(loader, device))
        several = addon("models.several_labels") if self._source.label_sets else None
        scores = several and several.Scores(self._source, device)
        # a column for each image, see `_count`
        counts = torch.zeros((7, len(self.images)), dtype=torch.int64, device=device)
        defects: list[tuple[int, str]] = []
        # frozen modules are not
        in_training = [module for module in self._model.modules() if module.training]
        self._model.eval()
        try:
            with torch.inference_mode(), _fixed_kernels(), autocast(device, self._config.train.precision):
                rounds = -(-len(self._data) // group.size)
                for done in range(1, rounds + 1):
                    batch = next(loaded, None)
                    if batch is not None:
                        if self._keeps and done > len(self._kept):
                            # a copy: the memory of a batch is its worker's, and used again
                            self._kept.append(batch._replace(images=batch.images.clone()))
                        first = int(batch.ids[0])
                        views = self._logits_of_views(self._normalise(batch.images))
                        count = scores.add if scores else self._count
                        counts[:, first : first + len(batch.ids)] = count(batch, views)
                        defects += batch.defects
                    elif self._predict:  # the other processes need this one's part of the model
                        size = evaluation_geometry(self._config.evaluate, self._config.augment)[0]
                        self._logits_of_views(torch.empty((0, 3, size, size), device=device))
                    outage = batch.outage if batch else None
                    is_stopping, has_outage = group.any_rank(asked_to_stop(), outage is not None)
                    if has_outage:
                        group.raise_together(outage)
                    if is_stopping:
                        return None
                    terminal.progress(f"validation {done / rounds:4.0%}", f"{len(self.images):,} images")
        finally:
            loader.close()
            for module in in_training:
                module.training = True
        found = sorted(defect for part in group.all_gather(defects) for defect in part)
        bad_images = [BadImage(sample, self.images.name(sample), reason) for sample, reason in found]
        # the sum over the processes is what one of them set
        totals = group.all_reduce(counts).numpy()
        figures = scores.figures(step, totals, group) if scores else self._figures(step, totals)
        evaluation, predictions = figures
        return Evaluated(evaluation, predictions, bad_images)

    def _figures(self, step: int, totals: NDArray[np.int64]) -> tuple[Evaluation, Predictions]:
        """Return the figures and the predictions. totals: the columns of all images."""
        seen, labels, predicted, top5, plain, confidence, losses = totals
        labels = labels - 1
        classes = labels.astype(np.int32), predicted.astype(np.int32)
        predictions = Predictions(*classes, confidence / CONFIDENCE_UNIT)
        loss_sum = sum(losses.tolist())  # Python's integers: it may exceed 2^63
        evaluation = Evaluation(
            step,
            images=int(seen.sum()),
            total=len(self.images),
            correct1=int(((predicted == labels) & (labels != NO_LABEL)).sum()),
            correct5=int(top5.sum()),
            loss_sum=loss_sum * LOSS_UNIT // IMAGE_LOSS_UNIT,
            not_finite=int((predicted == NO_PREDICTION).sum()),
            nll=loss_sum / IMAGE_LOSS_UNIT / max(1, int((labels >= 0).sum())),
            ece=predictions.calibration_error(),
            balanced_accuracy=predictions.balanced_accuracy(),
            classes=len(np.unique(labels[labels >= 0])),
            correct1_plain=int(plain.sum()) if self._config.evaluate.flip else None,
        )
        return evaluation, predictions

    def _count(self, batch: Batch, views: list[Tensor]) -> Tensor:
        """Return a column for each image of a batch, [7, B] int64 on the device.

        Its rows: 1, the label + 1, the predicted class, is the label among the first five, is the
        prediction right without the mirror image, the confidence, the loss.
        """
        labels = batch.labels
        logits = torch.stack(views).mean(0)
        finite = logits.isfinite().all(1)
        top5 = logits.topk(min(5, logits.shape[1]), 1).indices
        log_probabilities = logits.double().log_softmax(1)
        confidence = log_probabilities.amax(1).exp().where(finite, 0)
        losses = functional.nll_loss(log_probabilities, labels, ignore_index=NO_LABEL, reduction="none")
        losses = losses.where(finite, 0).clamp(max=MAX_LOSS)
        return torch.stack([
            torch.ones_like(labels),
            labels + 1,
            top5[:, 0].where(finite, NO_PREDICTION),
            (top5 == labels[:, None]).any(1) & finite,
            (views[0].argmax(1) == labels) & views[0].isfinite().all(1),
            confidence.mul(CONFIDENCE_UNIT).round().to(torch.int64),
            losses.mul(IMAGE_LOSS_UNIT).round().to(torch.int64),
        ])  # fmt: skip

    def _logits_of_views(self, images: Tensor) -> list[Tensor]:
        """Return the logits, [B, classes] float32, and with evaluate.flip those of mirror images.

        images: [B, 3, H, W], normalised.
        """
        predict = self._predict or self._model
        views = [images, images.flip(-1)] if self._config.evaluate.flip else [images]
        return [predict(view).float() for view in views]


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
