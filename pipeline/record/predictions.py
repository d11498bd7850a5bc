"""The data of a run's figures: predictions of each evaluation, a few images as the model saw them.

Promise: figures are drawn from the run's folder alone, anywhere and at any time, without the data,
the model or torch. The files are in `report/data/`. They hold only numbers and text, and each is
complete or absent.
"""

import io
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

from pipeline.record.folder import RunFolder

AUGMENTED_FILE = "augmented.npz"
CONFIDENCE_UNIT = 2**30
"""Confidences are multiples of 2^-30, so that they are summed as integers."""
_CALIBRATION_BINS = 15
_MAX_RECALLS = 100
"""Classes up to which each has a metric of its own; more would bury the others in MLflow."""
NO_PREDICTION = -1
"""The predicted class of an image whose logits are not finite."""
_MAX_BYTES = 256 << 20
"""Limit of a file's unpacked size: a validation image takes 16 bytes, so 16 million have room."""
_MAX_CLASSES = 1_000_000
_MAX_PICTURES = 64


@dataclass(frozen=True)
class Predictions:
    """The predictions of one model for all N validation images."""

    labels: NDArray[np.int32]
    """[N]; -1 for an image that cannot be decoded."""
    predicted: NDArray[np.int32]
    """[N]: the most probable class, or NO_PREDICTION."""
    confidence: NDArray[np.float64]
    """[N]: its probability, or 0."""

    @property
    def _is_mistake(self) -> NDArray[np.bool_]:
        """A mask, [N], of the images that have a label and another predicted class."""
        is_known = (self.labels >= 0) & (self.predicted != NO_PREDICTION)
        return np.asarray(is_known & (self.labels != self.predicted))

    def most_confident_mistakes(self, count: int) -> NDArray[np.int64]:
        """Return the ids of the `count` most confident wrong predictions, the worst first."""
        wrong = np.flatnonzero(self._is_mistake)
        return wrong[np.argsort(-self.confidence[wrong], kind="stable")][:count]

    def count_correct(self, num_classes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return how many images of each class are predicted correctly, and how many it has."""
        decoded = self.labels >= 0
        correct = self.labels[decoded & (self.labels == self.predicted)]
        return np.bincount(correct, minlength=num_classes), np.bincount(self.labels[decoded], minlength=num_classes)

    @property
    def classes_with_images(self) -> int:
        """The number of classes that have images, so that they have a recall."""
        return len(np.unique(self.labels[self.labels >= 0]))

    def balanced_accuracy(self) -> float | None:
        """Return the mean recall of the classes that have images, or None without any."""
        correct, images = self.count_correct(int(self.labels.max(initial=0)) + 1)
        recalls = correct[images > 0] / images[images > 0]
        return math.fsum(recalls) / len(recalls) if len(recalls) else None

    def lowest_recalls(self, num_classes: int, count: int) -> list[tuple[int, int, int]]:
        """Return (class, correct, images) of the `count` classes with the lowest recall."""
        correct, images = self.count_correct(num_classes)
        known = np.flatnonzero(images)
        lowest = known[np.argsort(correct[known] / images[known], kind="stable")][:count]
        return [(int(label), int(correct[label]), int(images[label])) for label in lowest]

    def recalls(self, classes: Sequence[str]) -> dict[str, float]:
        """Return the recall of each class that has images, by a name that MLflow takes.

        Empty if there are more than `_MAX_RECALLS` classes.
        """
        if len(classes) > _MAX_RECALLS:
            return {}
        correct, images = self.count_correct(len(classes))
        names = _make_unique([re.sub(r"[^\w .-]", "_", name)[:100] for name in classes])
        return {names[label]: float(correct[label] / images[label]) for label in np.flatnonzero(images)}

    def calibration(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the images, the correct ones and the sum of confidences of 15 bins, [15] each.

        The bins divide the confidences 0..1 equally; each includes its lower end. The sums are in
        units of `CONFIDENCE_UNIT`. Images without a label are left out.
        """
        known = self.labels >= 0
        units = np.rint(self.confidence[known] * CONFIDENCE_UNIT).astype(np.int64)
        bins = np.minimum(units * _CALIBRATION_BINS // CONFIDENCE_UNIT, _CALIBRATION_BINS - 1)
        is_correct = self.labels[known] == self.predicted[known]
        images, correct, confidence = np.zeros((3, _CALIBRATION_BINS), np.int64)
        for sums, values in ((images, 1), (correct, is_correct), (confidence, units)):
            np.add.at(sums, bins, values)
        return images, correct, confidence

    def calibration_error(self) -> float | None:
        """Return the expected calibration error, or None without images.

        It is the mean distance of accuracy and confidence over 15 bins, weighted by their images
        (Guo et al., "On calibration of modern neural networks", 2017; their bins include the upper
        end, torchmetrics' the lower).
        """
        images, correct, confidence = self.calibration()
        distance = sum(np.abs(correct * CONFIDENCE_UNIT - confidence).tolist())
        return distance / CONFIDENCE_UNIT / int(images.sum()) if images.any() else None

    def most_confused_classes(self, num_classes: int, count: int) -> NDArray[np.int64]:
        """Return the `count` classes most often mistaken for or predicted for others, ascending."""
        wrong = self._is_mistake
        mistakes = np.bincount(self.labels[wrong], minlength=num_classes)
        mistakes += np.bincount(self.predicted[wrong], minlength=num_classes)
        return np.sort(np.argsort(-mistakes, kind="stable")[:count])

    def most_frequent_confusions(self, count: int) -> list[tuple[int, int, int]]:
        """Return (label, predicted class, images) of the `count` most frequent confusions."""
        wrong = self._is_mistake
        pairs = np.stack([self.labels[wrong], self.predicted[wrong]], axis=1)
        found, images = np.unique(pairs, axis=0, return_counts=True)
        order = np.argsort(-images, kind="stable")[:count]
        return [(int(found[row, 0]), int(found[row, 1]), int(images[row])) for row in order]

    def confusion_matrix(self, classes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the confusion matrix, [K, K], of K ascending classes: label by prediction."""
        among = np.isin(self.labels, classes) & np.isin(self.predicted, classes)
        rows, columns = (np.searchsorted(classes, values[among]) for values in (self.labels, self.predicted))
        size = len(classes)
        return np.bincount(rows * size + columns, minlength=size**2).reshape(size, size)


@dataclass(frozen=True)
class SavedEvaluation:
    """One evaluation, with all that its figures need."""

    predictions: Predictions
    classes: list[str]
    mistakes: NDArray[np.int64]
    """[K]: ids of the mistakes that are shown."""
    pixels: NDArray[np.uint8]
    """[K, 3, H, W]: those images."""


def _make_unique(names: list[str]) -> list[str]:
    """Return the names, each different: one that several classes have gets the class's number.

    So do "", "." and "..", which MLflow refuses as a part of a path.
    """
    counts, taken, unique = Counter(names), {*names}, []
    for label, name in enumerate(names):
        new = name
        while (counts[name] > 1 or not name.strip(".")) and new in taken:
            new += f"_{label}"
        taken.add(new)
        unique.append(new)
    return unique


def evaluation_file(report: Path, step: int) -> Path:
    return report / "data" / f"step-{step:08d}.npz"


def step_of_evaluation(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def saved_evaluations(report: Path) -> list[Path]:
    """Return the files of all saved evaluations, in the order of their steps."""
    return sorted((report / "data").glob("step-*.npz"))


def save_evaluation(folder: RunFolder, step: int, evaluation: SavedEvaluation) -> None:
    """Save an evaluation. Raises OSError if it cannot be written."""
    classes, predictions = np.array(evaluation.classes), asdict(evaluation.predictions)
    path = evaluation_file(folder.report, step)
    _save(folder, path, **predictions, classes=classes, shown=evaluation.mistakes, pixels=evaluation.pixels)


def load_evaluation(path: Path) -> SavedEvaluation:
    """Return a saved evaluation. Raises ValueError if it cannot be read."""
    saved = _load(path, "labels", "predicted", "confidence", "classes", "shown", "pixels")
    labels, predicted, confidence, classes, mistakes, pixels = saved
    same_length = len({array.shape for array in (labels, predicted, confidence)}) == 1 == labels.ndim
    kinds = "".join(array.dtype.kind for array in saved)
    if kinds != "iifUiu" or not same_length or classes.ndim != 1 or len(classes) > _MAX_CLASSES:
        raise _damaged(path, "its arrays are not those of an evaluation")
    if len(labels) and not 0 <= confidence.min() <= confidence.max() <= 1:
        raise _damaged(path, "it has confidences outside 0..1")
    if any(len(labels) and not -1 <= array.min() <= array.max() < len(classes) for array in (labels, predicted)):
        raise _damaged(path, f"it has labels beyond its {len(classes):,} classes")
    if len(mistakes) > _MAX_PICTURES or pixels.shape[:2] != (len(mistakes), 3):
        raise _damaged(path, f"it has {len(mistakes):,} mistakes and pixels of shape {pixels.shape}")
    return SavedEvaluation(Predictions(labels, predicted, confidence), classes.tolist(), mistakes, pixels)


def save_augmented(folder: RunFolder, pixels: NDArray[np.uint8], captions: list[str]) -> None:
    """Save the first training images as augmentation changed them. pixels: [K, 3, H, W]."""
    _save(folder, folder.report / "data" / AUGMENTED_FILE, pixels=pixels, captions=np.array(captions))


def load_augmented(report: Path) -> tuple[NDArray[np.uint8], list[str]]:
    """Return what `save_augmented` saved. Raises ValueError if it cannot be read."""
    path = report / "data" / AUGMENTED_FILE
    pixels, captions = _load(path, "pixels", "captions")
    if captions.shape != pixels.shape[:1] or len(captions) > _MAX_PICTURES:
        raise _damaged(path, f"it has {captions.size:,} captions and pixels of shape {pixels.shape}")
    return pixels, captions.tolist()


def _load(path: Path, *names: str) -> list[NDArray[Any]]:
    """Return the named arrays of a file.

    Raises ValueError if it is damaged or too large, FileNotFoundError if there is none.
    """
    try:
        with ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > _MAX_BYTES:
            raise ValueError(f"it would unpack to {unpacked:,} bytes, more than {_MAX_BYTES:,}")
        with np.load(path, allow_pickle=False) as saved:
            arrays = [saved[name] for name in names]
        if any(array.size > array.nbytes for array in arrays):
            raise ValueError("an array has elements of no size")
        return arrays
    except FileNotFoundError:
        raise
    except Exception as error:  # zipfile, zlib and numpy raise many kinds of errors for damaged files
        raise _damaged(path, f"{error}") from None


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"{path.name} is damaged ({why}): remove it, the next evaluation saves another")


def _save(folder: RunFolder, path: Path, **arrays: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    folder.write(path, buffer.getvalue())
