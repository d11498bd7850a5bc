"""The data of a report: predictions of each evaluation, and a few images as the model saw them.

Promise: figures are drawn from the run's folder alone, anywhere and at any time, without the data,
the model or torch. The files are in `report/data/`. They hold only numbers and text, and each is
complete or absent.
"""

import io
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

from pipeline.addons.report.predictions import ClassPrecisions, Predictions
from pipeline.record.folder import RunFolder
from pipeline.train.evaluation import NO_PREDICTION

AUGMENTED_FILE = "augmented.npz"
_MAX_BYTES = 256 << 20
"""Limit of a file's unpacked size: a validation image takes 16 bytes, so 16 million have room."""


@dataclass(frozen=True)
class SavedEvaluation:
    """One evaluation, with all that its figures need."""

    predictions: Any  # `Predictions`, or with several labels a picture `ClassPrecisions`
    classes: list[str]
    mistakes: NDArray[np.int64]  # [K]: ids of the mistakes that are shown
    pixels: NDArray[np.uint8]  # [K, 3, H, W]: those images


def find_mistakes(predictions: Predictions) -> NDArray[np.int64]:
    """Return the ids of the images that have a label and another predicted class."""
    is_known = (predictions.labels >= 0) & (predictions.predicted != NO_PREDICTION)
    return np.flatnonzero(is_known & (predictions.labels != predictions.predicted))


def most_confident_mistakes(predictions: Predictions | ClassPrecisions, count: int) -> NDArray[np.int64]:
    """Return ids of the `count` most confident mistakes, worst first; none with several labels."""
    if isinstance(predictions, ClassPrecisions):
        return np.empty(0, np.int64)
    wrong = find_mistakes(predictions)
    return wrong[np.argsort(-predictions.confidence[wrong], kind="stable")][:count]


def most_confused_classes(predictions: Predictions, num_classes: int, count: int) -> NDArray[np.int64]:
    """Return the `count` classes most often mistaken for or predicted for others, ascending."""
    wrong = find_mistakes(predictions)
    both = np.concatenate([predictions.labels[wrong], predictions.predicted[wrong]])
    return np.sort(np.argsort(-np.bincount(both, minlength=num_classes), kind="stable")[:count])


def most_frequent_confusions(predictions: Predictions, count: int) -> list[tuple[int, int, int]]:
    """Return (label, predicted class, images) of the `count` most frequent confusions."""
    wrong = find_mistakes(predictions)
    pairs = np.stack([predictions.labels[wrong], predictions.predicted[wrong]], axis=1)
    found, images = np.unique(pairs, axis=0, return_counts=True)
    order = np.argsort(-images, kind="stable")[:count]
    return [(int(found[row, 0]), int(found[row, 1]), int(images[row])) for row in order]


def confusion_matrix(predictions: Predictions, classes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the confusion matrix, [K, K], of K ascending classes: label by prediction."""
    labels, predicted, size = predictions.labels, predictions.predicted, len(classes)
    among = np.isin(labels, classes) & np.isin(predicted, classes)
    rows, columns = (np.searchsorted(classes, values[among]) for values in (labels, predicted))
    return np.bincount(rows * size + columns, minlength=size**2).reshape(size, size)


def step_of_evaluation(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def saved_evaluations(report: Path) -> list[Path]:
    """Return the files of all saved evaluations, in the order of their steps."""
    return sorted((report / "data").glob(f"step-{'[0-9]' * 8}.npz"))


def save_evaluation(folder: RunFolder, step: int, evaluation: SavedEvaluation) -> None:
    """Save an evaluation. Raises OSError if it cannot be written."""
    arrays = asdict(evaluation.predictions) | {
        "classes": np.array(evaluation.classes), "shown": evaluation.mistakes, "pixels": evaluation.pixels,
    }  # fmt: skip
    _save(folder, folder.report / "data" / f"step-{step:08d}.npz", **arrays)


def load_evaluation(path: Path) -> SavedEvaluation:
    """Return a saved evaluation. Raises ValueError if it cannot be read."""
    kind: type[Predictions | ClassPrecisions] = Predictions
    with suppress(Exception), ZipFile(path) as archive:  # a damaged file is named below
        kind = ClassPrecisions if "precisions.npy" in archive.namelist() else Predictions
    names = [field.name for field in fields(kind)]
    *found, classes, mistakes, pixels = _load(path, *names, "classes", "shown", "pixels")
    return SavedEvaluation(kind(*found), classes.tolist(), mistakes, pixels)


def last_evaluation(report: Path) -> SavedEvaluation:
    """Return the last saved evaluation. Raises ValueError if there is none or it is damaged."""
    saved = saved_evaluations(report)
    if not saved:
        raise ValueError("no evaluation yet")
    return load_evaluation(saved[-1])


def save_augmented(folder: RunFolder, pixels: NDArray[np.uint8], captions: list[str]) -> None:
    """Save the first training images as augmentation changed them. pixels: [K, 3, H, W]."""
    _save(folder, folder.report / "data" / AUGMENTED_FILE, pixels=pixels, captions=np.array(captions))


def load_augmented(report: Path) -> tuple[NDArray[np.uint8], list[str]]:
    """Return what `save_augmented` saved. Raises ValueError if it cannot be read."""
    pixels, captions = _load(report / "data" / AUGMENTED_FILE, "pixels", "captions")
    return pixels, captions.tolist()


def _load(path: Path, *names: str) -> list[NDArray[Any]]:
    """Return arrays. Raises ValueError for a damaged or large file, FileNotFoundError for none."""
    try:
        with ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > _MAX_BYTES:
            raise ValueError(f"it would unpack to {unpacked:,} bytes")
        with np.load(path, allow_pickle=False) as saved:
            return [saved[name] for name in names]
    except FileNotFoundError:
        raise
    except Exception as error:  # zipfile, zlib and numpy raise many kinds of errors for damaged files
        raise ValueError(f"{path.name} is damaged ({error}): the next evaluation saves another") from None


def _save(folder: RunFolder, path: Path, **arrays: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    folder.write(path, buffer.getvalue())
