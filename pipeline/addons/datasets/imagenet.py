"""ImageNet (ILSVRC2012): reads the images from the published archives without unpacking them.

Promise: names and classes are those of the usual image folder
(`train/n01440764/n01440764_10026.JPEG`, `val/n01440764/ILSVRC2012_val_00000293.JPEG`), and each
class has as many images as the development kit says, 1,281,167 and 50,000 in all. Nothing has to be
unpacked, because a tar of tars is not compressed: each image is one read at a known offset of the
outer file.

    ILSVRC2012_img_train.tar         n01440764.tar, …
    ILSVRC2012_img_val.tar           ILSVRC2012_val_00000001.JPEG, …
    ILSVRC2012_devkit_t12.tar.gz     data/meta.mat, data/ILSVRC2012_validation_ground_truth.txt
"""

import hashlib
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from pipeline.data.access import outage_error
from pipeline.data.index import Index, Split, SplitImages
from pipeline.data.names import printable_name
from pipeline.data.sources import Source
from pipeline.errors import RequestError, list_first

TRAIN = "ILSVRC2012_img_train.tar"
VAL = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
_DEVKIT_MD5 = "fa75699e90414af021442c21a62c3abf"  # as its page gives it
_IMAGE = re.compile(r"(?:.*/)?([\w-]+\.JPEG)", re.ASCII)


class ArchiveImages(SplitImages):
    """One split, read from its archive."""

    root: Path

    @cached_property
    def _descriptor(self) -> int:
        return os.open(self.root, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, i: int) -> bytes:
        size, offset = self.size(i), int(self.split.places[3 * i + 1])
        try:
            data = os.pread(self._descriptor, size, offset)
        except OSError as error:
            raise outage_error(self.root, error) from None
        if len(data) != size:
            raise _cut_short(self.root, "it ends early")
        return data


def open_archives(folder: Path) -> Source:
    """Return the images of the three archives in `folder`.

    Raises RequestError that names what is missing, cut short or has the wrong number of images.
    """
    for name in (TRAIN, VAL, DEVKIT):
        if not os.path.isfile(folder / name):
            raise RequestError(
                f"{folder} holds no {name}", f"it needs {TRAIN}, {VAL} and {DEVKIT}, as published"
            )
    counts, truth = _read_devkit(folder / DEVKIT)
    classes = tuple(sorted(counts))
    labels = {wnid: label for label, wnid in enumerate(classes)}
    members = _train_members(folder / TRAIN, counts)
    train = [(f"train/{wnid}/{name}", size, labels[wnid], offset) for wnid, name, size, offset in members]
    found = Counter(classes[label] for _, _, label, _ in train)
    wrong = [
        f"{wnid} has {found[wnid]:,} of {counts[wnid]:,}" for wnid in classes if found[wnid] != counts[wnid]
    ]
    if wrong:
        raise RequestError(f"{TRAIN} is not what the kit lists: {list_first(wrong, 3)}", "download it again")
    val = []
    for name, size, offset in _members(folder / VAL, 0, (folder / VAL).stat().st_size):
        number = re.fullmatch(r"ILSVRC2012_val_(\d{8})\.JPEG", name)
        if not number or not 1 <= int(number[1]) <= len(truth):
            raise _unknown(VAL, name)
        wnid = truth[int(number[1]) - 1]
        val.append((f"val/{wnid}/{name}", size, labels[wnid], offset))
    if len({name for name, _, _, _ in val}) != len(truth):
        raise RequestError(f"{VAL} holds {len(val):,} of {len(truth):,} images", "download it again")
    index = Index(_split(train), _split(val), classes)
    images = ArchiveImages(folder / TRAIN, index.train), ArchiveImages(folder / VAL, index.val)
    return Source(index.size, index.digest, classes, *images, index)


def _read_devkit(path: Path) -> tuple[dict[str, int], list[str]]:
    """Return the number of training images of each class, and the class of each validation image.

    Raises RequestError if it is not the published file, so its contents need no checks.
    """
    from scipy.io import loadmat

    md5 = hashlib.md5(path.read_bytes()).hexdigest()
    if md5 != _DEVKIT_MD5:
        raise RequestError(
            f"{path} is not the published development kit: its MD5 is {md5}", "download it again"
        )
    with tarfile.open(path) as kit:
        files = {member.name.rpartition("/")[2]: kit.extractfile(member) for member in kit if member.isreg()}
        meta, truth = files["meta.mat"], files["ILSVRC2012_validation_ground_truth.txt"]
        assert meta
        assert truth
        leaves = [
            synset for synset in loadmat(meta, squeeze_me=True)["synsets"] if int(synset["num_children"]) == 0
        ]
        wnids = {int(synset["ILSVRC2012_ID"]): str(synset["WNID"]) for synset in leaves}
        counts = {str(synset["WNID"]): int(synset["num_train_images"]) for synset in leaves}
        return counts, [wnids[int(line)] for line in truth.read().split()]


def _train_members(path: Path, counts: dict[str, int]) -> Iterator[tuple[str, str, int, int]]:
    """Yield (class, name, bytes, offset) of each image in the tar of tars."""
    with _open_tar(path, 0) as outer:
        for member in outer:
            wnid = member.name.removesuffix(".tar").rpartition("/")[2]
            if wnid not in counts or not member.isreg():
                raise _unknown(path, member.name)
            for name, size, offset in _members(path, member.offset_data, member.size):
                yield wnid, name, size, offset


def _members(path: Path, start: int, length: int) -> Iterator[tuple[str, int, int]]:
    """Yield (name, bytes, offset) of each image in the tar that `path` holds at `start`."""
    end = start + length
    if end > path.stat().st_size:
        raise _cut_short(path, "it ends early")
    with _open_tar(path, start) as tar:
        for member in tar:
            name = _IMAGE.fullmatch(member.name)
            if member.isreg() and name:
                if member.offset_data + member.size > end:
                    raise _cut_short(path, "it ends early")
                yield name[1], member.size, member.offset_data


@contextmanager
def _open_tar(path: Path, start: int) -> Iterator[tarfile.TarFile]:
    try:
        with open(path, "rb") as file:
            file.seek(start)
            with tarfile.open(fileobj=file, mode="r:", encoding="utf-8") as tar:
                yield tar
    except (OSError, tarfile.TarError) as error:
        raise _cut_short(path, error) from None


def _unknown(archive: object, name: str) -> RequestError:
    return RequestError(f"{archive} holds {printable_name(name)}, which the development kit does not know")


def _cut_short(path: Path, why: object) -> RequestError:
    return RequestError(f"{path} is damaged or cut short ({why})", "download it again")


def _split(entries: list[tuple[str, int, int, int]]) -> Split:
    """Return the split of (name, bytes, label, offset) entries, in any order."""
    entries = sorted(entries)
    places = np.array([(0, offset, 0) for _, _, _, offset in entries], np.int64).ravel()
    names = [entry[0].encode("utf-8", "surrogateescape") for entry in entries]
    split = Split.from_entries(
        [(name, size, label) for name, (_, size, label, _) in zip(names, entries, strict=True)]
    )
    return replace(split, places=places)
