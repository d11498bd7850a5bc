"""Sources of images: an image folder, a pack, also in a bucket, the digits, or synthetic patterns.

Promise: every process sees the same source: the same size and digest, and for each sample id the
same name, label and file contents. Opening a source needs no torch.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.config.schema import Config
from pipeline.data.access import PACK_FILE, is_bucket, open_regular, raise_if_outage, read_error
from pipeline.data.holdout import HoldOut
from pipeline.data.index import MISSING, Index, SplitImages
from pipeline.data.interface import Images, UnreadableError
from pipeline.errors import RequestError
from pipeline.lazy import part
from pipeline.plan import DataSize

DIGITS_ROOT = "data/digits"
DIGITS_SIZE = DataSize(train_images=1437, val_images=360, num_classes=10)


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
            raise read_error(path, error) from None
        if len(data) != expected:
            was = "it could not be read" if expected == MISSING else f"it had {expected:,} bytes"
            raise UnreadableError(
                f"changed since it was indexed, when {was}: 'pipeline data check' updates the index"
            )
        return data


def data_root(config: Config) -> Path:
    """Return the folder of the data; the digits have a default."""
    return Path(_place(config))


def _place(config: Config) -> str:
    return str(config.data.root or DIGITS_ROOT)


def data_size(config: Config) -> DataSize:
    """Return the size of the data, also if the digits are not made yet."""
    return DIGITS_SIZE if _lacks_digits(config) else open_source(config).size


def open_source(config: Config, *, check_sizes: bool = False) -> Source:
    """Return the source that the configuration names. The digits are made on first use.

    check_sizes: see `open_index` in addons.datasets.manifest. Raises RequestError if the data is
    missing or laid out wrong.
    """
    if config.data.source == "synthetic":
        source: Source = part("synthetic")(config)
        return source
    root = data_root(config)
    if "://" in str(config.data.root) and not is_bucket(config.data.root):
        raise RequestError(f"data.root={config.data.root} is not a folder", "copy the data to this machine")
    if config.data.source == "pack":
        index = open_pack(config)
    else:
        ensure_digits(config)
        if os.path.exists(root / PACK_FILE):
            raise RequestError(f"data.root={root} is a pack", "set data.source=pack")
        index = part("folder")(root, hold_out_of(config), config.run_dir / "index", check_sizes=check_sizes)
        index = replace(index, upright=config.data.orientation == "apply")
    part("check validation")(index, _place(config))
    return sent_source(config, index)


def open_pack(config: Config) -> Index:
    """Return the index of a pack. Raises RequestError, OutageError."""
    index: Index
    if is_bucket(config.data.root):
        index = part("pack in a bucket")(str(config.data.root))
    else:
        index = part("pack")(data_root(config))
    return index


def hold_out_of(config: Config) -> HoldOut:
    return HoldOut(config.data.val_split, config.data.split_by)


def sent_source(config: Config, index: Index) -> Source:
    """Return the source of a process that gets the index from rank 0."""
    return source_from_index(_place(config), index, config)


def source_from_index(place: str | Path, index: Index, config: Config | None = None) -> Source:
    """Return the images that `index` lists: of a pack if it holds places, else of a folder.

    config: says how a pack in a bucket is cached.
    """
    images: tuple[Images, Images]
    if is_bucket(place):
        cache, gib = (_cache(config), config.data.cache_gib) if config else (None, 0)
        images = part("images in a bucket")(str(place), index, cache, gib)
    elif len(index.train.places):
        images = part("images of a pack")(Path(place), index)
    else:
        train, val = (
            FolderImages(Path(place), split, upright=index.upright) for split in (index.train, index.val)
        )
        images = train, val
    return Source(index.size, index.digest, index.classes, *images, index)


def ensure_digits(config: Config) -> None:
    """Make the digits, unless they are there."""
    if _lacks_digits(config):
        try:
            part("digits")(data_root(config))
        except RequestError:
            if _lacks_digits(config):  # else another process made them at the same time
                raise


def _lacks_digits(config: Config) -> bool:
    """Return True if the digits are to be made. Raises OutageError if their storage fails."""
    if config.data.source != "digits":
        return False
    root = data_root(config)
    try:
        root.stat()
    except OSError as error:
        raise_if_outage(root, error)
        return True  # if it cannot be looked up, making them says why
    return False


def _cache(config: Config) -> Path | None:
    return Path(config.data.cache) if config.data.cache else None
