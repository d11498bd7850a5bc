"""`pipeline data check`: look at every file of a data set once, and say what is wrong with it.

Defects are files that a training cannot use: they end the check with exit code 4. Warnings are
about images that can be read: the same bytes in training and validation, twice in a class or in two
classes, images that are all but black, and classes without a validation image.
"""

import hashlib
import json
import os
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from pipeline.addons.datasets import checksums, pack, sources
from pipeline.addons.datasets.folders import CACHE
from pipeline.addons.datasets.holdout import HoldOut
from pipeline.addons.datasets.manifest import check_folder, save_index, scan
from pipeline.addons.datasets.names import printable_name
from pipeline.addons.datasets.table import Table
from pipeline.data.interface import Images, Source, UnreadableError
from pipeline.errors import RequestError, StorageError, count_of
from pipeline.machine import available_cpus

_DARK = 8  # an image is dark if all of its pixels are below this value, of 255
_TASKS_AT_ONCE = 10_000  # each task in the queue of a pool takes 1 KB
_LISTED, _CLASSES = 5, 20  # images below a warning and classes on the page, at most; JSON has all
Pairs = list[tuple[int, int]]
"""Pairs of equal images. An image is its position in the index, train before val."""


class Findings:
    """Defects, digests and other facts about the images of a source, found by looking at each."""

    def __init__(self, source: Source) -> None:
        """source: of a folder, a table or a pack."""
        index = self.index = source.index
        self.defects: dict[str, str] = {}
        self.turned = 0
        self.dark: list[str] = []
        # SHA-256 of each image; zeros if it cannot be decoded
        self.digests = np.zeros((len(index.train) + len(index.val), 32), np.uint8)
        self.kind, self.note = "", ""  # texts before and after the size of the data on the page
        self._look_at(source.train, 0)
        self._look_at(source.val, len(source.train))

    def _look_at(self, images: Images, first: int) -> None:
        """Read, decode and hash the images of a split. first: the position of its image 0."""
        from pipeline.addons.datasets.images import Picture  # imports torch

        def look(i: int) -> tuple[str, bool, bool]:
            """Return the defect or "", whether the image is turned, and whether it is dark."""
            try:
                data = images.read(i)
                picture = Picture.open(data, upright=self.index.upright)
                pixels = picture.region(0, 0, picture.height, picture.width).numpy()
                content = data if isinstance(data, bytes) else f"{data.shape}".encode() + data.tobytes()
                self.digests[first + i] = np.frombuffer(hashlib.sha256(content).digest(), np.uint8)
                return "", picture.orientation != 1, bool(pixels.max() < _DARK)
            except UnreadableError as error:
                return str(error), False, False

        with ThreadPoolExecutor(available_cpus()) as pool:  # decoding releases the interpreter's lock
            for start in range(0, len(images), _TASKS_AT_ONCE):
                part = range(start, min(start + _TASKS_AT_ONCE, len(images)))
                for i, (defect, is_turned, is_dark) in zip(part, pool.map(look, part), strict=True):
                    if defect:
                        self.defects[images.name(i)] = defect
                    if is_dark:
                        self.dark.append(images.name(i))
                    self.turned += is_turned
                done = first + part.stop
                if done < len(self.digests):
                    print(f"{done:,} of {len(self.digests):,} images checked", file=sys.stderr, flush=True)

    def name(self, image: int) -> str:
        """Return the name of an image by its position."""
        held_out = image - len(self.index.train)
        name = self.index.train.name(image) if held_out < 0 else self.index.val.name(held_out)
        return printable_name(name)

    def equal_images(self) -> tuple[Pairs, Pairs]:
        """Return twins and images with two labels, as pairs of images with the same bytes.

        Twins are in train and val, or in the same class; two labels are in different classes. A
        pair may be both. Of many equal images each is paired with one, not with all. Images that
        cannot be decoded count as defects only.
        """
        num_train = len(self.index.train)
        labels = np.concatenate([self.index.train.labels, self.index.val.labels]).tolist()
        words = self.digests.view(np.uint64)
        _, group, count = np.unique(words, axis=0, return_inverse=True, return_counts=True)
        is_equal = (count[group.ravel()] > 1) & self.digests.any(1)
        first_of_class: dict[bytes, dict[int, int]] = defaultdict(dict)  # of each digest
        twins, two_labels = [], []
        for image in np.flatnonzero(is_equal).tolist():
            firsts = first_of_class[self.digests[image].tobytes()]
            label, earliest = labels[image], next(iter(firsts.values()), image)
            partner = earliest if image >= num_train > earliest else firsts.get(label)
            if partner is not None:
                twins.append((partner, image))
            other = next((first for known, first in firsts.items() if known != label), None)
            if other is not None:
                two_labels.append((other, image))
            firsts.setdefault(label, image)
        return sorted(twins), sorted(two_labels)

    def counts(self) -> list[tuple[str, int, int]]:
        """Return each class with its number of images to train and held out."""
        train, val = map(self.index.class_counts, (self.index.train, self.index.val))
        return list(zip(self.index.classes, train.tolist(), val.tolist(), strict=True))

    def to_json(self) -> str:
        twins, two_labels = ([[*map(self.name, pair)] for pair in pairs] for pairs in self.equal_images())
        found = {
            "images": len(self.digests), "classes": {name: train + val for name, train, val in self.counts()},
            "ignored": self.index.ignored,
            "defects": [{"file": name, "reason": reason} for name, reason in self.defects.items()],
            "turned": self.turned, "twins": twins, "two_labels": two_labels, "dark": self.dark,
        }  # fmt: skip
        return json.dumps(found)

    def page(self, root: Path) -> str:
        """Return what was found as text: counts, warnings, and a last line that sums it up."""
        rows = self.counts()
        lines = [f"{root}: {count_of(len(self.digests), 'image')} in {len(rows):,} classes"]
        lines.append(f"{'to train':>10}{'held out':>10}  class")
        if len(rows) > _CLASSES:
            rows.sort(key=lambda row: row[1])
        lines += [f"{train:10,}{val:10,}  {name}" for name, train, val in rows[:_CLASSES]]
        if len(rows) > _CLASSES:
            lines.append(f"  and {len(rows) - _CLASSES:,} larger classes (--json lists all)")
        warnings = self._warnings()
        for found, names in warnings.items():
            lines += [f"warning: {found}", *(f"  {name}" for name in names[:_LISTED])]
            if len(names) > _LISTED:
                lines.append(f"  and {len(names) - _LISTED:,} more (--json lists all)")
        summary = f"can be used, but has {', '.join(warnings)}" if warnings else "is good"
        summary += f": {self.kind}{self.index.size.describe()}, digest {self.index.digest[:16]}{self.note}"
        if self.defects:
            summary = f"is not good: {count_of(len(self.defects), 'defect')}"
        return "\n".join([*lines, f"{root} {summary}"])

    def _warnings(self) -> dict[str, list[str]]:
        """Return what to warn of, each with the names of its images or classes."""
        twins, two_labels = self.equal_images()
        num_train = len(self.index.train)
        places = {
            "in training and in validation": [pair for pair in twins if pair[0] < num_train <= pair[1]],
            "in two classes": two_labels,
            "twice in a class": [pair for pair in twins if not pair[0] < num_train <= pair[1]],
        }
        warnings = {
            f"{count_of(len(pairs), 'image')} {place}": [" = ".join(map(self.name, pair)) for pair in pairs]
            for place, pairs in places.items()
            if pairs
        }
        if self.dark:
            warnings[count_of(len(self.dark), "dark image")] = self.dark
        empty = [name for name, _, held_out in self.counts() if not held_out]
        if not len(self.index.val):
            warnings["no validation images"] = []
        elif empty:
            warnings[f"{count_of(len(empty), 'class', 'es')} without a validation image"] = empty
        return warnings


def check(root: Path, val_split: float, words: list[str], *, write_sums: bool, as_json: bool = False) -> str:
    """Check layout and checksums, and read and decode each image. Return a page, or JSON.

    words: see `Table.named`. Raises RequestError if the layout is wrong; StorageError if there are
    defects, after the page or the JSON has been printed, and without JSON each defect to standard
    error.
    """
    table = Table.named(root, val_split, words)
    if not table:
        check_folder(root, str(root), "name an image folder, or make one with 'pipeline data make digits'")
    if table or os.path.exists(root / pack.SUMMARY):
        if write_sums:
            what = "table" if table else "pack, which has its own sums"
            raise RequestError(f"{root} is a {what}", "leave --write-sums out")
        found = Findings(sources.source_of_table(table)) if table else _check_pack(root)
    else:
        found = _check_images(root, HoldOut(val_split), write_sums=write_sums)
    place, remedy = f"the {len(found.digests):,} images of {root}", "fix or remove the files"
    if found.kind:
        place, remedy = f"the pack {root}", "copy it again, or remove it, fix the source and pack it again"
    result = found.to_json() if as_json else found.page(root)
    if not found.defects:
        return result
    for name, defect in () if as_json else found.defects.items():
        print(f"{name}: {defect}", file=sys.stderr)
    print(result, flush=True)
    raise StorageError(f"{count_of(len(found.defects), 'defect')} in {place}", remedy)


def _check_images(root: Path, hold_out: HoldOut, *, write_sums: bool) -> Findings:
    if write_sums and not os.access(root, os.W_OK | os.X_OK):
        problem = f"{root} is read-only: --write-sums needs to write {checksums.SUMS} there"
        raise RequestError(problem, "make it writable, or leave --write-sums out")
    index = scan(root, hold_out)
    # a file fixed in place changes no folder's time: training would use an older cached index
    save_index(index, root / CACHE)
    found = Findings(sources.source_from_index(root, index))
    if not write_sums:
        found.defects |= dict(checksums.check_sums(root, index, found.digests)) if index.sums else {}
    elif not found.defects:
        checksums.write_sums(root, index, found.digests)
        found.index = scan(root, hold_out)  # its digest is over the sums, too
        found.note = f", sums written to {checksums.SUMS}"
    return found


def _check_pack(root: Path) -> Findings:
    index, summary = pack.open_index(root), pack.read_summary(root)
    changed = dict(pack.changed_shards(root, summary))
    found = Findings(sources.source_from_index(root, index))
    found.kind = f"a {summary['level']} pack of "
    found.defects = changed | found.defects
    return found
