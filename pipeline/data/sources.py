"""Sources of images: an image folder, a pack, also in a bucket, the digits, or synthetic patterns.

Promise: every process sees the same source: the same size and digest, and for each sample id the
same name, label and file contents. Opening a source needs no torch.
"""

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.config.schema import Config
from pipeline.data import pack
from pipeline.data.access import PLACE_OF_DATA, UnreadableError, class_of, open_regular, raise_if_outage, read_error
from pipeline.data.holdout import HoldOut
from pipeline.data.index import MISSING, Index, Split, SplitImages, describe_ignored
from pipeline.data.manifest import check_has_validation, open_index, scan, scan_validation
from pipeline.data.store import Store, is_store
from pipeline.errors import RequestError, StorageError, list_first
from pipeline.files import temporary_sibling
from pipeline.plan import DataSize
from pipeline.randomness import derive

SplitName = Literal["train", "val"]
DIGITS_ROOT = "data/digits"
DIGITS_SIZE = DataSize(train_images=1437, val_images=360, num_classes=10)


class Images(Protocol):
    """The images of one split."""

    @property
    def labels(self) -> NDArray[np.int32]:
        """The class of each image, [N]."""

    @property
    def upright(self) -> bool:
        """Images are turned as their EXIF orientation says."""

    def __len__(self) -> int: ...
    def name(self, i: int) -> str: ...
    def label(self, i: int) -> int: ...
    def read(self, i: int) -> bytes | NDArray[np.uint8]:
        """Return the bytes of the file, or decoded pixels [3, H, W] uint8.

        Raises UnreadableError if this image cannot be read, OutageError if its storage cannot.
        """

    def expect(self, samples: Iterable[int]) -> None:
        """Prepare to read these images next, in this order. Only a bucket looks at them."""

    def pop_failed_reads(self) -> list[int]:
        """Return the failed attempts since the last call by `READ_FAILURES`; [] if not a bucket."""


@dataclass(frozen=True)
class Source:
    size: DataSize
    digest: str
    classes: tuple[str, ...]
    train: Images
    val: Images
    index: Index | None = None
    """The index of a folder or pack. Rank 0 sends it: file systems may list differently."""


class FolderImages(SplitImages):
    root: Path

    def read(self, i: int) -> bytes:
        expected = self.size(i)
        path = os.path.join(os.fsencode(self.root), self.split.name(i))
        try:
            with open(path, "rb", buffering=0, opener=open_regular) as file:
                data = file.read(max(0, expected) + 1)
        except OSError as error:
            if expected == MISSING and not os.path.islink(path):
                raise UnreadableError(error.strerror) from None
            raise read_error(path, error) from None
        if len(data) != expected:
            was = "it could not be read" if expected == MISSING else f"it had {expected:,} bytes"
            raise UnreadableError(f"changed since it was indexed, when {was}: 'pipeline data check' updates the index")
        return data


@dataclass(frozen=True)
class SyntheticImages:
    """A coarse pattern for each class, with noise: learnable, and a function of (split, id)."""

    split: SplitName
    count: int
    num_classes: int
    side: int
    upright: bool = True

    def __len__(self) -> int:
        return self.count

    def name(self, i: int) -> str:
        return f"synthetic/{self.split}/{i}"

    @property
    def labels(self) -> NDArray[np.int32]:
        return np.arange(self.count, dtype=np.int32) % np.int32(self.num_classes)

    def label(self, i: int) -> int:
        return i % self.num_classes

    def expect(self, samples: Iterable[int]) -> None:
        """Prepare nothing."""

    def pop_failed_reads(self) -> list[int]:
        return []

    def read(self, i: int) -> NDArray[np.uint8]:
        coarse = np.random.Generator(np.random.Philox(derive(0, "pattern", self.label(i))))
        fine = np.random.Generator(np.random.Philox(derive(0, "noise", self.split, i)))
        cell = -(-self.side // 4)
        pattern = coarse.integers(0, 192, (3, 4, 4), np.uint8).repeat(cell, 1).repeat(cell, 2)
        noise: NDArray[np.uint8] = fine.integers(0, 64, (3, self.side, self.side), np.uint8)
        noise += pattern[:, : self.side, : self.side]
        return noise


def data_root(config: Config) -> Path:
    """Return the folder of the data; the digits have a default."""
    return Path(config.data.root or DIGITS_ROOT)


def data_size(config: Config) -> DataSize:
    """Return the size of the data, also if the digits are not made yet."""
    if config.data.source == "digits" and _is_absent(data_root(config)):
        return DIGITS_SIZE
    return open_source(config).size


def class_counts(config: Config) -> dict[str, int]:
    """Return the training images of each class by its name; {} if the digits are not made yet."""
    if config.data.source == "digits" and _is_absent(data_root(config)):
        return {}
    source = open_source(config)
    return dict(
        zip(source.classes, np.bincount(source.train.labels, minlength=len(source.classes)).tolist(), strict=True)
    )


def known_size(config: Config) -> DataSize | None:
    """Return the size of data that this package makes; None for other data. Looks at no file."""
    if config.data.source == "synthetic":
        return _synthetic(config).size
    return DIGITS_SIZE if config.data.source == "digits" else None


def open_source(config: Config, *, check_sizes: bool = False) -> Source:
    """Return the source that the configuration names. The digits are made on first use.

    check_sizes: see `manifest.open_index`. Raises RequestError if the data is missing or laid out
    wrong.
    """
    if config.data.source == "synthetic":
        return _synthetic(config)
    if "://" in str(config.data.root) and not is_store(config.data.root):
        raise RequestError(
            f"data.root={config.data.root} is not a folder",
            "copy the data to this machine and give its folder with data.root=FOLDER",
        )
    if config.data.source == "pack":
        root, index = _open_pack(config)
    else:
        root = data_root(config)
        _ensure_digits(config, root)
        if os.path.exists(root / pack.SUMMARY):
            raise RequestError(f"data.root={root} is a pack", "set data.source=pack")
        index = open_index(root, _hold_out(config), config.run_dir / "index", check_sizes=check_sizes)
        index = replace(index, upright=config.data.orientation == "apply")
    check_has_validation(index, root)
    return _make_source(config, root, index)


def _open_pack(config: Config) -> tuple[Path | Store, Index]:
    """Return the place and the index of a pack. Raises RequestError, OutageError."""
    if not is_store(config.data.root):
        return data_root(config), pack.open_index(data_root(config))
    from pipeline.data.remote import check_ranges

    store = Store(str(config.data.root))
    index = pack.open_index(store, _cache(config))
    check_ranges(store, index)
    return store, index


def _hold_out(config: Config) -> HoldOut:
    return HoldOut(config.data.val_split, config.data.split_by)


def _cache(config: Config) -> Path | None:
    return Path(config.data.cache) if config.data.cache else None


def sent_source(config: Config, index: Index) -> Source:
    """Return the source of a process that gets the index from rank 0: it reads no index itself."""
    root = Store(str(config.data.root)) if is_store(config.data.root) else data_root(config)
    return _make_source(config, root, index)


def _make_source(config: Config, root: Path | Store, index: Index) -> Source:
    return source_from_index(root, index, _cache(config), int(config.data.cache_gib * 2**30))


def open_validation(
    config: Config, contents: dict[str, Any], trained: Config, overrides: list[str]
) -> tuple[Source, str]:
    """Return a source of the images to evaluate a checkpoint on, and a description of them.

    config: the training's own, `trained`, with the `overrides` of the command. Of a folder without
    val/, and of a pack of one, it takes all images; but only those that the training held out if
    they are the training's data, wherever it lies now and however it was packed. Of a folder of
    other data, `overrides` may hold a share out. Raises RequestError if there is no image, or one
    of a class that the model does not know.
    """
    classes = tuple(contents["classes"])
    names_val_split = any(word.startswith("data.val_split=") for word in overrides)
    if config.data.source == "synthetic":
        source = _synthetic(config)
        if not set(source.classes) <= set(classes):
            raise RequestError(
                f"data.source=synthetic makes {len(source.classes)} classes, 'class 0' and so on, but the model knows"
                f" {list_first(list(classes), 3)}",
                "name images of its classes with data.source=folder data.root=FOLDER",
            )
        return source, f"{len(source.val):,} synthetic images"
    if config.data.source == "pack":
        if names_val_split:
            raise RequestError("data.val_split cannot be set for a pack, which has a split already", "leave it out")
        place, index = _open_pack(config)
        split, description = _validation_of_pack(index, contents)
        if not len(split):
            raise RequestError(f"data.root={place} holds no image to evaluate the model on")
        index = replace(index, val=split)
        source = _make_source(config, place, replace(index, val=_relabel_validation(index, classes), classes=classes))
        return source, description.format(count=f"{len(split):,}", pack=f"the pack {place}")
    root = data_root(config)
    _ensure_digits(config, root)
    hold_out = None
    if (root / "val").is_dir():
        description = "the {count} images of {root}/val"
    elif hold_out := _hold_out_of_folder(root, trained, contents):
        description = "the {count} held-out images of {root}"
        if names_val_split and config.data.val_split != hold_out.share:
            raise RequestError(
                f"data.val_split={config.data.val_split:g} would include images that the model was trained on:"
                f" {hold_out.share:g} of {root} was held out; leave data.val_split out"
            )
    elif names_val_split:
        hold_out, description = _hold_out(config), "the {count} held-out images of {root}"
    else:
        description = (
            "all {count} images of {root}"
            " (it is not the data of the training; data.val_split=SHARE would hold a share out)"
        )
    ignored: Counter[str] = Counter()
    validation = scan_validation(root, classes, hold_out, ignored)
    description += f" (left out: {describe_ignored(ignored)})" if ignored else ""
    upright = config.data.orientation == "apply"
    source = source_from_index(root, Index(Split.from_entries([]), validation, classes, upright=upright))
    return source, description.format(count=f"{len(validation):,}", root=root)


def _validation_of_pack(index: Index, contents: dict[str, Any]) -> tuple[Split, str]:
    """Return the images of a pack to evaluate a checkpoint on, and a description of them."""
    # a checkpoint of an earlier version does not say which images its training held out
    if not index.is_split_by_hash or "split" not in contents:
        return index.val, "the {count} held-out images of {pack}"
    hold_out = _hold_out_of(index, contents)
    if hold_out == index.hold_out:
        return index.val, "the {count} held-out images of {pack}"
    if hold_out:
        return _join(index, hold_out), "the {count} images of {pack} that the training held out"
    return _join(index, None), "all {count} images of {pack} (it is not the data of the training)"


def _join(index: Index, hold_out: HoldOut | None) -> Split:
    """Return the images of both splits of a pack that `hold_out` chooses (None: all)."""
    splits = index.train, index.val
    names, labels = list(index.names()), np.concatenate([split.labels for split in splits])
    chosen = hold_out.chosen(zip(names, labels.tolist(), strict=True)) if hold_out else set(names)
    kept = [i for i, name in enumerate(names) if name in chosen]
    places = np.concatenate([split.places.reshape(-1, 3) for split in splits])
    places[: len(index.train), 0] = pack.train_shard(places[: len(index.train), 0])
    return Split(
        np.frombuffer(b"".join(names[i] for i in kept), np.uint8),
        np.cumsum([len(names[i]) for i in kept], dtype=np.int64),
        np.concatenate([split.sizes for split in splits])[kept],
        labels[kept],
        np.empty(0, np.uint8),
        places[kept].ravel(),
    )


def _relabel_validation(index: Index, classes: tuple[str, ...]) -> Split:
    """Return the validation images of a pack, labelled as a model of `classes` counts.

    Raises RequestError if the pack has a class that the model does not know.
    """
    known = {class_of(name): label for label, name in enumerate(classes)}
    unknown = sorted(name for name in index.classes if class_of(name) not in known)
    if unknown:
        raise RequestError(f"the pack has classes that the model does not know: {list_first(unknown, 5)}")
    labels = np.array([known[class_of(name)] for name in index.classes], np.int32)
    return replace(index.val, labels=labels[index.val.labels])


def _hold_out_of_folder(root: Path, trained: Config, contents: dict[str, Any]) -> HoldOut | None:
    """Return what a training held out of these class folders, or None if it had other data."""
    if trained.data.source == "folder" and os.path.realpath(root) == os.path.realpath(data_root(trained)):
        return _hold_out(trained)
    with suppress(RequestError):  # a folder to evaluate on may be one that cannot be trained on
        index = scan(root, _hold_out(trained))
        if index.digest == contents.get("data"):
            return _hold_out(trained)
        if trained.data.source == "pack":
            return _hold_out_of(index, contents)
    return None


def _hold_out_of(index: Index, contents: dict[str, Any]) -> HoldOut | None:
    """Return what a training held out of these images, or None if it had others.

    Images are known by all of their names, because packing changes sizes, and a split the order.
    Version 0.2 took the names as the system spells them.
    """
    match contents.get("split"):
        case {"names": names, "val_split": float(share), **more} if names in (
            index.names_digest(), index.names_digest(bytes),
        ):  # fmt: skip
            return HoldOut(share, str(more.get("split_by", "file")))  # version 0.2 knew that rule only
    return None


def _ensure_digits(config: Config, root: Path) -> None:
    if config.data.source == "digits" and _is_absent(root):
        try:
            make_digits(root)
        except RequestError:
            if _is_absent(root):  # else another process made them at the same time
                raise


def _is_absent(root: Path) -> bool:
    """Return True if `root` does not exist. Raises RequestError if it cannot be looked up."""
    try:
        root.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError as error:
        raise_if_outage(root, error)
        raise RequestError(f"data.root={root} cannot be read: {error.strerror}", PLACE_OF_DATA) from None
    return False


def source_from_index(root: Path | Store, index: Index, cache: Path | None = None, cache_bytes: int = 0) -> Source:
    """Return the images that `index` lists: of a pack if it holds places, else of a folder.

    cache, cache_bytes: of a pack in a bucket, see `data.cache`.
    """
    train: Images
    val: Images
    if isinstance(root, Store):
        from pipeline.data.remote import open_images

        train, val = open_images(root, index, cache, cache_bytes)
    elif len(index.train.places):
        train = pack.PackImages(root, index.train, "train", upright=index.upright)
        val = pack.PackImages(root, index.val, "val", upright=index.upright)
    else:
        train, val = (FolderImages(root, split, upright=index.upright) for split in (index.train, index.val))
    return Source(index.size, index.digest, index.classes, train, val, index)


def _synthetic(config: Config) -> Source:
    if config.data.num_images < config.data.num_classes:
        raise RequestError(
            f"data.num_images={config.data.num_images} leaves some of the data.num_classes={config.data.num_classes}"
            " classes without an image to train",
            "give as many images as classes, or more",
        )
    size = DataSize(config.data.num_images, -(-config.data.num_images // 4), config.data.num_classes)
    side = config.augment.size * 8 // 7
    digest = hashlib.sha256(f"synthetic {size} {side}".encode()).hexdigest()
    classes = tuple(f"class {label}" for label in range(size.num_classes))
    train = SyntheticImages("train", size.train_images, size.num_classes, side)
    return Source(size, digest, classes, train, SyntheticImages("val", size.val_images, size.num_classes, side))


def make_digits(root: Path) -> None:
    """Write scikit-learn's 1,797 digits as PNG files of 8 × 8 pixels; every fifth goes to val/."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = (digits.images * 255 / 16).round().astype(np.uint8)  # each pixel is 0 to 16
    with _atomic_folder(root) as folder:
        for i, (image, label) in enumerate(zip(pixels, digits.target, strict=True)):
            split = "val" if i % 5 == 0 else "train"
            _save(folder / split / str(label) / f"{i:04d}.png", image)


def make_synthetic(root: Path, num_images: int, num_classes: int, side: int) -> None:
    """Write `num_images` synthetic JPEG files to train, and a quarter as many for validation."""
    if num_classes < 2:
        raise RequestError("a classifier needs at least two classes", "give --classes 2 or more")
    if num_images <= 4 * (num_classes - 1):
        raise RequestError(
            f"{num_images:,} images, and a quarter as many for validation, leave some of {num_classes:,} classes empty",
            f"make at least {4 * num_classes - 3:,} images",
        )
    with _atomic_folder(root) as folder:
        counts: dict[SplitName, int] = {"train": num_images, "val": -(-num_images // 4)}
        for split, count in counts.items():
            images = SyntheticImages(split, count, num_classes, side)
            for i in range(count):
                name = folder / split / f"class-{images.label(i):04d}" / f"{i:07d}.jpg"
                _save(name, images.read(i).transpose(1, 2, 0), quality=95)


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


def _save(path: Path, image: NDArray[np.uint8], **options: Any) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path, **options)
