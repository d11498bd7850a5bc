"""`pipeline data pack`: an image folder into a pack, on all cores.

Promise: the same folder and level give the same bytes, however many cores made them and however often they were killed on
the way. Why that holds: which images a shard has is arithmetic on the source's sizes, a shard is made by one process,
aside, and has its name and its notes only when it is whole; the pack has its summary last. In a lossless pack each file
was decoded beside what it became before it was written, whole and in part; what did not come out equal is stored as it is.
"""

import hashlib
import io
import json
import os
import sys
import tarfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pipeline.data import jpeg_restarts, manifest, sources
from pipeline.data.augment import resized
from pipeline.data.images import BadImageError, Picture, decode
from pipeline.data.manifest import Index, Split, UnreadableError
from pipeline.data.pack import ABSENT, FORMAT, INDEX, SUMMARY, Level, open_index, read_summary, shard_name
from pipeline.data.sources import Source
from pipeline.errors import RequestError, StorageError, TemporaryError
from pipeline.files import atomic_write, lock, temporary_sibling
from pipeline.machine import available_cpus
from pipeline.supervision import die_with_parent

_REQUEST = ".packing.json"
_LOCK = ".lock"
_DEATH_S = 5
_MIN_SHARD, _MAX_SHARD = 1 << 20, 1 << 30
_MOST_SHARDS = 256  # each is a file that a worker holds open
_BLOCK = 512  # of a tar file
_COMPARED = 224  # side at which a lossy image is compared with its source


@dataclass(frozen=True)
class Shard:
    """Images `first` to `last` of a split."""

    split: str
    number: int
    first: int
    last: int

    @property
    def name(self) -> str:
        return shard_name(self.split, self.number)


def pack(root: Path, out: Path, level: str, val_split: float) -> str:
    """Packs the image folder `root` into `out`, or goes on where that was interrupted; a line that says what came out."""
    _parse(level)
    manifest.check_folder(root, str(root), "name an image folder")
    return pack_source(sources.of_index(root, manifest.scan(root, val_split)), out, level)


def pack_source(source: Source, out: Path, level_text: str) -> str:
    """The same for any source that has an index."""
    level = _parse(level_text)
    request = {"format": FORMAT, "level": level.text, "source": source.digest}
    with _held(out, request):
        if (out / SUMMARY).exists():
            open_index(out)
        else:
            assert source.index is not None
            shards = list(_shards(source.index))
            _make(source, level, out, shards)
            _finish(out, request, source.index, shards)
    return _line(out, read_summary(out))


def _parse(level: str) -> Level:
    try:
        return Level.parse(level)
    except ValueError:
        raise RequestError(
            f"level {level} is not allowed: lossless, max-side=PIXELS,q=QUALITY (10 to 9999, 1 to 100) or raw=PIXELS"
            " (8 to 2048), such as max-side=500,q=90"
        ) from None


@contextmanager
def _held(out: Path, request: dict[str, Any]) -> Iterator[None]:
    """The folder is this request's, and no other process packs into it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with open(out / _LOCK, "w") as file:
            # the workers of a killed command hold its lock until they are dead, an instant later
            if not lock(file.fileno(), _DEATH_S, inherited=True):
                raise TemporaryError(f"{out} is being packed by another process: wait for it")
            summary = out / SUMMARY
            before = summary if summary.exists() else out / _REQUEST
            if before.exists():
                made = _read(before)
                if {key: made.get(key) for key in request} != request:
                    raise RequestError(
                        f"{out} holds a pack of another source or level ({made.get('level')}): remove it, or name another"
                        " folder"
                    )
            elif any(path.name not in (_LOCK, temporary_sibling(out / _REQUEST).name) for path in out.iterdir()):
                raise RequestError(f"{out} is not empty and holds no pack: name another folder")
            else:
                atomic_write(out / _REQUEST, json.dumps(request).encode())
            yield
            for path in (*out.glob(".*.json"), out / _LOCK):
                path.unlink()
    except RequestError:
        (out / _LOCK).unlink()
        raise
    except OSError as error:
        raise StorageError(f"{out} cannot be packed into: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    """What was asked of the pack that is there; nothing if that is damaged."""
    try:
        return dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError):
        return {}


def _shards(index: Index) -> Iterator[Shard]:
    """Shards of about the same size, of consecutive images."""
    total = sum(int(split.sizes.clip(0).sum()) for split in (index.train, index.val))
    target = min(_MAX_SHARD, max(_MIN_SHARD, total // _MOST_SHARDS))
    for name, split in (("train", index.train), ("val", index.val)):
        numbers = (np.cumsum(split.sizes.clip(0)) - split.sizes.clip(0)) // target
        bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(split)]
        for number, (first, last) in enumerate(pairwise(bounds)):
            yield Shard(name, number, first, last)


def _make(source: Source, level: Level, out: Path, shards: list[Shard]) -> None:
    missing = [shard for shard in shards if not (out / _notes(shard)).exists()]
    total, done = sum(shard.last - shard.first for shard in shards), 0
    done = total - sum(shard.last - shard.first for shard in missing)
    if done:
        print(f"{done:,} of {total:,} images were packed before", file=sys.stderr, flush=True)
    # forked, so that the index is shared; a worker of a killed command must not write beside that of the next
    pool = ProcessPoolExecutor(available_cpus(), get_context("fork"), _start_worker, (os.getpid(), source, level, out))
    try:
        for future in as_completed([pool.submit(_make_shard, shard) for shard in missing]):
            done += future.result()
            print(f"{done:,} of {total:,} images packed", file=sys.stderr, flush=True)
    except BrokenProcessPool:
        raise StorageError(
            f"{out}: a packing process was killed: look at memory, then give the same command again"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_work: tuple[Source, Level, Path]


def _start_worker(parent: int, *work: Any) -> None:
    global _work  # noqa: PLW0603 — how a pool's worker keeps what all of its tasks need
    _work = work
    die_with_parent(parent)
    torch.set_num_threads(1)


def _make_shard(shard: Shard) -> int:
    """Writes the shard and its notes; how many images it has."""
    source, level, out = _work
    assert source.index is not None
    images, split = (source.train, source.index.train) if shard.split == "train" else (source.val, source.index.val)
    sizes, places, bad, unchanged, difference, digest = [], [], [], 0, 0.0, hashlib.sha256()
    aside = out / f".{shard.name}"
    at = 0
    with open(aside, "wb") as file:

        def write(data: bytes) -> None:
            nonlocal at
            file.write(data)
            digest.update(data)
            at += len(data)

        for i in range(shard.first, shard.last):
            try:
                data = images.read(i)
                assert isinstance(data, bytes)
                made = data
            except UnreadableError as defect:
                bad.append([images.name(i), str(defect)])
                sizes.append(ABSENT)
                places.append((shard.number, 0, 0))
                continue
            try:
                made, is_unchanged, changed_by = encode(data, level)
                unchanged += is_unchanged
                difference += changed_by
            except (
                BadImageError
            ) as defect:  # it keeps its place, so that ids are those of the folder, and is named there too
                bad.append([images.name(i), str(defect)])
            name = os.fsdecode(split.name(i)) + (".npy" if level.raw else "")
            member = tarfile.TarInfo(name)
            member.size = len(made)
            write(member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))
            sizes.append(len(made))
            places.append((shard.number, at, zlib.crc32(made)))
            write(made + bytes(-len(made) % _BLOCK))
        write(bytes(2 * _BLOCK))
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, out / shard.name)
    notes = {
        "name": shard.name, "images": shard.last - shard.first, "bytes": at, "sha256": digest.hexdigest(), "bad": bad,
        "unchanged": unchanged, "difference": difference, "sizes": sizes, "places": places,
    }  # fmt: skip
    atomic_write(out / _notes(shard), json.dumps(notes).encode())
    return shard.last - shard.first


def _notes(shard: Shard) -> str:
    return f".{shard.name}.json"


def _finish(out: Path, request: dict[str, Any], source: Index, shards: list[Shard]) -> None:
    """The index and the summary from the notes of all shards, which then go."""
    notes = [json.loads((out / _notes(shard)).read_bytes()) for shard in shards]

    def placed(name: str, split: Split) -> Split:
        own = [note for shard, note in zip(shards, notes, strict=True) if shard.split == name]
        sizes = np.array([size for note in own for size in note["sizes"]], np.int64)
        places = np.array([place for note in own for place in note["places"]], np.int64).ravel()
        return replace(split, sizes=sizes, sums=np.empty(0, np.uint8), places=places)

    index = Index(placed("train", source.train), placed("val", source.val), source.classes, None, {}, source.val_split)
    atomic_write(out / INDEX, index.to_bytes())
    images = len(index.train) + len(index.val)
    bad = [one for note in notes for one in note["bad"]]
    compared = max(1, images - len(bad))
    summary = {
        **request,
        "index": index.digest,
        "images": {"train": len(index.train), "val": len(index.val)},
        "source_bytes": sum(int(split.sizes.clip(0).sum()) for split in (source.train, source.val)),
        "bytes": sum(int(split.sizes.clip(0).sum()) for split in (index.train, index.val)),
        "unchanged": sum(note["unchanged"] for note in notes),
        "difference": round(sum(note["difference"] for note in notes) / compared, 4),
        "bad": bad,
        "shards": [{key: note[key] for key in ("name", "images", "bytes", "sha256")} for note in notes],
    }
    atomic_write(out / SUMMARY, json.dumps(summary, indent=1).encode() + b"\n")


def _line(out: Path, summary: dict[str, Any]) -> str:
    for name, reason in summary["bad"]:
        print(f"bad image {name}: {reason}", file=sys.stderr)
    count, bad = sum(summary["images"].values()), len(summary["bad"])
    size = f"{summary['bytes']:,} bytes, {summary['bytes'] / max(1, summary['source_bytes']):.1%} of the source's"
    change = (
        f"pixels equal in all, {summary['unchanged']:,} stored as they were"
        if summary["level"] == "lossless"
        else f"lossy: pixels differ by {summary['difference']:.2f} of 255 on average at {_COMPARED} px"
    )
    return f"packed {out}: {count:,} images in {len(summary['shards'])} shards, {size}; {change}; {bad} bad"


def encode(data: bytes, level: Level) -> tuple[bytes, bool, float]:
    """An image as it is packed, whether that is the source's very bytes, and by how much its pixels differ on average.

    BadImageError if it cannot be decoded.
    """
    pixels = decode(data)
    if level.raw:
        small = _fit(pixels, level.raw / min(pixels.shape[1:]))
        buffer = io.BytesIO()
        np.save(buffer, small.permute(1, 2, 0).contiguous().numpy(), allow_pickle=False)
        return buffer.getvalue(), False, _difference(pixels, small)
    if level.max_side and level.quality:
        small = _fit(pixels, level.max_side / max(pixels.shape[1:]))
        buffer = io.BytesIO()
        Image.fromarray(small.permute(1, 2, 0).numpy()).save(buffer, "JPEG", quality=level.quality)
        if len(buffer.getvalue()) < len(data) or small is not pixels:  # else nothing is won by losing quality
            made = _cut(buffer.getvalue(), decode(buffer.getvalue()))
            return made, False, _difference(pixels, decode(made))
    made = _cut(data, pixels)
    return made, made is data, 0.0


def _cut(data: bytes, pixels: Tensor) -> bytes:
    """With restart markers if that is proved to decode to the same pixels, whole and in part; else as it is."""
    made = jpeg_restarts.with_restarts(data)
    if made is None:
        return data
    try:
        picture = Picture.of(made)
        height, width = picture.height, picture.width
        box = (height // 3, width // 3, -(-height // 3), -(-width // 3))
        is_proved = torch.equal(decode(made), pixels) and torch.equal(
            picture.region(*box), pixels[:, box[0] : box[0] + box[2], box[1] : box[1] + box[3]]
        )
    except BadImageError:
        return data
    return made if is_proved else data


def _fit(pixels: Tensor, scale: float) -> Tensor:
    """Scaled down, never up."""
    if scale >= 1:
        return pixels
    height, width = (max(1, round(side * scale)) for side in pixels.shape[1:])
    return resized(pixels, height, width)


def _difference(before: Tensor, after: Tensor) -> float:
    seen = [resized(pixels, _COMPARED, _COMPARED).float() for pixels in (before, after)]
    return float((seen[0] - seen[1]).abs().mean())
