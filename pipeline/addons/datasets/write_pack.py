"""`pipeline data pack`: makes a pack of an image folder, on all cores, in a folder or a bucket.

Promise: the same folder and level give the same bytes, in a folder and in a bucket, with any number
of workers and after any number of kills. The images of a shard follow from the source's sizes only.
One process writes a shard to a temporary file, which is renamed (for a bucket, uploaded) when it is
complete, then writes the shard's metadata; the pack's summary is written last. Each file that gets
restart markers is decoded, whole and in part, and compared with the file without them; if a pixel
differs, or if jpegtran refuses the file, it is stored without them.
"""

import hashlib
import io
import json
import os
import sys
import tarfile
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pipeline.addons.datasets import jpeg_restarts, sources
from pipeline.addons.datasets import pack as reading
from pipeline.addons.datasets.holdout import HoldOut
from pipeline.addons.datasets.images import Picture, decode
from pipeline.addons.datasets.index import MISSING, Index, Split, describe_ignored
from pipeline.addons.datasets.manifest import check_folder, scan
from pipeline.addons.datasets.pack import FORMAT, INDEX, NPY_MAGIC, REQUEST, SUMMARY, Level
from pipeline.addons.datasets.pack_target import Target, open_target
from pipeline.addons.datasets.table import Table
from pipeline.addons.run.progress import format_duration
from pipeline.addons.store.bucket import Store
from pipeline.data.augment import resize_image
from pipeline.data.interface import Source, UnreadableError
from pipeline.errors import RequestError, StorageError
from pipeline.files import parse_json
from pipeline.machine import available_cpus
from pipeline.record.terminal import Terminal
from pipeline.supervision import die_with_parent

_MIN_SHARD, _MAX_SHARD = 1 << 20, 1 << 30  # bytes
_MAX_SHARDS = 256  # each is a file that a loader worker holds open
_BLOCK = 512  # bytes, of a tar file
_COMPARED = 224  # pixels: the side at which a lossy image is compared with its source


class Shard(NamedTuple):
    """The images from `first` up to, but not including, `last` of a split."""

    split: str
    number: int
    first: int
    last: int

    @property
    def name(self) -> str:
        return reading.shard_name(self.split, self.number)

    @property
    def metadata_name(self) -> str:
        """Name of the JSON file about a complete shard, which exists until the pack is complete."""
        return f".{self.name}.json"

    @property
    def num_images(self) -> int:
        return self.last - self.first


def pack(root: Path, out: Path | Store, level_text: str, val_split: float, workers: int | None = None,
         words: list[str] | None = None) -> str:  # fmt: skip
    """Pack the image folder or table `root` into `out`, or resume that. Return a line about it.

    workers: processes that pack, by default one for each CPU. words: see `Table.named`.
    """
    level = open_level(level_text)  # refuse a wrong level before a long scan
    if table := Table.named(root, val_split, words or []):
        return pack_source(sources.source_of_table(table), out, level, workers)
    check_folder(root, str(root), "name an image folder")
    if isinstance(out, Path) and Path(os.path.realpath(out)).is_relative_to(os.path.realpath(root)):
        raise RequestError(f"{out} is inside the image folder {root}: name a folder outside it")
    return pack_source(sources.source_from_index(root, scan(root, HoldOut(val_split))), out, level, workers)


def open_level(text: str) -> Level:
    """Return a level. Raises RequestError if it is not valid, or if it needs a jpegtran."""
    level = Level.parse(text)
    if not level.raw:
        jpeg_restarts.check_jpegtran()
    return level


def pack_source(source: Source, out: Path | Store, level: Level, workers: int | None) -> str:
    """Pack any source that has an index, as `pack` does."""
    assert source.index
    if source.index.ignored:
        print(f"left out: {describe_ignored(source.index.ignored)}", file=sys.stderr)
    request = {"format": FORMAT, "level": level.text, "source": source.digest}
    target = open_target(out)
    with target.hold():
        if _claim(target, out, request):
            reading.open_index(out)
            print(f"{out} was packed before: checking its shards", file=sys.stderr, flush=True)
            changed = reading.changed_shards(out, reading.read_summary(out)) if isinstance(out, Path) else ()
            for name, defect in changed:
                raise StorageError(f"the pack {out} is damaged: {name} {defect}", reading.REPACK)
        else:
            shards = list(_shards(source.index))
            _make_shards((source, level, out), target, shards, workers or available_cpus())
            _write_summary(target, request, source.index, shards)
        target.clean()
    return _describe(out)


def _claim(target: Target, out: Path | Store, request: dict[str, Any]) -> bool:
    """Write the request, unless an earlier start has. Return True if the pack is complete."""
    is_empty = target.is_empty()  # first, because another start may write here from now on
    # in this order, because a start that ends writes the summary, then removes the request
    names = REQUEST, SUMMARY
    while not (files := {name: data for name in names if (data := target.read(name)) is not None}):
        if not is_empty:
            raise RequestError(f"{out} is not empty and holds no pack: name another folder")
        target.write_first(REQUEST, json.dumps(request).encode())
    for data in files.values():
        found: dict[str, Any] = {}
        with suppress(ValueError, TypeError):  # it is damaged
            found = dict(parse_json(data))
        if {key: found.get(key) for key in request} != request:
            if len(files) == 2:  # another pack was completed before our request was written
                target.clean()
            held = f"another source, level or format ({found.get('level')}, format {found.get('format')})"
            raise RequestError(f"{out} holds a pack of {held}: remove it, or name another folder")
    return SUMMARY in files


def _num_bytes(index: Index) -> int:
    return sum(int(split.sizes.clip(0).sum()) for split in (index.train, index.val))


def _shards(index: Index) -> Iterator[Shard]:
    """Yield shards of consecutive images, of about the same size."""
    target = min(_MAX_SHARD, max(_MIN_SHARD, _num_bytes(index) // _MAX_SHARDS))
    for name, split in (("train", index.train), ("val", index.val)):
        if not len(split):
            continue
        numbers = (np.cumsum(split.sizes.clip(0)) - split.sizes.clip(0)) // target
        bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(split)]
        for number, (first, last) in enumerate(pairwise(bounds)):
            yield Shard(name, number, first, last)


_Job = tuple[Source, Level, Path | Store]
_job: tuple[Source, Level, Target]  # shared by all tasks of a worker process, see `_start_worker`


def _make_shards(job: _Job, target: Target, shards: list[Shard], workers: int) -> None:
    """Make the shards that an earlier start has not completed."""
    complete = set(target.hidden())
    missing = [shard for shard in shards if shard.metadata_name not in complete]
    total, left = sum(shard.num_images for shard in shards), sum(shard.num_images for shard in missing)
    terminal, start = Terminal(), time.monotonic()
    try:  # forked, so that the workers share the index
        pool = ProcessPoolExecutor(workers, get_context("fork"), _start_worker, (os.getpid(), *job))
    except OSError as error:
        raise StorageError(jpeg_restarts.start_failure("packing processes", error)) from None
    try:
        tasks = {pool.submit(_make_shard, shard): shard for shard in missing}
        for number, task in enumerate(as_completed(tasks), 1):
            task.result()
            left -= tasks[task].num_images
            seconds = (time.monotonic() - start) * (len(tasks) / number - 1)
            done = f"{total - left:,} of {total:,} images packed"
            terminal.progress(done, f"{format_duration(seconds)} left")
    except BrokenProcessPool:
        remedy = "check the free memory, or give fewer --workers, then give the command again"
        raise StorageError(f"{job[2]}: a packing process was killed", remedy) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(parent: int, source: Source, level: Level, out: Path | Store) -> None:
    global _job  # noqa: PLW0603 — the way to give a pool's workers arguments once
    _job = source, level, open_target(out)
    die_with_parent(parent)  # a worker of a killed command must not write while the next command does
    torch.set_num_threads(1)


def _make_shard(shard: Shard) -> None:
    source, level, target = _job
    assert source.index
    is_train = shard.split == "train"
    images, split = (source.train, source.index.train) if is_train else (source.val, source.index.val)
    sizes, places, bad, difference = [], [], [], 0.0
    with target.create(shard.name) as file:
        # a bad image keeps its place in the index, so that sample ids are those of the folder
        for i in range(shard.first, shard.last):
            try:
                data = images.read(i)
                assert isinstance(data, bytes)
                if data.startswith(NPY_MAGIC):  # the folder's is a bad image, and the pack's would be pixels
                    raise UnreadableError("not an image in a known format")
            except UnreadableError as error:
                bad.append([images.name(i), str(error)])
                sizes.append(MISSING)
                places.append((shard.number, 0, 0))
                continue
            try:
                data, image_difference = encode(data, level)
                difference += image_difference
            except UnreadableError as error:
                bad.append([images.name(i), str(error)])
            name = split.name(i).decode("utf-8", "surrogateescape")
            member = tarfile.TarInfo(f"{name}.npy" if level.raw else name)
            member.size = len(data)
            file.write(member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))
            sizes.append(len(data))
            places.append((shard.number, file.tell(), zlib.crc32(data)))
            file.write(data + bytes(-len(data) % _BLOCK))
        file.write(bytes(2 * _BLOCK))
        total = file.tell()
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    metadata = {
        "name": shard.name, "images": shard.num_images, "bytes": total, "sha256": digest, "bad": bad,
        "difference": difference, "sizes": sizes, "places": places,
    }  # fmt: skip
    target.write(shard.metadata_name, json.dumps(metadata).encode())


def _write_summary(target: Target, request: dict[str, Any], source: Index, shards: list[Shard]) -> None:
    made = []
    for shard in shards:
        data = target.read(shard.metadata_name)
        try:
            made.append(parse_json(data or b""))
        except ValueError as error:
            problem = f"{shard.metadata_name} is damaged ({error})"
            raise StorageError(problem, "remove it and pack again") from None

    def packed(name: str, split: Split) -> Split:
        own = [metadata for shard, metadata in zip(shards, made, strict=True) if shard.split == name]
        sizes = np.array([size for metadata in own for size in metadata["sizes"]], np.int64)
        places = np.array([place for metadata in own for place in metadata["places"]], np.int64).ravel()
        return replace(split, sizes=sizes, sums=np.empty(0, np.uint8), places=places)

    train, val = packed("train", source.train), packed("val", source.val)
    index = Index(
        train, val, source.classes, hold_out=source.hold_out, label_sets=source.label_sets, table=source.table
    )
    target.write(INDEX, index.to_bytes())
    bad = [image for metadata in made for image in metadata["bad"]]
    compared = max(1, len(train) + len(val) - len(bad))
    summary = {
        **request, "index": index.digest, "images": {"train": len(train), "val": len(val)},
        "source_bytes": _num_bytes(source), "bytes": _num_bytes(index),
        "difference": round(sum(metadata["difference"] for metadata in made) / compared, 4), "bad": bad,
        "shards": [{key: shard[key] for key in ("name", "images", "bytes", "sha256")} for shard in made],
    }  # fmt: skip
    target.write(SUMMARY, json.dumps(summary, indent=1).encode() + b"\n")


def _describe(out: Path | Store) -> str:
    """Log the bad images of a pack. Return a line about it."""
    summary = reading.read_summary(out)
    for name, reason in summary["bad"]:
        print(f"bad image {name}: {reason}", file=sys.stderr)
    count, bad, packed = sum(summary["images"].values()), len(summary["bad"]), summary["bytes"]
    size = f"{packed:,} bytes, {packed / max(1, summary['source_bytes']):.1%} of the source's"
    change = summary["difference"]
    difference = f"pixels differ by {change:.2f} of 255" if change else "all pixels are equal"
    images = f"{count:,} images in {len(summary['shards'])} shards"
    return f"packed {out}: {images}, {size}; {difference}; {bad} bad"


def encode(data: bytes, level: Level) -> tuple[bytes, float]:
    """Return a file as it is packed at this level. Raises UnreadableError if it cannot be decoded.

    The number is the mean absolute difference of the pixels to the source, of 255.
    """
    picture = Picture.open(data)
    pixels = picture.region(0, 0, picture.height, picture.width)
    buffer = io.BytesIO()
    if level.raw:
        small = _downscale(pixels, level.raw / min(pixels.shape[1:]))
        np.save(buffer, small.permute(1, 2, 0).contiguous().numpy(), allow_pickle=False)
        return buffer.getvalue(), _mean_difference(pixels, small)
    if level.max_side and level.quality:
        small = _downscale(pixels, level.max_side / max(pixels.shape[1:]))
        Image.fromarray(small.permute(1, 2, 0).numpy()).save(buffer, "JPEG", quality=level.quality)
        jpeg = buffer.getvalue()
        if len(jpeg) < len(data) or small is not pixels:  # else a loss of quality would save nothing
            made = _with_restarts(jpeg, decode(jpeg))
            return made, _mean_difference(pixels, decode(made))
    return _with_restarts(data, pixels, picture.orientation), 0.0


def _with_restarts(data: bytes, pixels: Tensor, orientation: int = 1) -> bytes:
    """Return the file with restart markers, or unchanged if its pixels may differ."""
    made = jpeg_restarts.with_restarts(data, orientation)
    if made is None:
        return data
    with suppress(UnreadableError):
        picture = Picture.open(made)
        top, left = picture.height // 3, picture.width // 3
        height, width = -(-picture.height // 3), -(-picture.width // 3)
        region = picture.region(top, left, height, width)
        pairs = (decode(made), pixels), (region, pixels[:, top : top + height, left : left + width])
        # five times as fast as torch.equal
        if all(np.array_equal(first.numpy(), second.numpy()) for first, second in pairs):
            return made
    return data


def _downscale(pixels: Tensor, scale: float) -> Tensor:
    """Return the pixels scaled down; the same object if `scale` is not below 1."""
    if scale >= 1:
        return pixels
    height, width = (max(1, round(side * scale)) for side in pixels.shape[1:])
    return resize_image(pixels, height, width)


def _mean_difference(before: Tensor, after: Tensor) -> float:
    first, second = (resize_image(pixels, _COMPARED, _COMPARED).float() for pixels in (before, after))
    return float((first - second).abs().mean())
