"""The data of a run's figures: predictions of each evaluation, a few images as the model saw them.

Promise: figures are drawn from the run's folder alone, anywhere and at any time, without the data,
the model or torch. The files are in `report/data/`. They hold only numbers and text, and each is
complete or absent.
"""

import io
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from pipeline.files import atomic_write

AUGMENTED_FILE = "augmented.npz"
NO_PREDICTION = -1
"""The predicted class of an image whose logits are not finite."""


@dataclass(frozen=True)
class Predictions:
    """The predictions of one model for all N validation images."""

    labels: NDArray[np.int32]
    """[N]; -1 for an image that cannot be decoded."""
    predicted: NDArray[np.int32]
    """[N]: the most probable class, or NO_PREDICTION."""
    confidence: NDArray[np.float32]
    """[N]: its probability."""

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


def evaluation_file(report: Path, step: int) -> Path:
    return report / "data" / f"step-{step:08d}.npz"


def step_of_evaluation(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def saved_evaluations(report: Path) -> list[Path]:
    """Return the files of all saved evaluations, in the order of their steps."""
    return sorted((report / "data").glob("step-*.npz"))


def save_evaluation(
    report: Path, step: int, evaluation: SavedEvaluation, check: Callable[[], None] = lambda: None
) -> None:
    """Save an evaluation. Raises OSError if it cannot be written. check: see `files.replacing`."""
    classes, predictions = np.array(evaluation.classes), asdict(evaluation.predictions)
    path = evaluation_file(report, step)
    _save(path, check, **predictions, classes=classes, shown=evaluation.mistakes, pixels=evaluation.pixels)


def load_evaluation(path: Path) -> SavedEvaluation:
    """Return a saved evaluation. Raises ValueError if it cannot be read."""
    try:
        with np.load(path, allow_pickle=False) as saved:
            predictions = Predictions(saved["labels"], saved["predicted"], saved["confidence"])
            return SavedEvaluation(predictions, saved["classes"].tolist(), saved["shown"], saved["pixels"])
    except (OSError, KeyError, EOFError, BadZipFile, zlib.error) as error:
        raise ValueError(f"{path.name} is damaged ({error}): remove it, the next evaluation saves another") from None


def save_augmented(
    report: Path, pixels: NDArray[np.uint8], captions: list[str], check: Callable[[], None] = lambda: None
) -> None:
    """Save the first training images as augmentation changed them.

    pixels: [K, 3, H, W]. check: see `files.replacing`.
    """
    _save(report / "data" / AUGMENTED_FILE, check, pixels=pixels, captions=np.array(captions))


def load_augmented(report: Path) -> tuple[NDArray[np.uint8], list[str]]:
    with np.load(report / "data" / AUGMENTED_FILE, allow_pickle=False) as saved:
        return saved["pixels"], saved["captions"].tolist()


def _save(path: Path, check: Callable[[], None], **arrays: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    atomic_write(path, buffer.getvalue(), check=check)
