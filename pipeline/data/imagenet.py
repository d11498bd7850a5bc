"""ILSVRC2012 as it is published: where each image lies in the archives, so that none is unpacked twice.

Promise: names and classes are those of the usual image folder (`train/n01440764/n01440764_10026.JPEG`,
`val/n01440764/ILSVRC2012_val_00000293.JPEG`), and how many images there are is what the development kit says of each class:
1,281,167 and 50,000. Why nothing has to be unpacked: a tar of tars is not compressed, so every image is one read at a known
place of the outer file.

    ILSVRC2012_img_train.tar         n01440764.tar, … in it
    ILSVRC2012_img_val.tar           ILSVRC2012_val_00000001.JPEG, …
    ILSVRC2012_devkit_t12.tar.gz     data/meta.mat, data/ILSVRC2012_validation_ground_truth.txt
"""

import gzip
import io
import os
import re
import struct
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pipeline.data.manifest import MAX_FILE_BYTES, Index, Split, SplitImages, UnreadableError, out_of_reach, show
from pipeline.data.sources import Source
from pipeline.errors import RequestError

TRAIN = "ILSVRC2012_img_train.tar"
VAL = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
_IMAGE = re.compile(r"(?:.*/)?([\w-]+\.JPEG)", re.ASCII)
_WNID = re.compile(r"n\d{8}", re.ASCII)
_MAX_DEVKIT_BYTES = 64 << 20  # unpacked; the published one has a few MB
_MAX_META_BYTES = 16 << 20
_COMPRESSED = 15  # an element of a MATLAB file: miCOMPRESSED


@dataclass(frozen=True)
class ArchiveImages(SplitImages):
    """One split, read where it lies in its archive."""

    archive: Path
    split: Split
    _file: list[int] = field(default_factory=list, compare=False)

    def read(self, i: int) -> bytes:
        size, offset = int(self.split.sizes[i]), int(self.split.places[3 * i + 1])
        if size > MAX_FILE_BYTES:
            raise UnreadableError(f"{size:,} bytes, more than the {MAX_FILE_BYTES:,} allowed")
        try:
            if not self._file:
                self._file.append(os.open(self.archive, os.O_RDONLY | os.O_CLOEXEC))
            data = os.pread(self._file[0], size, offset)
        except OSError as error:
            raise out_of_reach(self.archive, error) from None
        if len(data) != size:
            raise _cut_short(self.archive, "it ends early")
        return data


def open_archives(folder: Path) -> Source:
    """The images of the three archives in `folder`. RequestError names what is missing, cut short or miscounted."""
    for name in (TRAIN, VAL, DEVKIT):
        if not os.path.isfile(folder / name):
            raise RequestError(f"{folder} holds no {name}: it needs {TRAIN}, {VAL} and {DEVKIT}, as published")
    counts, truth = _read_devkit(folder / DEVKIT)
    classes = tuple(sorted(counts))
    labels = {wnid: label for label, wnid in enumerate(classes)}
    train = [
        (f"train/{wnid}/{name}", size, labels[wnid], offset)
        for wnid, name, size, offset in _train(folder / TRAIN, counts)
    ]
    _check_counts(Counter(classes[label] for _, _, label, _ in train), counts)
    val = []
    for name, size, offset in _members(folder / VAL, 0, (folder / VAL).stat().st_size):
        number = re.fullmatch(r"ILSVRC2012_val_(\d{8})\.JPEG", name)
        if not number or not 1 <= int(number[1]) <= len(truth):
            raise RequestError(f"{VAL} holds {name}, which the development kit does not know")
        wnid = truth[int(number[1]) - 1]
        val.append((f"val/{wnid}/{name}", size, labels[wnid], offset))
    if len({name for name, _, _, _ in val}) != len(truth):
        raise RequestError(
            f"{VAL} holds {len(val):,} images, and the development kit {len(truth):,}: download it again"
        )
    index = Index(_split(train), _split(val), classes, None, {}, 0.1)
    return Source(
        index.size, index.digest, classes,
        ArchiveImages(folder / TRAIN, index.train), ArchiveImages(folder / VAL, index.val), index,
    )  # fmt: skip


def _read_devkit(path: Path) -> tuple[dict[str, int], list[str]]:
    """Images to train of each class, and the class of each validation image. Classes become folders' names."""
    from scipy.io import loadmat

    try:
        with gzip.open(path) as file:
            unpacked = file.read(_MAX_DEVKIT_BYTES + 1)
        if len(unpacked) > _MAX_DEVKIT_BYTES:
            raise ValueError(f"more than {_MAX_DEVKIT_BYTES:,} bytes")
        with tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:") as kit:
            files = {member.name.rpartition("/")[2]: member for member in kit if member.isreg()}
            meta, truth = (
                kit.extractfile(files[name]) for name in ("meta.mat", "ILSVRC2012_validation_ground_truth.txt")
            )
            assert meta
            assert truth
            synsets = loadmat(io.BytesIO(_small(meta.read())), squeeze_me=True)["synsets"]
            leaves = [one for one in synsets if int(one["num_children"]) == 0]
            wnids = {int(one["ILSVRC2012_ID"]): str(one["WNID"]) for one in leaves}
            wrong = [wnid for wnid in wnids.values() if not _WNID.fullmatch(wnid)]
            if wrong:
                raise ValueError(f"{show(wrong[0].encode())[:80]} is not a class: n and eight digits")
            counts = {str(one["WNID"]): int(one["num_train_images"]) for one in leaves}
            return counts, [wnids[int(line)] for line in truth.read().split()]
    except Exception as error:  # scipy, zlib and tarfile raise many kinds of errors for damaged files
        why = show(" ".join(str(error).split())[:200].encode()) or type(error).__name__
        raise RequestError(f"{path} cannot be read as the development kit ({why}): download it again") from None


def _small(mat: bytes) -> bytes:
    """Return `mat`. ValueError if it is too large, counting what its compressed elements hold."""
    at, size = 128, len(mat)  # behind the header: elements of (kind, bytes), then so many bytes
    while at + 8 <= len(mat) and size <= _MAX_META_BYTES:
        kind, length = struct.unpack_from("<II", mat, at)
        if kind == _COMPRESSED:
            size += len(zlib.decompressobj().decompress(mat[at + 8 : at + 8 + length], _MAX_META_BYTES))
        at += 8 + length
    if size > _MAX_META_BYTES:
        raise ValueError(f"meta.mat has more than {_MAX_META_BYTES:,} bytes")
    return mat


def _train(path: Path, counts: dict[str, int]) -> Iterator[tuple[str, str, int, int]]:
    """(class, name, bytes, offset) of each image in the tar of tars."""
    try:
        with tarfile.open(path, "r:") as outer:
            for member in outer:
                wnid = member.name.removesuffix(".tar").rpartition("/")[2]
                if wnid not in counts or not member.isreg():
                    raise RequestError(
                        f"{path} holds {show(member.name.encode())}, which the development kit does not know"
                    )
                for name, size, offset in _members(path, member.offset_data, member.size):
                    yield wnid, name, size, offset
    except (OSError, tarfile.TarError) as error:
        raise _cut_short(path, error) from None


def _members(path: Path, start: int, length: int) -> Iterator[tuple[str, int, int]]:
    """(name, bytes, offset) of each image in the tar that lies there in the file."""
    end = start + length
    if end > path.stat().st_size:
        raise _cut_short(path, "it ends early")
    try:
        with open(path, "rb") as file:
            file.seek(start)
            with tarfile.open(fileobj=file, mode="r:") as inner:
                for member in inner:
                    name = _IMAGE.fullmatch(member.name)
                    if member.isreg() and name:
                        if member.offset_data + member.size > end:
                            raise _cut_short(path, "it ends early")
                        yield name[1], member.size, member.offset_data
    except (OSError, tarfile.TarError) as error:
        raise _cut_short(path, error) from None


def _cut_short(path: Path, why: object) -> RequestError:
    return RequestError(f"{path} is damaged or cut short ({why}): download it again")


def _check_counts(found: Counter[str], expected: dict[str, int]) -> None:
    wrong = [
        f"{wnid} has {found[wnid]:,} of {count:,}" for wnid, count in sorted(expected.items()) if found[wnid] != count
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise RequestError(
            f"{TRAIN} holds {found.total():,} images, and the development kit says {sum(expected.values()):,}:"
            f" {', '.join(wrong[:3])}{more}: download it again"
        )


def _split(entries: list[tuple[str, int, int, int]]) -> Split:
    """From (name, bytes, label, offset) of each image, in any order."""
    entries = sorted(entries)
    places = np.array([(0, offset, 0) for _, _, _, offset in entries], np.int64).ravel()
    return replace(Split.of([(name.encode(), size, label) for name, size, label, _ in entries]), places=places)
