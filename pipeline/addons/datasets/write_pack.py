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
import random
import sys
import tarfile
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pipeline.addons.datasets import jpeg_restarts, manifest
from pipeline.addons.datasets.pack import (
    FORMAT,
    INDEX,
    NPY_MAGIC,
    REPACK,
    REQUEST,
    SUMMARY,
    Level,
    changed_shards,
    open_index,
    read_summary,
    shard_name,
)
from pipeline.addons.datasets.pack_target import Target, open_target
from pipeline.addons.store.bucket import MissingError, Store
from pipeline.data import sources
from pipeline.data.access import check_folder
from pipeline.data.augment import resize_image
from pipeline.data.holdout import HoldOut
from pipeline.data.images import BadImageError, Picture, decode
from pipeline.data.index import MISSING, Index, Split, describe_ignored
from pipeline.data.interface import UnreadableError
from pipeline.data.sources import Source
from pipeline.errors import RequestError, StorageError, list_first
from pipeline.files import parse_json
from pipeline.machine import available_cpus, start_failure
from pipeline.orphan import die_with_parent
from pipeline.record.terminal import Terminal, format_duration

_MIN_SHARD, _MAX_SHARD = 1 << 20, 1 << 30  # bytes
_MAX_SHARDS = 256  # each is a file that a loader worker holds open
_BLOCK = 512  # bytes, of a tar file
_PROGRESS_EVERY_S = 1
_COMPARED = 224  # pixels: the side at which a lossy image is compared with its source


@dataclass(frozen=True)
class Shard:
    """The images from `first` up to, but not including, `last` of a split."""

    split: str
    number: int
    first: int
    last: int

    @property
    def name(self) -> str:
        return shard_name(self.split, self.number)

    @property
    def metadata_name(self) -> str:
        """Name of the JSON file about a complete shard, which exists until the pack is complete."""
        return f".{self.name}.json"

    def __len__(self) -> int:
        return self.last - self.first


class Encoded(NamedTuple):
    """An image as it is packed."""

    data: bytes
    is_unchanged: bool
    """True: these are the bytes of the source."""
    difference: float
    """Mean absolute difference of the pixels to the source, of 255."""


def pack(root: Path, out: Path | Store, level_text: str, val_split: float, workers: int | None = None) -> str:
    """Pack the image folder `root` into `out`, or resume that. Return a line about the pack.

    workers: processes that pack, by default one for each CPU.
    """
    level = Level.parse(level_text)  # refuse a wrong level before a long scan
    check_folder(root, str(root), "name an image folder")
    if (root / SUMMARY).exists():
        raise RequestError(f"{root} is a pack already: name the image folder that it was made of")
    if isinstance(out, Path) and Path(os.path.realpath(out)).is_relative_to(os.path.realpath(root)):
        raise RequestError(f"{out} is inside the image folder {root}: name a folder outside it")
    check_programs(level)
    index = manifest.scan(root, HoldOut(val_split))
    if index.ignored:
        print(f"left out: {describe_ignored(index.ignored)}", file=sys.stderr)
    return pack_source(sources.source_from_index(root, index), out, level, workers)


def check_programs(level: Level) -> None:
    """Raise RequestError that says what to install if the level needs jpegtran."""
    if not level.raw:
        jpeg_restarts.check_jpegtran()


def pack_source(source: Source, out: Path | Store, level: Level, workers: int | None) -> str:
    """Pack any source that has an index, as `pack` does."""
    assert source.index
    request = {"format": FORMAT, "level": level.text, "source": source.digest}
    target = open_target(out)
    with target.hold():
        _claim(target, out, request)
        if target.exists(SUMMARY):
            _check_complete(out)
        else:
            shards = list(_shards(source.index))
            _make_shards(source, level, target, out, shards, workers or available_cpus())
            _write_index_and_summary(target, out, request, source.index, shards)
        target.clean()
    return _describe(out, read_summary(out))


def _check_complete(out: Path | Store) -> None:
    """Check a pack that was complete before: its shards in a folder, in a bucket only their sizes.

    Raises RequestError or StorageError if it is damaged, OutageError if it cannot be read.
    """
    open_index(out)
    print(f"{out} was packed before: comparing its shards with {SUMMARY}", file=sys.stderr, flush=True)
    if isinstance(out, Path) and (changed := [name for name, _ in changed_shards(out, read_summary(out))]):
        problem = f"{list_first(changed, 3)} changed since it was packed"
        raise StorageError(f"the pack {out} is damaged: {problem}: {REPACK}")


def _claim(target: Target, out: Path | Store, request: dict[str, Any]) -> None:
    """Write the request, unless an earlier start has.

    Raises RequestError if `out` holds anything but this pack.
    """
    is_empty = target.is_empty()  # first, because another start may write here from now on
    # in this order, because a start that ends writes the summary, then removes the request
    while not (previous := [data for name in (REQUEST, SUMMARY) if (data := target.read(name)) is not None]):
        if not is_empty:
            raise RequestError(f"{out} is not empty and holds no pack: name another folder")
        target.write_first(REQUEST, json.dumps(request).encode())
    for found in map(_parse, previous):
        if {key: found.get(key) for key in request} != request:
            if len(previous) == 2:  # another pack was completed before our request was written
                target.clean()
            held = f"another source, level or format ({found.get('level')}, format {found.get('format')})"
            raise RequestError(f"{out} holds a pack of {held}: remove it, or name another folder")


def _parse(data: bytes) -> dict[str, Any]:
    """Return the contents of a JSON file, or nothing if it is damaged."""
    try:
        return dict(parse_json(data))
    except (ValueError, TypeError):
        return {}


def _shards(index: Index) -> Iterator[Shard]:
    """Yield shards of consecutive images, of about the same size."""
    total = sum(int(split.sizes.clip(0).sum()) for split in (index.train, index.val))
    target = min(_MAX_SHARD, max(_MIN_SHARD, total // _MAX_SHARDS))
    for name, split in (("train", index.train), ("val", index.val)):
        if not len(split):
            continue
        numbers = (np.cumsum(split.sizes.clip(0)) - split.sizes.clip(0)) // target
        bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(split)]
        for number, (first, last) in enumerate(pairwise(bounds)):
            yield Shard(name, number, first, last)


def _make_shards(
    source: Source, level: Level, target: Target, out: Path | Store, shards: list[Shard], workers: int
) -> None:
    """Make the shards that an earlier start has not completed."""
    complete = set(target.hidden())
    missing = [shard for shard in shards if shard.metadata_name not in complete]
    random.shuffle(missing)  # so that two starts that pack into one bucket make different shards
    terminal = Terminal()
    total, left = sum(map(len, shards)), sum(map(len, missing))
    if left < total:
        terminal.show(f"{total - left:,} of {total:,} images were packed before")
    context = get_context("fork")  # so that the index is shared
    counts = context.RawArray(
        "q", len(missing)
    )  # of images; without a lock, which a killed worker would keep
    try:
        pool = ProcessPoolExecutor(workers, context, _start_worker, (os.getpid(), source, level, out, counts))
    except OSError as error:
        raise StorageError(start_failure("packing processes", error, "give fewer --workers")) from None
    start = time.monotonic()
    try:
        pending = {pool.submit(_make_shard, shard, slot) for slot, shard in enumerate(missing)}
        while pending:
            ended, pending = wait(pending, _PROGRESS_EVERY_S, FIRST_COMPLETED)
            for future in ended:
                future.result()
            if done := sum(counts):
                rate = done / (time.monotonic() - start)
                terminal.progress(
                    f"{total - left + done:,} of {total:,} images packed", f"{rate:,.0f} images/s",
                    f"{format_duration((left - done) / rate)} left",
                )  # fmt: skip
    except BrokenProcessPool:
        remedy = "check the free memory, or give fewer --workers, then give the command again"
        raise StorageError(f"{out}: a packing process was killed: {remedy}") from None
    except MissingError:
        if not target.exists(SUMMARY):  # else another start has completed the pack and aborted our uploads
            raise
    finally:
        if done := sum(counts):
            seconds = time.monotonic() - start
            speed = f"{done / seconds:,.0f} images/s, {1000 * workers * seconds / done:.1f} ms per image and worker"
            terminal.log(f"{done:,} images packed in {format_duration(seconds)}: {speed}")
        pool.shutdown(cancel_futures=True)


_job: tuple[Source, Level, Target, Any]
"""The arguments that all tasks of a worker process share, see `_start_worker`."""


def _start_worker(parent: int, source: Source, level: Level, out: Path | Store, counts: Any) -> None:
    """Prepare a worker process. counts: of packed images, for each task."""
    global _job  # noqa: PLW0603 — the way to give a pool's workers arguments once
    _job = source, level, open_target(out), counts
    die_with_parent(parent)  # a worker of a killed command must not write while the next command does
    torch.set_num_threads(1)


def _make_shard(shard: Shard, slot: int) -> None:
    """Write the shard and its metadata. slot: the place of its count of images."""
    source, level, target, counts = _job
    assert source.index
    if target.exists(shard.metadata_name) or target.exists(SUMMARY):  # another start has made it by now
        counts[slot] = len(shard)
        return
    images, split = (
        (source.train, source.index.train) if shard.split == "train" else (source.val, source.index.val)
    )
    sizes, places, bad, unchanged, difference, sha256 = [], [], [], 0, 0.0, hashlib.sha256()
    with target.create(shard.name) as file:

        def write(data: bytes) -> None:
            file.write(data)
            sha256.update(data)

        # a bad image keeps its place in the index, so that sample ids are those of the folder
        for i in range(shard.first, shard.last):
            counts[slot] += 1
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
                data, is_unchanged, image_difference = encode(data, level)
                difference += image_difference
                unchanged += int(is_unchanged)
            except BadImageError as error:
                bad.append([images.name(i), str(error)])
            member = tarfile.TarInfo(
                split.name(i).decode("utf-8", "surrogateescape") + (".npy" if level.raw else "")
            )
            member.size = len(data)
            write(member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))
            sizes.append(len(data))
            places.append((shard.number, file.tell(), zlib.crc32(data)))
            write(data + bytes(-len(data) % _BLOCK))
        write(bytes(2 * _BLOCK))
        total = file.tell()
    metadata = {
        "name": shard.name, "images": len(shard), "bytes": total, "sha256": sha256.hexdigest(), "bad": bad,
        "unchanged": unchanged, "difference": difference, "sizes": sizes, "places": places,
    }  # fmt: skip
    target.write(shard.metadata_name, json.dumps(metadata).encode())


def _write_index_and_summary(
    target: Target, out: Path | Store, request: dict[str, Any], source: Index, shards: list[Shard]
) -> None:
    """Write the index and the summary of the pack from the metadata of all shards."""
    made = []
    for shard in shards:
        data = target.read(shard.metadata_name)
        if data is None:  # another start has completed the pack and removed them
            return
        try:
            made.append(parse_json(data))
        except ValueError as error:
            place = f"{out}/{shard.metadata_name}"
            raise StorageError(
                f"{place} is damaged ({error}): remove it and give the same command again"
            ) from None

    def packed(name: str, split: Split) -> Split:
        own = [metadata for shard, metadata in zip(shards, made, strict=True) if shard.split == name]
        sizes = np.array([size for metadata in own for size in metadata["sizes"]], np.int64)
        places = np.array([place for metadata in own for place in metadata["places"]], np.int64).ravel()
        return replace(split, sizes=sizes, sums=np.empty(0, np.uint8), places=places)

    index = Index(
        packed("train", source.train), packed("val", source.val), source.classes, hold_out=source.hold_out
    )
    target.write(INDEX, index.to_bytes())
    bad = [image for metadata in made for image in metadata["bad"]]
    compared = max(1, len(index.train) + len(index.val) - len(bad))
    summary = {
        **request, "index": index.digest, "images": {"train": len(index.train), "val": len(index.val)},
        "source_bytes": sum(int(split.sizes.clip(0).sum()) for split in (source.train, source.val)),
        "bytes": sum(int(split.sizes.clip(0).sum()) for split in (index.train, index.val)),
        "unchanged": sum(metadata["unchanged"] for metadata in made),
        "difference": round(sum(metadata["difference"] for metadata in made) / compared, 4), "bad": bad,
        "shards": [{key: metadata[key] for key in ("name", "images", "bytes", "sha256")} for metadata in made],
    }  # fmt: skip
    target.write(SUMMARY, json.dumps(summary, indent=1).encode() + b"\n")


def _describe(out: Path | Store, summary: dict[str, Any]) -> str:
    """Log the bad images of a pack. Return a line about it."""
    for name, reason in summary["bad"]:
        print(f"bad image {name}: {reason}", file=sys.stderr)
    count, bad = sum(summary["images"].values()), len(summary["bad"])
    size = f"{summary['bytes']:,} bytes, {summary['bytes'] / max(1, summary['source_bytes']):.1%} of the source's"
    if summary["level"] == "lossless":
        change = f"pixels equal in all, {summary['unchanged']:,} stored unchanged"
    else:
        change = f"lossy: pixels differ by {summary['difference']:.2f} of 255 on average at {_COMPARED} px"
    return f"packed {out}: {count:,} images in {len(summary['shards'])} shards, {size}; {change}; {bad} bad"


def encode(data: bytes, level: Level) -> Encoded:
    """Return a file as it is packed at this level. Raises BadImageError if it cannot be decoded."""
    picture = Picture.open(data)
    pixels = picture.region(0, 0, picture.height, picture.width)
    buffer = io.BytesIO()
    if level.raw:
        small = _downscale(pixels, level.raw / min(pixels.shape[1:]))
        np.save(buffer, small.permute(1, 2, 0).contiguous().numpy(), allow_pickle=False)
        return Encoded(buffer.getvalue(), False, _mean_difference(pixels, small))
    if level.max_side and level.quality:
        small = _downscale(pixels, level.max_side / max(pixels.shape[1:]))
        Image.fromarray(small.permute(1, 2, 0).numpy()).save(buffer, "JPEG", quality=level.quality)
        jpeg = buffer.getvalue()
        if len(jpeg) < len(data) or small is not pixels:  # else a loss of quality would save nothing
            made = _with_restarts(jpeg, decode(jpeg))
            return Encoded(made, False, _mean_difference(pixels, decode(made)))
    made = _with_restarts(data, pixels, picture.orientation)
    return Encoded(made, made is data, 0.0)


def _with_restarts(data: bytes, pixels: Tensor, orientation: int = 1) -> bytes:
    """Return the file with restart markers, or unchanged if its pixels may differ."""
    made = jpeg_restarts.with_restarts(data, orientation)
    if made is None:
        return data
    try:
        picture = Picture.open(made)
        top, left = picture.height // 3, picture.width // 3
        height, width = -(-picture.height // 3), -(-picture.width // 3)
        expected = pixels[:, top : top + height, left : left + width]
        region = picture.region(top, left, height, width)
        pairs = (decode(made), pixels), (region, expected)
        if all(
            np.array_equal(first.numpy(), second.numpy()) for first, second in pairs
        ):  # five times as fast as torch
            return made
    except BadImageError:
        pass
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
