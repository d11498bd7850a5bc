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
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from pipeline.addons.datasets.file_errors import outage_error
from pipeline.addons.datasets.index import Index, Split, SplitImages
from pipeline.addons.datasets.names import printable_name
from pipeline.data.interface import Source
from pipeline.errors import RequestError, list_first

TRAIN = "ILSVRC2012_img_train.tar"
VAL = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
_DEVKIT_MD5 = "fa75699e90414af021442c21a62c3abf"  # as its page gives it
_AGAIN = "download it again"


class ArchiveImages(SplitImages):
    """One split, read from its archive."""

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
            raise _damaged(self.root, "it ends early")
        return data


def open_archives(folder: Path) -> Source:
    """Return the images of the three archives in `folder`.

    Raises RequestError that names what is missing, cut short or has the wrong number of images.
    """
    for name in (TRAIN, VAL, DEVKIT):
        if not os.path.isfile(folder / name):
            needed = f"it needs {TRAIN}, {VAL} and {DEVKIT}, as published"
            raise RequestError(f"{folder} holds no {name}", needed)
    counts, truth = _read_devkit(folder / DEVKIT)
    classes = tuple(sorted(counts))
    labels = {wnid: label for label, wnid in enumerate(classes)}
    train = []
    for member in _members(folder / TRAIN):
        wnid = member.name.removesuffix(".tar")
        for image in _members(folder / TRAIN, member.offset_data, member.size):
            train.append((f"train/{wnid}/{image.name}", image.size, labels.get(wnid, -1), image.offset_data))
    found = Counter(name.split("/")[1] for name, *_ in train)
    differing = sorted(wnid for wnid in found.keys() | counts.keys() if found[wnid] != counts.get(wnid))
    if wrong := [f"{wnid} has {found[wnid]:,} of {counts.get(wnid, 0):,}" for wnid in differing]:
        raise _damaged(folder / TRAIN, f"not what {DEVKIT} lists: {list_first(wrong, 3)}")
    wnids = {f"ILSVRC2012_val_{number:08}.JPEG": wnid for number, wnid in enumerate(truth, 1)}
    val = []
    for image in _members(folder / VAL):
        wnid = wnids.pop(image.name, "")
        val.append((f"val/{wnid}/{image.name}", image.size, labels.get(wnid, -1), image.offset_data))
    if wnids or len(val) != len(truth):
        raise _damaged(folder / VAL, f"not the {len(truth):,} images that {DEVKIT} lists")
    index = Index(_split(train), _split(val), classes)
    images = ArchiveImages(folder / TRAIN, index.train), ArchiveImages(folder / VAL, index.val)
    return Source(index.size, index.digest, classes, *images, index)


def _read_devkit(path: Path) -> tuple[dict[str, int], list[str]]:
    """Return each class's number of training images, and the class of each validation image."""
    from scipy.io import loadmat

    md5 = hashlib.md5(path.read_bytes()).hexdigest()
    if md5 != _DEVKIT_MD5:  # so its contents need no checks
        raise RequestError(f"{path} is not the published development kit: its MD5 is {md5}", _AGAIN)
    with tarfile.open(path) as kit:
        files = {member.name.rpartition("/")[2]: kit.extractfile(member) for member in kit if member.isreg()}
        meta, truth = files["meta.mat"], files["ILSVRC2012_validation_ground_truth.txt"]
        assert meta
        assert truth
        synsets = loadmat(meta, squeeze_me=True)["synsets"]
        leaves = [synset for synset in synsets if int(synset["num_children"]) == 0]
        wnids = {int(synset["ILSVRC2012_ID"]): str(synset["WNID"]) for synset in leaves}
        counts = {str(synset["WNID"]): int(synset["num_train_images"]) for synset in leaves}
        return counts, [wnids[int(line)] for line in truth.read().split()]


def _members(path: Path, start: int = 0, length: int | None = None) -> Iterator[tarfile.TarInfo]:
    """Yield the files in the tar that `path` holds at `start`, at their offsets in `path`."""
    size = path.stat().st_size
    end = size if length is None else start + length
    try:
        with open(path, "rb") as file:
            file.seek(start)
            with tarfile.open(fileobj=file, mode="r:", encoding="utf-8") as tar:
                for member in tar:
                    if not member.isreg() or not re.fullmatch(r"[\w-]+\.(JPEG|tar)", member.name, re.ASCII):
                        raise _damaged(path, f"it holds {printable_name(member.name)}")
                    if member.offset_data + member.size > min(end, size):
                        raise _damaged(path, "it ends early")
                    yield member
    except (OSError, tarfile.TarError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, why: object) -> RequestError:
    return RequestError(f"{path} is damaged or cut short ({why})", _AGAIN)


def _split(entries: list[tuple[str, int, int, int]]) -> Split:
    entries.sort()
    places = np.array([(0, offset, 0) for _, _, _, offset in entries], np.int64).ravel()
    split = Split.from_entries([(name.encode(), size, label) for name, size, label, _ in entries])
    return replace(split, places=places)
