"""Data that this package makes: scikit-learn's digits, and synthetic patterns. No torch here."""

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config.schema import Config
from pipeline.data import interface
from pipeline.data.interface import Source
from pipeline.errors import RequestError, StorageError
from pipeline.files import temporary_sibling
from pipeline.plan import DataSize
from pipeline.randomness import derive


@dataclass(frozen=True)
class SyntheticImages:
    """A coarse pattern for each class, with noise: learnable, and a function of (split, id)."""

    split: str
    count: int
    num_classes: int
    side: int

    def __len__(self) -> int:
        return self.count

    def name(self, i: int) -> str:
        return f"synthetic/{self.split}/{i}"

    @cached_property
    def labels(self) -> NDArray[np.int32]:
        return np.arange(self.count, dtype=np.int32) % np.int32(self.num_classes)

    def expect(self, samples: Iterable[int]) -> None:
        """Prepare nothing."""

    def open(self, i: int) -> interface.Picture:
        from pipeline.addons.datasets.images import Picture  # imports torch

        return Picture.open(self.read(i))

    def read(self, i: int) -> NDArray[np.uint8]:
        coarse = np.random.Generator(np.random.Philox(derive(0, "pattern", i % self.num_classes)))
        fine = np.random.Generator(np.random.Philox(derive(0, "noise", self.split, i)))
        cell = -(-self.side // 4)
        pattern = coarse.integers(0, 192, (3, 4, 4), np.uint8).repeat(cell, 1).repeat(cell, 2)
        noise: NDArray[np.uint8] = fine.integers(0, 64, (3, self.side, self.side), np.uint8)
        noise += pattern[:, : self.side, : self.side]
        return noise


def synthetic_images(count: int, num_classes: int, side: int) -> tuple[SyntheticImages, SyntheticImages]:
    """Return `count` images to train and a quarter as many for validation."""
    train = SyntheticImages("train", count, num_classes, side)
    return train, SyntheticImages("val", -(-count // 4), num_classes, side)


def synthetic_source(config: Config) -> Source:
    """Return the source of data.source=synthetic. Raises RequestError if a class has no image."""
    count, num_classes = config.data.num_images, config.data.num_classes
    if count < num_classes:
        given = f"data.num_images={count} is below data.num_classes={num_classes}"
        raise RequestError(given, "give as many images as classes, or more")
    side = config.augment.size * 8 // 7
    train, val = synthetic_images(count, num_classes, side)
    size = DataSize(len(train), len(val), num_classes)
    digest = hashlib.sha256(f"synthetic {size} {side}".encode()).hexdigest()
    return Source(size, digest, tuple(f"class {label}" for label in range(num_classes)), train, val)


def make_digits(root: Path) -> None:
    """Write scikit-learn's 1,797 digits as PNG files of 8 × 8 pixels; every fifth goes to val/."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = (digits.images * 255 / 16).round().astype(np.uint8)  # each pixel is 0 to 16
    with _atomic_folder(root) as folder:
        for i, (image, label) in enumerate(zip(pixels, digits.target, strict=True)):
            split = "val" if i % 5 == 0 else "train"
            save(folder / split / str(label) / f"{i:04d}.png", image)


def make_synthetic(root: Path, num_images: int, num_classes: int, side: int) -> None:
    """Write `num_images` synthetic JPEG files to train, and a quarter as many for validation."""
    least = 4 * num_classes - 3
    if num_classes < 2 or num_images < least:
        problem = f"{num_images:,} images, a quarter as many for validation, in {num_classes:,} classes"
        raise RequestError(problem, f"give 2 classes or more, and 4 × classes - 3 = {least:,} images or more")
    with _atomic_folder(root) as folder:
        for images in synthetic_images(num_images, num_classes, side):
            for i in range(len(images)):
                name = folder / images.split / f"class-{images.labels[i]:04d}" / f"{i:07d}.jpg"
                save(name, images.read(i).transpose(1, 2, 0), quality=95)


@contextmanager
def _atomic_folder(root: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `root` if the block succeeds, else removed."""
    check_absent(root)
    temporary = temporary_sibling(root, shared=True)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    except OSError as error:
        raise RequestError(f"data.root={root} cannot be made: {error.strerror}: {error.filename}") from None
    try:
        yield temporary
        try:
            os.rename(temporary, root)
        except OSError:
            if not root.is_dir():  # else another process made the same data at the same time
                raise
    except OSError as error:
        raise StorageError(f"{root} cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_absent(root: Path) -> None:
    """Raise RequestError if `root` exists: data is never overwritten."""
    if os.path.exists(root):
        raise RequestError(f"{root} already exists", "remove it, or name another folder")


def save(path: Path, image: NDArray[np.uint8], **options: Any) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path, **options)
