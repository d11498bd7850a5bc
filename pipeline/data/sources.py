"""Where images come from: an image folder, a pack, the embedded digits, or patterns made on the fly.

Promise: a source is a list of images per split that any process sees alike: a size, a digest, and for each sample id a
name, a label and what its file holds. Opening one needs no torch.
"""

import hashlib
import os
import shutil
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.config.schema import Config
from pipeline.data import pack
from pipeline.data.manifest import (
    MAX_FILE_BYTES,
    MISSING,
    Index,
    Split,
    SplitImages,
    UnreadableError,
    classify,
    is_outage,
    open_index,
    out_of_reach,
    refuse_untrained,
    relabelled,
    scan,
    scan_validation,
)
from pipeline.errors import RequestError, StorageError
from pipeline.plan import DataSize
from pipeline.randomness import derive

SplitName = Literal["train", "val"]
DIGITS_ROOT = "data/digits"
DIGITS_SIZE = DataSize(train_images=1437, val_images=360, num_classes=10)


class Images(Protocol):
    """One split."""

    def __len__(self) -> int: ...
    def name(self, i: int) -> str: ...
    def label(self, i: int) -> int: ...
    def read(self, i: int) -> bytes | NDArray[np.uint8]:
        """The file's bytes, or ready pixels [3, H, W]. UnreadableError if there are none, OutageError if the storage that
        holds them cannot be read."""


@dataclass(frozen=True)
class Source:
    size: DataSize
    digest: str
    classes: tuple[str, ...]
    train: Images
    val: Images
    index: Index | None = None
    """Of an image folder or a pack: what rank 0 sends, so that all ranks agree whatever their file system lists."""


@dataclass(frozen=True)
class FolderImages(SplitImages):
    root: Path
    split: Split

    def read(self, i: int) -> bytes:
        expected = int(self.split.sizes[i])
        if expected > MAX_FILE_BYTES:
            raise UnreadableError(f"{expected:,} bytes, more than the {MAX_FILE_BYTES:,} allowed")
        path = os.path.join(os.fsencode(self.root), self.split.name(i))
        try:
            with open(path, "rb", buffering=0) as file:
                data = file.read(max(0, expected) + 1)
        except OSError as error:
            raise UnreadableError(error.strerror) if expected == MISSING else classify(path, error) from None
        if len(data) != expected:
            was = f"had {expected:,} bytes" if expected >= 0 else "could not be read"
            raise UnreadableError(f"changed since it was indexed, when it {was}: 'pipeline data check' indexes anew")
        return data


@dataclass(frozen=True)
class SyntheticImages:
    """A coarse pattern a class under noise: learnable, cheap, and a function of (split, id) alone."""

    split: SplitName
    count: int
    num_classes: int
    side: int

    def __len__(self) -> int:
        return self.count

    def name(self, i: int) -> str:
        return f"synthetic/{self.split}/{i}"

    def label(self, i: int) -> int:
        return i % self.num_classes

    def read(self, i: int) -> NDArray[np.uint8]:
        coarse = np.random.Generator(np.random.Philox(derive(0, "pattern", self.label(i))))
        fine = np.random.Generator(np.random.Philox(derive(0, "noise", self.split, i)))
        cell = -(-self.side // 4)
        pattern = coarse.integers(0, 192, (3, 4, 4), np.uint8).repeat(cell, 1).repeat(cell, 2)
        noise: NDArray[np.uint8] = fine.integers(0, 64, (3, self.side, self.side), np.uint8)
        noise += pattern[:, : self.side, : self.side]
        return noise


def data_root(config: Config) -> Path:
    """Folder of the data; the digits have one where none is named."""
    return Path(config.data.root or DIGITS_ROOT)


def size_of(config: Config) -> DataSize:
    """How much data there will be, made or not: what a plan needs."""
    if config.data.source == "digits" and _is_free(data_root(config)):
        return DIGITS_SIZE
    return open_source(config).size


def open_source(config: Config, *, check_sizes: bool = False) -> Source:
    """The source that the configuration names; the digits are made on first use. RequestError if it cannot be."""
    if config.data.source == "synthetic":
        return _synthetic(config)
    root = data_root(config)
    if config.data.source == "pack":
        index = pack.open_index(root)
    else:
        _have_digits(config, root)
        index = open_index(root, config.data.val_split, config.run_dir / "index", check_sizes=check_sizes)
    refuse_untrained(index, root)  # an index that an earlier version wrote may hold such a class
    return of_index(root, index)


def open_validation(
    config: Config, contents: dict[str, Any], trained: Config, overrides: list[str]
) -> tuple[Source, str]:
    """Return what to judge the model of a checkpoint's `contents` on, with nothing to train on, and that in words.

    config: that of the training, `trained`, with the command's words `overrides` on top. Of a folder without train/ and
    val/ it is all images; if that is the data of the training, wherever it lies now, or if the words name data.val_split,
    it is the share that is held out. RequestError if there is no image, or one of a class that the model does not know.
    """
    classes = tuple(contents["classes"])
    if config.data.source == "synthetic":
        source = _synthetic(config)
        if not set(source.classes) <= set(classes):
            raise RequestError(
                f"data.source=synthetic makes {len(source.classes)} classes, 'class 0' and on, and the model knows others"
                f" ({', '.join(classes[:3])}, …; {len(classes)} in all): name images of its classes with"
                " data.source=folder data.root=FOLDER"
            )
        return source, f"{len(source.val):,} synthetic images"
    root = data_root(config)
    if config.data.source == "pack":
        index = pack.open_index(root)
        source = of_index(root, replace(index, val=relabelled(index, classes), classes=classes))
        return source, f"the {len(source.val):,} held-out images of the pack {root}"
    _have_digits(config, root)
    share, words = 1.0, "all {count} images of {root}"
    if (root / "val").is_dir():
        words = "the {count} images of {root}/val"
    elif _is_learnt(root, trained, contents.get("data")):
        share, words = trained.data.val_split, "the {count} held-out images of {root}"
        if config.data.val_split != share:
            raise RequestError(
                f"data.val_split={config.data.val_split:g} would take images that the model has learnt from: {share:g} of"
                f" {root} was held out; leave data.val_split out"
            )
    elif any(word.startswith("data.val_split=") for word in overrides):
        share, words = config.data.val_split, "the {count} held-out images of {root}"
    else:
        words += " (it is not the data of the training; data.val_split=SHARE would hold a share out)"
    split = scan_validation(root, classes, share)
    source = of_index(root, Index(Split.of([]), split, classes, None, {}, config.data.val_split))
    return source, words.format(count=f"{len(split):,}", root=root)


def _is_learnt(root: Path, trained: Config, digest: str | None) -> bool:
    """Return whether a folder of class folders is what a model learnt from: by its place, or by its contents."""
    if trained.data.source == "folder" and root.resolve() == data_root(trained).resolve():
        return True
    try:
        return scan(root, trained.data.val_split).digest == digest
    except RequestError:  # it need not be one to train on
        return False


def _have_digits(config: Config, root: Path) -> None:
    if config.data.source == "digits" and _is_free(root):
        try:
            make_digits(root)
        except RequestError:
            if _is_free(root):  # else another process made them meanwhile
                raise


def _is_free(root: Path) -> bool:
    """Whether nothing is there. RequestError if that cannot be seen."""
    try:
        root.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError as error:
        if is_outage(error):
            raise out_of_reach(root, error) from None
        raise RequestError(f"data.root={root} cannot be read: {error.strerror}") from None
    return False


def of_index(root: Path, index: Index) -> Source:
    """The images that `index` lists, in a folder or, where it says their places, in a pack."""
    train: Images = FolderImages(root, index.train)
    val: Images = FolderImages(root, index.val)
    if len(index.val.places):
        train, val = pack.PackImages(root, "train", index.train), pack.PackImages(root, "val", index.val)
    return Source(index.size, index.digest, index.classes, train, val, index)


def _synthetic(config: Config) -> Source:
    size = DataSize(config.data.num_images, -(-config.data.num_images // 4), config.data.num_classes)
    side = config.augment.size * 8 // 7
    digest = hashlib.sha256(f"synthetic {size} {side}".encode()).hexdigest()
    return Source(
        size,
        digest,
        tuple(f"class {label}" for label in range(size.num_classes)),
        SyntheticImages("train", size.train_images, size.num_classes, side),
        SyntheticImages("val", size.val_images, size.num_classes, side),
    )


def make_digits(root: Path) -> None:
    """Writes scikit-learn's 1,797 digits as PNG files of 8 × 8 pixels: train/<digit>/ and, every fifth, val/<digit>/."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = (digits.images * 255 / 16).round().astype(np.uint8)  # the set counts 0 to 16 in each pixel
    with _new_folder(root) as folder:
        for i, (image, label) in enumerate(zip(pixels, digits.target, strict=True)):
            _save(folder / ("val" if i % 5 == 0 else "train") / str(label) / f"{i:04d}.png", image)


def make_synthetic(root: Path, num_images: int, num_classes: int, side: int) -> None:
    """Writes the synthetic source as JPEG files, a quarter as many for validation."""
    if num_images <= 4 * (num_classes - 1):
        raise RequestError(
            f"{num_images:,} images, and a quarter as many for validation, leave one of {num_classes:,} classes empty:"
            f" make at least {4 * num_classes - 3:,} images"
        )
    with _new_folder(root) as folder:
        counts: dict[SplitName, int] = {"train": num_images, "val": -(-num_images // 4)}
        for split, count in counts.items():
            images = SyntheticImages(split, count, num_classes, side)
            for i in range(count):
                name = folder / split / f"class-{images.label(i):04d}" / f"{i:07d}.jpg"
                _save(name, images.read(i).transpose(1, 2, 0), quality=95)


class _new_folder:
    """A folder filled aside and then renamed: it is there whole or not at all."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._aside = root.parent / f".{root.name}.{socket.gethostname()}.{os.getpid()}"

    def __enter__(self) -> Path:
        if os.path.exists(self._root):
            raise RequestError(f"{self._root} is there already: remove it, or name another folder")
        try:
            shutil.rmtree(self._aside, ignore_errors=True)
            self._aside.mkdir(parents=True)
        except OSError as error:
            raise RequestError(f"data.root={self._root} cannot be made: {error.strerror}: {error.filename}") from None
        return self._aside

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                os.rename(self._aside, self._root)
        except OSError:
            if not self._root.is_dir():  # else another process made the same data meanwhile
                raise
        finally:
            shutil.rmtree(self._aside, ignore_errors=True)
        if isinstance(error, OSError):
            raise StorageError(f"{self._root} cannot be written: {error.strerror}") from None


def _save(path: Path, image: NDArray[np.uint8], **options: Any) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path, **options)
