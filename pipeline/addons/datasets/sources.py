"""Sources of images: a folder, a table, a pack, also in a bucket, the digits, synthetic patterns.

Promise: every process sees the same source: the same size and digest, and for each sample id the
same name, label and file contents. Opening a source needs no torch.
"""

import os
from dataclasses import replace
from pathlib import Path

from pipeline.addons.datasets import manifest, pack, synthetic
from pipeline.addons.datasets.file_errors import open_regular, raise_if_outage, read_error
from pipeline.addons.datasets.holdout import HoldOut
from pipeline.addons.datasets.index import MISSING, Index, SplitImages
from pipeline.addons.datasets.pack import PackImages
from pipeline.addons.datasets.table import Table
from pipeline.config.schema import Config
from pipeline.data.interface import Images, Source, UnreadableError
from pipeline.errors import RequestError
from pipeline.plan import DataSize

DIGITS_ROOT = "data/digits"
DIGITS_SIZE = DataSize(train_images=1437, val_images=360, num_classes=10)


class FolderImages(SplitImages):
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
            remedy = "'pipeline data check' updates the index"
            raise UnreadableError(f"changed since it was indexed, when {was}: {remedy}")
        return data


def data_root(config: Config) -> Path:
    """Return the folder of the data; the digits have a default."""
    return Path(_place(config))


def _place(config: Config) -> str:
    if config.data.source == "table" and config.data.table:
        return str(Table(config, None).root)
    return str(config.data.root or DIGITS_ROOT)


def data_size(config: Config) -> DataSize:
    """Return the size of the data. The digits need not be made for it."""
    return DIGITS_SIZE if config.data.source == "digits" else open_source(config).size


def open_source(config: Config, *, check_sizes: bool = False) -> Source:
    """Return the source that the configuration names. The digits are made on first use.

    check_sizes: see `manifest.open_index`. Raises RequestError if the data is missing or laid out
    wrong.
    """
    if config.data.source == "synthetic":
        return synthetic.synthetic_source(config)
    root = data_root(config)
    if "://" in str(config.data.root) and not config.is_in_store:
        raise RequestError(f"data.root={config.data.root} is not a folder", "copy the data to this machine")
    if config.data.source == "pack":
        index = open_pack(config)
    elif config.data.source == "table":
        table = Table(config, hold_out_of(config))
        index = table.open_index(config.run_dir / "index", check_sizes=check_sizes)
        index = replace(index, upright=config.data.orientation == "apply")
    else:
        ensure_digits(config)
        if os.path.exists(root / pack.SUMMARY):
            raise RequestError(f"data.root={root} is a pack", "set data.source=pack")
        cache = config.run_dir / "index"
        index = manifest.open_index(root, hold_out_of(config), cache, check_sizes=check_sizes)
        index = replace(index, upright=config.data.orientation == "apply")
    place = _place(config)
    if not len(index.val):
        problem = f"{place} has no image to validate on with data.val_split={index.hold_out.share:g}"
        raise RequestError(problem, "add images, or give a larger data.val_split (for a pack: --val-split)")
    return source_from_index(place, index, config)


def source_of_table(table: Table) -> Source:
    """Return the images of a table, maybe in the table itself, after looking at all of them."""
    table.may_hold_images = True
    index = table.scan()
    if not table.images_inside:
        return source_from_index(table.root, index)
    from pipeline.addons.datasets.parquet import ParquetImages

    column = table.columns["image"][0]
    train, val = (ParquetImages(table.path, split, column) for split in (index.train, index.val))
    return Source(index.size, index.digest, index.classes, train, val, index, index.label_sets)


def received_source(config: Config, data: bytes) -> Source:
    """Return the source of a process that gets the index, `data`, from rank 0."""
    return source_from_index(_place(config), Index.from_bytes(data), config)


def open_pack(config: Config) -> Index:
    """Return the index of a pack. Raises RequestError, OutageError."""
    if config.is_in_store:
        from pipeline.addons.store import remote

        return remote.open_index(str(config.data.root))
    return pack.open_index(data_root(config))


def hold_out_of(config: Config) -> HoldOut:
    return HoldOut(config.data.val_split, config.data.split_by)


def source_from_index(place: str | Path, index: Index, config: Config | None = None) -> Source:
    """Return the images that `index` lists: of a pack if it holds places, else of a folder.

    config: says how a pack in a bucket is cached.
    """
    train: Images
    val: Images
    if str(place).startswith("s3://"):
        from pipeline.addons.store import remote

        cache = Path(config.data.cache) if config and config.data.cache else None
        limit = config.data.cache_gib if config else 0
        train, val = remote.open_images(str(place), index, cache, limit)
    elif len(index.train.places):
        train = PackImages(Path(place), index.train, "train", upright=index.upright)
        val = PackImages(Path(place), index.val, "val", upright=index.upright)
    else:
        train = FolderImages(Path(place), index.train, upright=index.upright)
        val = FolderImages(Path(place), index.val, upright=index.upright)
    return Source(index.size, index.digest, index.classes, train, val, index, index.label_sets)


def ensure_digits(config: Config) -> None:
    """Make the digits, unless they are there. Raises OutageError if their storage fails."""
    if config.data.source != "digits":
        return
    root = data_root(config)
    try:
        root.stat()
    except OSError as error:
        raise_if_outage(root, error)
        try:
            synthetic.make_digits(root)
        except RequestError:
            if not os.path.exists(root):  # else another process made them at the same time
                raise
