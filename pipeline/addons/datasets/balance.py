"""Draws with `data.balance`: classes of unequal size, each as often as it says."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.data.order import Ids
from pipeline.plan import Plan


class Classes:
    """The images of each class, to draw from."""

    def __init__(self, labels: NDArray[np.int32], plan: Plan) -> None:
        """labels: [train_images], the class of each image."""
        self._labels = labels
        self._counts = np.bincount(labels)
        self._ends = np.cumsum(class_shares(plan.balance, self._counts.tolist()))
        self._starts = np.cumsum(self._counts) - self._counts
        self._images = np.argsort(labels, kind="stable")

    def samples(self, draws: NDArray[np.float64]) -> tuple[Ids, Ids]:
        """Return the samples of [2, N] draws in 0..1, and how often each has occurred before."""
        # the last sum may be a rounding below 1, and a class without an image has no share
        labels = np.minimum(np.searchsorted(self._ends, draws[0], side="right"), np.argmax(self._ends))
        within = (draws[1] * self._counts[labels]).astype(np.int64)
        samples: Ids = self._images[self._starts[labels] + within]
        return samples, _occurrences(samples)

    def images_like(self, sample: int) -> Ids:
        """Return all samples of the class of `sample`, ascending."""
        label = self._labels[sample]
        start = self._starts[label]
        return self._images[start : start + self._counts[label]]


def class_shares(balance: str, counts: Sequence[int]) -> list[float]:
    """Return the probability that an image of the training has each class, see data.balance.

    counts: images of each class. The square root is that of Mahajan et al., "Exploring the limits
    of weakly supervised pretraining", 2018.
    """
    weights = [{"none": n, "sqrt": math.sqrt(n), "uniform": float(n > 0)}[balance] for n in counts]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _occurrences(samples: Ids) -> Ids:
    """Return how often each sample occurs before its place, [N] int64."""
    by_sample = np.argsort(samples, kind="stable")
    ordered = samples[by_sample]
    places = np.arange(len(samples))
    is_first = np.append(True, ordered[1:] != ordered[:-1])
    result = np.empty_like(samples)
    result[by_sample] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    return result
