"""`pipeline data check`: look at every file of a data set once, and say what is wrong with it.

Defects are files that a training cannot use: they end the check with exit code 4. Warnings are
about images that can be read: the same bytes in training and validation, twice in a class or in two
classes, images that are all but black, and classes without a validation image.
"""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pipeline.addons.datasets import pack
from pipeline.addons.store.bucket import ConflictError, MissingError, Store
from pipeline.data import checksums, manifest, sources
from pipeline.data.access import Images, UnreadableError, check_folder, printable_name
from pipeline.data.holdout import HoldOut
from pipeline.data.index import Index
from pipeline.errors import RequestError, StorageError, TemporaryError, count_of
from pipeline.machine import available_cpus

DARK = 8
"""An image is dark if all of its pixels are below this value, of 255."""
_TASKS_AT_ONCE = 10_000  # each task in the queue of a pool takes 1 KB
_LISTED = 5
"""Images that the page lists below a warning; JSON has all."""
_CLASSES = 20
"""Classes that the page lists at most; JSON has all."""
Pairs = list[tuple[int, int]]
"""Pairs of equal images. An image is its position in the index, train before val."""


class Findings:
    """Defects, digests and other facts about the images of an index, found by looking at each."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.defects: dict[str, str] = {}
        self.turned = 0
        self.dark: list[str] = []
        self.digests = np.zeros((len(index.train) + len(index.val), 32), np.uint8)
        """SHA-256 of each image; zeros if it cannot be read."""
        self._undecodable: list[int] = []
        self._done = 0

    def look_at(self, images: Images, ids: Sequence[int], first: int) -> None:
        """Read, hash and decode these images of a split. first: the position of its image 0."""
        from pipeline.data.images import BadImageError, Picture  # imports torch

        def look(i: int) -> tuple[str | None, bool, bool]:
            """Return the defect, whether the image is turned, and whether it is dark."""
            try:
                data = images.read(i)
                self.digests[first + i] = np.frombuffer(_sha256(data), np.uint8)
                picture = Picture.open(data, upright=images.upright)
                pixels = picture.region(0, 0, picture.height, picture.width).numpy()
                return None, picture.orientation != 1, bool(pixels.max() < DARK)
            except (BadImageError, UnreadableError) as error:
                return str(error), False, False

        for start in range(0, len(ids), _TASKS_AT_ONCE):
            part = ids[start : start + _TASKS_AT_ONCE]
            with ThreadPoolExecutor(available_cpus()) as pool:  # decoding and hashing release the interpreter's lock
                for i, (defect, is_turned, is_dark) in zip(part, pool.map(look, part), strict=True):
                    if defect:
                        self.defects[images.name(i)] = defect
                        self._undecodable.append(first + i)
                    self.turned += is_turned
                    if is_dark:
                        self.dark.append(images.name(i))
            self._done += len(part)
            if self._done < len(self.digests):
                print(f"{self._done:,} of {len(self.digests):,} images checked", file=sys.stderr, flush=True)

    def look_at_all(self, root: Path) -> None:
        """Look at all images of a folder or of a pack in a folder."""
        source = sources.source_from_index(str(root), self.index)
        self.look_at(source.train, range(len(source.train)), 0)
        self.look_at(source.val, range(len(source.val)), len(source.train))

    def look_at_bucket(self, store: Store, shards: list[dict[str, Any]]) -> None:
        """Look at all images of a pack in a bucket. Reads each shard once, to a local file."""
        changed: dict[str, str] = {}
        train, val = self.index.train, self.index.val
        try:
            reads = _read_shards(store, [shard["name"] for shard in shards])
            for shard, (file, sha256) in zip(shards, reads, strict=True):
                with file:
                    if sha256 != shard["sha256"]:
                        changed[shard["name"]] = pack.CHANGED
                    name, _, number = shard["name"].removesuffix(".tar").partition("-")
                    split, first = (train, 0) if name == "train" else (val, len(train))
                    opened = {int(number): file.fileno()}
                    images = pack.PackImages(Path(), split, name, opened, upright=self.index.upright)
                    self.look_at(images, np.flatnonzero(split.places[::3] == int(number)).tolist(), first)
        except OSError as error:
            problem = f"the shards of {store} cannot be written to {tempfile.gettempdir()} ({error})"
            raise StorageError(f"{problem}: make room for two, or set TMPDIR to a folder on a larger disk") from None
        if left := len(self.digests) - self._done:
            raise StorageError(f"{left:,} images of {store} are in no shard of {pack.SUMMARY}: {pack.REPACK}")
        self.defects = changed | self.defects

    def name(self, image: int) -> str:
        """Return the name of an image by its position."""
        held_out = image - len(self.index.train)
        return printable_name(self.index.val.name(held_out) if held_out >= 0 else self.index.train.name(image))

    def equal_images(self) -> tuple[Pairs, Pairs]:
        """Return twins and images with two labels, as pairs of images with the same bytes.

        Twins are in train and val, or in the same class; two labels are in different classes. A
        pair may be both. Of many equal images each is paired with one, not with all: with an image
        of train if it is in val, and with one of its class if there is one. Images that cannot be
        decoded count as defects only.
        """
        num_train = len(self.index.train)
        labels = np.concatenate([self.index.train.labels, self.index.val.labels])
        words = self.digests.view(np.uint64).copy()
        words[self._undecodable] = 0
        order = np.lexsort(words.T)  # stable, so equal images stay in their order
        words = words[order]
        is_equal = (words[1:] == words[:-1]).all(1) & words[1:].any(1)  # to the image before it
        edges = np.flatnonzero(np.diff(np.concatenate([[False], is_equal, [False]])))
        twins, two_labels = [], []
        for start, end in edges.reshape(-1, 2).tolist():
            group = order[start : end + 1].tolist()
            firsts: dict[int, int] = {}  # of each class
            for image in group:
                label = int(labels[image])
                partner = firsts.get(label)
                if image >= num_train > group[0] and (partner is None or partner >= num_train):
                    partner = group[0]
                if partner is not None:
                    twins.append((partner, image))
                other = next((first for known, first in firsts.items() if known != label), None)
                if other is not None:
                    two_labels.append((other, image))
                firsts.setdefault(label, image)
        return sorted(twins), sorted(two_labels)

    def counts(self) -> list[tuple[str, int, int]]:
        """Return each class with its number of images to train and held out."""
        train, val = (
            np.bincount(split.labels, minlength=len(self.index.classes)).tolist()
            for split in (self.index.train, self.index.val)
        )
        return list(zip(self.index.classes, train, val, strict=True))

    def to_json(self) -> str:
        """Return what was found as JSON."""
        twins, two_labels = ([[self.name(i) for i in pair] for pair in pairs] for pairs in self.equal_images())
        found = {
            "images": len(self.digests), "classes": {name: train + val for name, train, val in self.counts()},
            "ignored": self.index.ignored,
            "defects": [{"file": name, "reason": reason} for name, reason in self.defects.items()],
            "turned": self.turned, "twins": twins, "two_labels": two_labels, "dark": self.dark,
        }  # fmt: skip
        return json.dumps(found)

    def page(self, root: Path | Store, kind: str, end: str) -> str:
        """Return what was found as text: counts, warnings, and a last line that sums it up."""
        images = f"{count_of(len(self.digests), 'image')} in {len(self.index.classes):,} classes"
        lines = [f"{root}: {images}", *self._table()]
        if self.turned:
            lines.append(f"turned upright as their EXIF orientation says: {count_of(self.turned, 'image')}")
        warnings = list(self._warnings())
        for found, reason, names in warnings:
            lines += [f"warning: {found}: {reason}", *(f"  {name}" for name in names[:_LISTED])]
            if len(names) > _LISTED:
                lines.append(f"  and {len(names) - _LISTED:,} more (--json lists all)")
        summary = f"can be used, but has {', '.join(found for found, _, _ in warnings)}" if warnings else "is good"
        summary += f": {kind}{self.index.size.describe()}, digest {self.index.digest[:16]}{end}"
        if self.defects:
            summary = f"is not good: {count_of(len(self.defects), 'defect')}"
        return "\n".join([*lines, f"{root} {summary}"])

    def _table(self) -> list[str]:
        """Return a table of the classes; of many, the smallest and the largest."""
        rows = self.counts()
        left = max(0, len(rows) - _CLASSES)
        if left:
            rows.sort(key=lambda row: row[1])
        lines = [f"{train:10,}{val:10,}  {name}" for name, train, val in rows]
        if left:
            lines[_CLASSES // 2 : -_CLASSES // 2] = [f"{'…':>20}  {left:,} classes between them (--json lists all)"]
        return [f"{'to train':>10}{'held out':>10}  class", *lines]

    def _warnings(self) -> Iterator[tuple[str, str, list[str]]]:
        """Yield each kind of warning: what was found, the reason to warn, and names."""
        twins, two_labels = self.equal_images()
        leaks = {pair: None for pair in twins if pair[0] < len(self.index.train) <= pair[1]}
        repeated = [pair for pair in twins if pair not in leaks]
        for pairs, place in (
            ([*leaks], "in training and in validation"), (two_labels, "in two classes"), (repeated, "twice in a class")
        ):  # fmt: skip
            if pairs:
                names = [" = ".join(map(self.name, pair)) for pair in pairs]
                yield f"{count_of(len(pairs), 'image')} {place}", "the same bytes", names
        if self.dark:
            yield count_of(len(self.dark), "dark image"), f"all pixels are below {DARK} of 255", self.dark
        if not len(self.index.val):
            yield "no validation images", "the accuracy is not measured", []
        elif empty := [name for name, _, held_out in self.counts() if not held_out]:
            classes = count_of(len(empty), "class", "es")
            yield f"{classes} without a validation image", "the accuracy is not measured there", empty


def check(root: Path | Store, val_split: float, *, write_sums: bool, as_json: bool = False) -> str:
    """Check layout and checksums, and read and decode each image. Return a page, or JSON.

    Raises RequestError if the layout is wrong; StorageError if there are defects, after the page or
    the JSON has been printed, and without JSON each defect to standard error.
    """
    kind = end = ""
    if not isinstance(root, Store):
        check_folder(root, str(root), "name an image folder, or make one with 'pipeline data make digits'")
    if isinstance(root, Store) or os.path.exists(root / pack.SUMMARY):
        if write_sums:
            raise RequestError(f"{root} is a pack, which has its sums in {pack.SUMMARY}: leave --write-sums out")
        found, kind = _check_pack(root)
        place, remedy = f"the pack {root}", "copy it again, or remove it, fix the source and pack it again"
    else:
        found, end = _check_images(root, val_split, write_sums=write_sums)
        place, remedy = f"the {len(found.digests):,} images of {root}", "fix or remove the files"
    result = found.to_json() if as_json else found.page(root, kind, end)
    if not found.defects:
        return result
    for name, defect in () if as_json else found.defects.items():
        print(f"{name}: {defect}", file=sys.stderr)
    print(result, flush=True)
    raise StorageError(f"{count_of(len(found.defects), 'defect')} in {place}: {remedy}")


def _check_images(root: Path, val_split: float, *, write_sums: bool) -> tuple[Findings, str]:
    """Look at all images of a folder. Return what was found, and the end of a line about it."""
    if write_sums and not os.access(root, os.W_OK | os.X_OK):
        raise RequestError(f"{root} is read-only: --write-sums needs to write {checksums.SUMS} there")
    index = manifest.scan(root, HoldOut(val_split))
    # a file fixed in place changes no folder's time: training would use an older cached index
    manifest.save_index(index, root / manifest.CACHE)
    found = Findings(index)
    found.look_at_all(root)
    if not write_sums:
        found.defects |= dict(checksums.check_sums(root, index, found.digests)) if index.sums else {}
    elif not found.defects:
        checksums.write_sums(root, index, found.digests)
        found.index = manifest.scan(root, HoldOut(val_split))  # its digest is over the sums, too
        return found, f", sums written to {checksums.SUMS}"
    return found, ""


def _check_pack(root: Path | Store) -> tuple[Findings, str]:
    """Look at all images of a pack. Return what was found, and the kind of pack."""
    index, summary = pack.open_index(root), pack.read_summary(root)
    manifest.check_train_classes(index, str(root))
    found = Findings(index)
    if isinstance(root, Store):
        found.look_at_bucket(root, summary["shards"])
    else:
        changed = dict(pack.changed_shards(root, summary))
        found.look_at_all(root)
        found.defects = changed | found.defects
    return found, f"a {summary['level']} pack of "


def _sha256(data: bytes | np.ndarray[Any, Any]) -> bytes:
    """Return the SHA-256 of a file, or of decoded pixels with their size."""
    if isinstance(data, bytes):
        return hashlib.sha256(data).digest()
    return hashlib.sha256(f"{data.shape}".encode() + data.tobytes()).digest()


def _read_shards(store: Store, names: list[str]) -> Iterator[tuple[BinaryIO, str]]:
    """Yield each shard as a temporary file, and its SHA-256. Reads the next one meanwhile."""
    with ThreadPoolExecutor(1) as reader:
        following: Future[tuple[BinaryIO, str]] | None = None
        for name in names:
            current, following = following, reader.submit(_read_shard, store, name)
            if current:
                yield current.result()
        if following:
            yield following.result()


def _read_shard(store: Store, name: str) -> tuple[BinaryIO, str]:
    file, sha256 = tempfile.TemporaryFile(), hashlib.sha256()  # noqa: SIM115 — returned open
    try:
        for part in store.stream(name):
            file.write(part)
            sha256.update(part)
    except (ConflictError, MissingError):
        raise TemporaryError(f"{store}/{name} was replaced or deleted during the check: check it again") from None
    file.flush()
    return file, sha256.hexdigest()
