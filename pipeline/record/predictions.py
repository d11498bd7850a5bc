"""What a run's folder keeps for its pictures: each evaluation's answers, and a few images as the model saw them.

Promise: `report/` and MLflow's pictures are made from the run's folder alone, wherever and whenever, without the data, the
model or torch. Files lie in `report/data/`; numbers and text alone are in them, whole or not at all.
"""

import io
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from pipeline.files import atomic_write

AUGMENTED = "augmented.npz"
NO_PREDICTION = -1
"""The class that is predicted for an image whose logits are not finite."""


@dataclass(frozen=True)
class Predictions:
    """Of the model of one step to all N validation images."""

    labels: NDArray[np.int32]
    """[N]; -1 for an image that cannot be decoded."""
    predicted: NDArray[np.int32]
    """[N]: the likeliest class, or NO_ANSWER."""
    confidence: NDArray[np.float32]
    """[N]: its probability."""

    @property
    def _is_mistaken(self) -> NDArray[np.bool_]:
        """Return a mask, [N], of the images that have a label and were given another class."""
        mistaken: NDArray[np.bool_] = (
            (self.labels >= 0) & (self.predicted != NO_PREDICTION) & (self.labels != self.predicted)
        )
        return mistaken

    def mistakes(self, count: int) -> NDArray[np.int64]:
        """Ids of the images that were mistaken with the most confidence, the worst first."""
        wrong = np.flatnonzero(self._is_mistaken)
        worst: NDArray[np.int64] = wrong[np.argsort(-self.confidence[wrong], kind="stable")][:count]
        return worst

    def right(self, num_classes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """[classes] both: images of each class that were taken for it, and all of its images."""
        good = self.labels[self.labels >= 0]
        hit = good[good == self.predicted[self.labels >= 0]]
        return np.bincount(hit, minlength=num_classes), np.bincount(good, minlength=num_classes)

    def confused(self, num_classes: int, count: int) -> NDArray[np.int64]:
        """[count]: the classes with the most images mistaken, for another or another for them, in ascending order."""
        wrong = self._is_mistaken
        mistaken = np.bincount(self.labels[wrong], minlength=num_classes)
        mistaken += np.bincount(self.predicted[wrong], minlength=num_classes)
        return np.sort(np.argsort(-mistaken, kind="stable")[:count])

    def confusion(self, classes: NDArray[np.int64]) -> NDArray[np.int64]:
        """[K, K] of K classes in ascending order: images of the row's that were taken for the column's."""
        among = np.isin(self.labels, classes) & np.isin(self.predicted, classes)
        rows, columns = (np.searchsorted(classes, of[among]) for of in (self.labels, self.predicted))
        size = len(classes)
        return np.bincount(rows * size + columns, minlength=size**2).reshape(size, size)


@dataclass(frozen=True)
class KeptEvaluation:
    """An evaluation as it is kept."""

    answers: Predictions
    classes: list[str]
    shown: NDArray[np.int64]
    """[K]: ids of the mistakes that are shown."""
    pixels: NDArray[np.uint8]
    """[K, 3, H, W]: those images."""


def evaluation_file(report: Path, step: int) -> Path:
    return report / "data" / f"step-{step:08d}.npz"


def save_evaluation(report: Path, step: int, judged: KeptEvaluation) -> None:
    """OSError where it cannot be written."""
    _save(
        evaluation_file(report, step),
        {**asdict(judged.answers), "classes": np.array(judged.classes), "shown": judged.shown, "pixels": judged.pixels},
    )


def load_evaluation(path: Path) -> KeptEvaluation:
    """ValueError where it cannot be read."""
    try:
        with np.load(path, allow_pickle=False) as kept:
            answers = Predictions(kept["labels"], kept["predicted"], kept["confidence"])
            return KeptEvaluation(answers, kept["classes"].tolist(), kept["shown"], kept["pixels"])
    except (OSError, KeyError, EOFError, BadZipFile, zlib.error) as error:
        raise ValueError(f"{path.name} is damaged ({error}): remove it, the next evaluation makes another") from None


def save_augmented(report: Path, pixels: NDArray[np.uint8], captions: list[str]) -> None:
    """The first images of training as augmentation makes them. pixels: [K, 3, H, W]."""
    _save(report / "data" / AUGMENTED, {"pixels": pixels, "captions": np.array(captions)})


def load_augmented(report: Path) -> tuple[NDArray[np.uint8], list[str]]:
    with np.load(report / "data" / AUGMENTED, allow_pickle=False) as kept:
        return kept["pixels"], kept["captions"].tolist()


def _save(path: Path, arrays: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    atomic_write(path, buffer.getvalue())
