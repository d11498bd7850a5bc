"""Several labels a picture: the targets of training, and the figures of a validation.

Elsewhere a label is one integer, the number of a set of classes (`Source.label_sets`). Only here it
becomes a row of a matrix.

Promise: a validation is as exact as `evaluator` says. An image gives integers: its loss, and the
probability of each class in 2^-30. The figures follow from them, as scikit-learn defines them:

- `average_precision_score` of each class. `map` is the mean of the classes that have an image.
- `f1_score` of each class at its threshold, the best for these images: halfway between two
  probabilities; of equals the highest. `f1` is the mean of the same classes. The threshold of a
  class without an image is 0.5.
- `subset`, `accuracy_score` at 0.5: all labels of an image must be right.

An image that cannot be decoded has no target: it is a wrong answer, and in no other figure. If the
logits of an image are not finite, its probabilities count as 0, and the answer as wrong.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pipeline.addons.models.evaluator import IMAGE_LOSS_UNIT
from pipeline.addons.report.predictions import ClassPrecisions
from pipeline.data.batch import NO_LABEL, Batch
from pipeline.data.interface import Source
from pipeline.group import Group
from pipeline.train.evaluation import CONFIDENCE_UNIT, LOSS_UNIT, MAX_LOSS, NO_PREDICTION, Evaluation


def class_matrix(source: Source) -> NDArray[np.bool_]:
    """Return the classes of each label, [sets, classes]."""
    matrix = np.zeros((len(source.label_sets), len(source.classes)), np.bool_)
    for row, labels in zip(matrix, source.label_sets, strict=True):
        row[[*labels]] = True
    return matrix


def with_targets(batches: Iterator[Batch], source: Source, device: torch.device) -> Iterator[Batch]:
    """Return the batches; with several labels, with targets [B, classes] in place of the labels."""
    if not source.label_sets:
        return batches
    targets = torch.from_numpy(class_matrix(source)).float().to(device)
    return (batch._replace(labels=targets[batch.labels]) for batch in batches)


class Scores:
    """The probabilities of a validation: 4 bytes for each image and class, on each host."""

    def __init__(self, source: Source, device: torch.device) -> None:
        self._matrix = class_matrix(source)
        self._targets = torch.from_numpy(self._matrix).double().to(device)
        self._units = torch.zeros((len(source.classes), len(source.val)), dtype=torch.int32)

    def add(self, batch: Batch, views: list[Tensor]) -> Tensor:
        """Keep the probabilities of a batch. Return a column for each image, [7, B] int64.

        Its rows are those of `Evaluator._count`, as far as they have a meaning.
        """
        labels, first = batch.labels, int(batch.ids[0])
        logits = torch.stack(views).mean(0).double()
        finite = logits.isfinite().all(1)
        units = logits.sigmoid().where(finite[:, None], 0).mul(CONFIDENCE_UNIT).round()
        self._units[:, first : first + len(labels)] = units.T.to("cpu", torch.int32)
        targets = self._targets[labels]  # that of NO_LABEL, the last one, is not used
        losses = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(1)
        losses = losses.where(finite & (labels != NO_LABEL), 0).clamp(max=MAX_LOSS)
        columns = torch.zeros((7, len(labels)), dtype=torch.int64, device=labels.device)
        columns[0], columns[1], columns[2] = 1, labels + 1, ~finite * NO_PREDICTION
        columns[6] = losses.mul(IMAGE_LOSS_UNIT).round()
        return columns

    def figures(self, step: int, sums: NDArray[np.int64], group: Group) -> tuple[Evaluation, ClassPrecisions]:
        """Return the figures, and those of each class. sums: the columns of all images."""
        seen, labels, predicted, *_, losses = sums
        labels = labels - 1
        known = labels != NO_LABEL
        right = known & (predicted != NO_PREDICTION)
        classes = []
        for has_class, units in zip(self._matrix.T, self._units, strict=True):
            # a class at a time, as sums are of int64
            probabilities = group.all_reduce(units.long()).numpy()
            positive = has_class[labels]
            right &= (probabilities >= CONFIDENCE_UNIT // 2) == positive
            classes.append(class_figures(positive[known], probabilities[known]))
        precisions, f1s, thresholds = zip(*classes, strict=True)
        images = self._matrix[labels[known]].sum(0)
        loss_sum, count = sum(losses.tolist()), int((images > 0).sum())
        evaluation = Evaluation(
            step,
            images=int(seen.sum()),
            total=len(labels),
            correct1=int(right.sum()),
            correct5=0,
            loss_sum=loss_sum * LOSS_UNIT // IMAGE_LOSS_UNIT,
            not_finite=int((predicted == NO_PREDICTION).sum()),
            nll=loss_sum / IMAGE_LOSS_UNIT / max(1, int(known.sum())),
            classes=count,
            map=math.fsum(precisions) / max(1, count),
            f1=math.fsum(f1s) / max(1, count),
            thresholds=[*thresholds],
        )
        return evaluation, ClassPrecisions(np.array(precisions), images)


def class_figures(positive: NDArray[np.bool_], units: NDArray[np.int64]) -> tuple[float, float, float]:
    """Return average precision, best F1 and its threshold of a class; 0, 0, 0.5 without an image.

    positive: [N], the images of the class. units: [N], their probabilities in 2^-30.
    """
    if not positive.any():
        return 0.0, 0.0, 0.5
    order = np.argsort(-units, kind="stable")
    ordered = units[order]
    # images of equal probability are on the same side of any threshold
    ends = np.append(np.flatnonzero(np.diff(ordered)), len(ordered) - 1)
    found, chosen = np.cumsum(positive[order])[ends], ends + 1
    precision = math.fsum(np.diff(found, prepend=0) / found[-1] * (found / chosen))
    f1 = 2 * found / (chosen + found[-1])
    best = int(np.argmax(f1))
    lower = ordered[ends[best] + 1] if best + 1 < len(ends) else 0
    return precision, float(f1[best]), float(ordered[ends[best]] + lower) / 2 / CONFIDENCE_UNIT
