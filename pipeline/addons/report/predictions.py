"""The predictions of one evaluation, and the integer counts that its figures follow from."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.train.evaluation import CONFIDENCE_UNIT

_CALIBRATION_BINS = 15
_MAX_RECALLS = 100  # classes up to which each has a metric of its own; more would bury the others in MLflow


@dataclass(frozen=True)
class Predictions:
    """The predictions of one model for all N validation images."""

    labels: NDArray[np.int32]  # [N]; -1 for an image that cannot be decoded
    predicted: NDArray[np.int32]  # [N]: the most probable class, or NO_PREDICTION
    confidence: NDArray[np.float64]  # [N]: its probability, or 0

    def count_correct(self, num_classes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return how many images of each class are predicted correctly, and how many it has."""
        decoded = self.labels >= 0
        correct = np.bincount(self.labels[decoded & (self.labels == self.predicted)], minlength=num_classes)
        return correct, np.bincount(self.labels[decoded], minlength=num_classes)

    def balanced_accuracy(self) -> float | None:
        """Return the mean recall of the classes that have images, or None without any."""
        correct, images = self.count_correct(int(self.labels.max(initial=0)) + 1)
        recalls = correct[images > 0] / images[images > 0]
        return math.fsum(recalls) / len(recalls) if len(recalls) else None

    def by_class(self, classes: Sequence[str]) -> dict[str, float]:
        """Return the recall of each class that has images, by a name that MLflow takes."""
        correct, images = self.count_correct(len(classes))
        return _by_class("recall", classes, correct / np.maximum(1, images), images)

    def calibration(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the images, the correct ones and the sum of confidences of 15 bins, [15] each.

        The sums are in units of `CONFIDENCE_UNIT`. Images without a label are left out.
        """
        known = self.labels >= 0
        units = np.rint(self.confidence[known] * CONFIDENCE_UNIT).astype(np.int64)
        bins = np.minimum(units * _CALIBRATION_BINS // CONFIDENCE_UNIT, _CALIBRATION_BINS - 1)
        images, correct, confidence = np.zeros((3, _CALIBRATION_BINS), np.int64)
        np.add.at(images, bins, 1)
        np.add.at(correct, bins, self.labels[known] == self.predicted[known])
        np.add.at(confidence, bins, units)
        return images, correct, confidence

    def calibration_error(self) -> float | None:
        """Return the expected calibration error, or None without images.

        It is the mean distance of accuracy and confidence over 15 bins, weighted by their images
        (Guo et al., "On calibration of modern neural networks", 2017).
        """
        images, correct, confidence = self.calibration()
        distance = sum(np.abs(correct * CONFIDENCE_UNIT - confidence).tolist())
        return distance / CONFIDENCE_UNIT / int(images.sum()) if images.any() else None


@dataclass(frozen=True)
class ClassPrecisions:
    """The figures of each class, in place of `Predictions` with several labels a picture."""

    precisions: NDArray[np.float64]  # [classes]: the average precision; 0 for a class without an image
    images: NDArray[np.int64]  # [classes]: the images that have the class

    def by_class(self, classes: Sequence[str]) -> dict[str, float]:
        """Return the average precision of each class that has images, see `Predictions`."""
        return _by_class("ap", classes, self.precisions, self.images)


def _by_class(
    figure: str, classes: Sequence[str], values: NDArray[np.float64], images: NDArray[np.int64]
) -> dict[str, float]:
    """Return a figure of each class that has images. Empty for more than `_MAX_RECALLS` classes."""
    if len(classes) > _MAX_RECALLS:
        return {}
    names = [re.sub(r"[^\w .-]", "_", name)[:100] for name in classes]
    counts = Counter(names)
    found = {}
    for label in np.flatnonzero(images).tolist():
        name = names[label]
        if counts[name] > 1 or not name.strip("."):  # MLflow refuses "", "." and ".." as a part of a path
            name += f"_{label}"
        found[f"{figure}/{name}"] = float(values[label])
    return found
