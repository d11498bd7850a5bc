"""Tables of labels: a CSV, TSV or Parquet file with a row for each image, read into an index.

Promise: a table gives the index of an image folder with the same names, labels and split. A mistake
is named by its column and its row, counted as a spreadsheet does: the header is row 1. Text stays
text: label 007 is not 7. No torch here.
"""

import csv
import hashlib
import json
import os
import posixpath
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from pipeline.addons.datasets import file_errors, manifest
from pipeline.addons.datasets.folders import CACHE, Walk, escaped_name, size_of, split_of
from pipeline.addons.datasets.holdout import HoldOut
from pipeline.addons.datasets.index import MISSING, Index, Split
from pipeline.addons.datasets.names import class_of, normal_path
from pipeline.config.load import from_yaml
from pipeline.config.schema import Config
from pipeline.errors import RequestError, count_of, list_first, one_line

_DELIMITERS = {".csv": ",", ".tsv": "\t", ".parquet": ""}
_MAX_ROWS = 20_000_000
_ODD = re.compile(r"[\\\0]|^\s+$|^[A-Za-z]:|(?:^|/)\.{0,2}(?:/|$)")
"""Matches each path that `Table._clean` changes or refuses."""
_TRUTH = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}
_AS_CSV = "save it as CSV (UTF-8), with commas between the columns"
_PLACE = "give paths that start there, or their place with data.root=FOLDER"

Rows: TypeAlias = Iterator[tuple[int, Sequence[str]]]
"""The number of each row, and its cells. The first row is the header."""


class Table:
    """A table of images. Those of split=test are left out."""

    def __init__(self, config: Config, hold_out: HoldOut | None) -> None:
        """hold_out: how to split a table without split=val; None: all of its images validate."""
        self.path = Path(str(config.data.table))
        self.root = Path(config.data.root or self.path.parent)
        self._given, self._hold_out = config.data.columns, hold_out
        given = {role: self._given.get(role, role) for role in ("path", "image", "label", "split", "group")}
        self.columns = {role: [name] if isinstance(name, str) else name for role, name in given.items()}
        """The names of the columns by their roles."""
        self.may_hold_images = False
        """Take a table that holds the images itself, which is slow to read in any other order."""
        self.images_inside: list[tuple[int, tuple[int, int, int]]] = []
        """If the images are in the table itself: the size and place of each, see `Split`."""
        self._images: list[tuple[int, str, Any, str, str]] = []  # row, path, label, split or "", group or ""
        self._names: list[bytes] = []
        self._sizes: list[int] = []
        self._places: list[tuple[int, int, int]] = []
        self._labels: dict[Any, tuple[str, ...]] = {}  # the classes that a label means, sorted
        self._has_sets = not isinstance(given["label"], str)  # an image may have several labels
        self._folders: dict[str, int] = {}
        self._ignored = Counter[str]()
        self._notes: list[str] = []

    @classmethod
    def named(cls, path: Path, val_split: float, words: list[str]) -> "Table | None":
        """Return the table at this path, or None. words: keys such as data.columns.path=NAME."""
        is_table = path.suffix.lower() in _DELIMITERS and not path.is_dir()
        if other := [word for word in words if not (is_table and word.startswith("data."))]:
            remedy = "keys of a table are data.columns.path=NAME, …"
            raise RequestError(f"{other[0]} does not go with {path}", remedy)
        if not is_table:
            return None
        keys = ["data.source=table", f"data.table={path}", *words]
        config = from_yaml("recipe: table", str(path), keys, is_saved=False)
        return cls(config, HoldOut(val_split, config.data.split_by))

    def open_index(self, spare: Path, *, check_sizes: bool) -> Index:
        """Return the index from its cache if that is current, see `manifest.open_index`."""
        digest = self._digest()
        for cached in () if check_sizes else manifest.cached_indices(self.root, spare):
            if cached.table == digest and manifest.is_current(cached, self.root):
                return cached
        index = self.scan()
        manifest.save_index(index, self.root / CACHE, spare)
        return index

    def scan(self, *, to_train: bool = True) -> Index:
        """Return the index, after looking at every row and file.

        to_train: check that each class has an image to train. Raises RequestError that names row
        and column.
        """
        digest = self._digest()
        self._read()
        labels = [self._labels[label] for _, _, label, _, _ in self._images]
        is_val, rule = self._sides(labels)
        classes = sorted({name for names in {*labels} for name in names})
        number = {name: i for i, name in enumerate(classes)}
        sets = {names: tuple(number[name] for name in names) for names in {*labels}}
        label_sets = tuple(sorted(sets.values())) if self._has_sets else ()
        position = {names: i for i, names in enumerate(label_sets or [(i,) for i in range(len(classes))])}
        ids = [position[sets[names]] for names in labels]

        def split(side: bool) -> Split:
            chosen = [i for i, held in enumerate(is_val) if held == side]
            made = Split.from_entries([(self._names[i], self._sizes[i], ids[i]) for i in chosen])
            places = [self._places[i] for i in chosen] if self._places else []
            return replace(made, places=np.array(places, np.int64).ravel())

        index = Index(
            split(False), split(True), tuple(classes), folders=self._folders, hold_out=rule,
            ignored=dict(self._ignored), label_sets=label_sets, table=digest, notes=tuple(self._notes),
        )  # fmt: skip
        counts = index.class_counts(index.train)
        if to_train and (empty := [name for name, count in zip(classes, counts, strict=True) if not count]):
            problem = f"{self.path} has no image to train of class {list_first(empty, 5)}"
            raise RequestError(problem, "give it rows to train, or leave the class out")
        if to_train and len(classes) < 2:
            held = f"one class, {classes[0]}" if classes else "no image with a label"
            raise RequestError(f"{self.path} holds {held}", "give two classes or more")
        return index

    def _sides(self, labels: list[tuple[str, ...]]) -> tuple[list[bool], HoldOut]:
        """Return whether each image validates, and by which rule: "table" if the table says it."""
        hold_out = self._hold_out or HoldOut(0)
        if hold_out.by == "group":
            self._check_groups()
        splits = [split for _, _, _, split, _ in self._images]
        if "val" in splits:
            return [split == "val" for split in splits], replace(hold_out, by="table")
        if not self._hold_out:
            return [True] * len(splits), hold_out
        counts = Counter(name for names in labels for name in names)
        # an image of several labels counts for the rarest of them
        rarest = {names: min(names, key=lambda name: (counts[name], name), default="") for names in {*labels}}
        number = {name: i for i, name in enumerate(sorted({*rarest.values()}))}
        images = [(name, number[rarest[names]]) for name, names in zip(self._names, labels, strict=True)]
        chosen = hold_out.chosen(images, [group for _, _, _, _, group in self._images])
        return [name in chosen for name in self._names], hold_out

    def _check_groups(self) -> None:
        """Raise RequestError if an image has no group, or if the split column divides a group."""
        first: dict[str, tuple[int, str]] = {}
        for row, _, _, split, group in self._images:
            other, before = first.setdefault(group, (row, split))
            if not group:
                raise self.wrong(row, "group", "missing or empty", "data.split_by=group needs one")
            if split != before:
                problem = f"{_shown(group)} is in {before} in row {other} and here in {split}"
                raise self.wrong(row, "group", problem, "give each group one split")

    def wrong(self, row: int, column: str, problem: str, remedy: str = "") -> RequestError:
        """Return the error of a cell. column: its name or its role."""
        name = self.columns.get(column, [column])[0]
        return RequestError(f"{self.path} row {row}, column {name}: {problem}", remedy)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise RequestError or OutageError for an error of the system that concerns the table."""
        try:
            yield
        except OSError as error:
            file_errors.raise_if_outage(self.path, error)
            problem = f"data.table={self.path} cannot be read: {error.strerror or one_line(error)}"
            raise RequestError(problem, "give a .csv, .tsv or .parquet file") from None

    def _digest(self) -> str:
        """Return the SHA-256 of the file and of how it is read."""
        if self.path.suffix.lower() not in _DELIMITERS:
            given = f"data.table={self.path} does not have the name of a table"
            raise RequestError(given, "give a .csv, .tsv or .parquet file")
        with self.errors(), open(self.path, "rb", opener=file_errors.open_regular) as file:
            digest = hashlib.file_digest(file, "sha256")
        digest.update(json.dumps([self._given, str(self._hold_out)]).encode())
        return digest.hexdigest()

    def _read(self) -> None:
        with self.errors():
            if self.path.suffix.lower() == ".parquet":
                from pipeline.addons.datasets import parquet  # imports pyarrow

                self._read_rows(parquet.rows(self))
            else:
                self._read_rows(self._csv_rows())
        if not (self.images_inside and self._images):
            return self._look_up()
        found = [(path.encode(), *self.images_inside[row - 2]) for row, path, *_ in self._images]
        self._names, self._sizes, self._places = ([*column] for column in zip(*found, strict=True))

    def _csv_rows(self) -> Rows:
        row, delimiter = 0, _DELIMITERS[self.path.suffix.lower()]
        with open(self.path, "rb", opener=file_errors.open_regular) as file:
            lines = (line.decode() for line in file)
            try:
                first = [next(lines, "").removeprefix("\ufeff")]
                reader = csv.reader(chain(first, lines), delimiter=delimiter, strict=True)
                for row, cells in enumerate(reader, 1):
                    yield row, cells
            except (csv.Error, UnicodeDecodeError) as error:
                problem = one_line(error) if isinstance(error, csv.Error) else "this is not UTF-8 text"
                raise RequestError(f"{self.path} row {row + 1}: {problem}", _AS_CSV) from None

    def _find_columns(self, header: list[str]) -> dict[str, list[int]]:
        """Return the places of the columns by their roles; none of one that may be missing."""
        at = {}
        for role in ("path", "label", "split", "group"):
            wrong = [name for name in self.columns[role] if header.count(name) != 1]
            if wrong and (role in ("path", "label") or role in self._given or wrong[0] in header):
                remedy = f"there are {list_first(header, 8)}: name one with data.columns.{role}=NAME"
                if len(header) < 2 and re.search("[;,\t|]|^$", "".join(header)):
                    remedy = _AS_CSV
                raise self.wrong(1, wrong[0], "twice" if wrong[0] in header else "missing", remedy)
            at[role] = [] if wrong else [header.index(name) for name in self.columns[role]]
        return at

    def _read_rows(self, rows: Rows) -> None:
        header = [name.strip() for name in next(rows, (1, []))[1]]
        at = self._find_columns(header)
        label_of, path_at, width = itemgetter(*at["label"]), at["path"][0], len(header)
        split_at, group_at = (at[role][0] if at[role] else None for role in ("split", "group"))
        first_rows: dict[Any, int] = {}  # of each label
        splits: dict[str, str] = {}
        seen: dict[str, tuple[int, str, Any, str, str]] = {}
        repeats = []
        for row, cells in rows:
            if len(cells) != width:
                if not cells:  # a blank line
                    continue
                problem = f"the row has {count_of(len(cells), 'cell')} and the header {width}"
                raise self.wrong(row, header[min(len(cells), width - 1)], problem, "quote cells with commas")
            path, label, split, group = cells[path_at], label_of(cells), "", ""
            if _ODD.search(path):
                path = self._clean(row, path)
            if not path.isascii():
                path = unicodedata.normalize("NFC", path)
            if split_at is not None and not (split := splits.get(cells[split_at], "")):
                split = splits[cells[split_at]] = self._split(row, cells[split_at])
            if group_at is not None:
                group = unicodedata.normalize("NFC", cells[group_at].strip())
            image = row, path, label, split, group
            if seen.setdefault(path, image) is not image:
                repeats.append(image)
            if split != "test":  # which may have no labels
                first_rows.setdefault(label, row)
            if row > _MAX_ROWS:
                raise RequestError(f"{self.path} has more than {_MAX_ROWS:,} rows", "divide it")
        self._labels = self._parse_labels(first_rows)
        for row, path, label, split, group in repeats:
            other, _, *then = seen[path]
            names, before = (self._labels.get(cell) for cell in (label, then[0]))
            pairs = ("split", split, then[1]), ("label", names, before), ("group", group, then[2])
            for role, one, two in pairs:
                if one != two:
                    remedy = "keep one of them; several labels are written cat;dog"
                    raise self.wrong(row, role, f"{_shown(path)} has another {role} in row {other}", remedy)
        self._images = [image for image in seen.values() if image[3] != "test"]
        left_out = {"of the test split": len(seen) - len(self._images), "repeated rows": len(repeats)}
        self._ignored += Counter(left_out)  # without those that are 0

    def _clean(self, row: int, path: str) -> str:
        """Return a path with forward slashes and without parts that change nothing."""
        clean = posixpath.normpath(path.replace("\\", "/"))
        if not path.strip() or "\0" in path:
            raise self.wrong(row, "path", "it has a NUL character" if path.strip() else "it is empty")
        if clean in (".", "..") or re.match("/|[.][.]/|[A-Za-z]:(/|$)", clean):
            raise self.wrong(row, "path", f"{_shown(path)} is no file in data.root={self.root}", _PLACE)
        return clean

    def _split(self, row: int, cell: str) -> str:
        split = split_of(cell.encode())
        if split not in ("train", "val", "test"):
            raise self.wrong(row, "split", f"{_shown(cell)} is not allowed", "give train, val or test")
        return split

    def _parse_labels(self, first_rows: dict[Any, int]) -> dict[Any, tuple[str, ...]]:
        """Return the classes that each label means; note those that are written in several ways.

        first_rows: by the label, a text or the cells of columns of 0 and 1.
        """
        are_columns = not isinstance(self._given.get("label", ""), str)
        self._has_sets |= not are_columns and any(";" in label for label in first_rows)
        ways: dict[str, set[str]] = defaultdict(set)
        classes = {}
        for label, row in first_rows.items():
            found = [] if are_columns else label.split(";") if self._has_sets else [label]
            if are_columns:
                cells = [label] if isinstance(label, str) else label
                for name, cell in zip(self.columns["label"], cells, strict=True):
                    if cell.strip().lower() not in _TRUTH:
                        raise self.wrong(row, name, f"{_shown(cell)} is not 0 or 1")
                    found += [name] if _TRUTH[cell.strip().lower()] else []
            elif "\0" in label or not (label.strip() or self._has_sets):
                problem = "it has a NUL character" if label.strip() else "it is empty"
                raise self.wrong(row, "label", problem, "give a label, or remove the row")
            for text in found:
                ways[class_of(text)].add(text.strip() if self._has_sets else text)
            classes[label] = tuple(sorted({class_of(text) for text in found if text.strip()}))
        same = [sorted(texts) for texts in ways.values() if len(texts) > 1]
        shown = [" = ".join(escaped_name(text.encode()) for text in texts) for texts in same]
        self._notes += [f"taken as one label: {list_first(sorted(shown), 3)}"] if same else []
        return classes

    def _look_up(self) -> None:
        """Find the files: their names as the file system spells them, and their sizes."""
        self._names = [path.encode() for _, path, *_ in self._images]
        self._sizes = [MISSING] * len(self._names)
        folders: dict[str, dict[bytes, int]] = defaultdict(dict)
        for i, (_, path, *_) in enumerate(self._images):
            folder, _, name = path.rpartition("/")
            folders[folder][name.encode()] = i
        walk = Walk(self.root)
        for folder, images in folders.items():
            spellings = dict.fromkeys((folder, unicodedata.normalize("NFD", folder)))
            with walk.errors():
                if any(self._list(spelling.encode(), images) for spelling in spellings):
                    continue
            row, path, *_ = self._images[next(iter(images.values()))]
            problem = f"the folder of {_shown(path)} in data.root={self.root} is missing or empty"
            raise self.wrong(row, "path", problem, _PLACE)
        if missing := [i for i, size in enumerate(self._sizes) if size == MISSING]:
            row, path, *_ = self._images[missing[0]]
            if len(missing) == len(self._images):
                problem = f"data.root={self.root} has neither {_shown(path)} nor another of the files"
                raise self.wrong(row, "path", problem, _PLACE)
            count = count_of(len(missing), "file")
            self._notes.append(f"{count} missing, such as {_shown(path)} in row {row}")

    def _list(self, folder: bytes, images: dict[bytes, int]) -> bool:
        """Look for images in a folder. Return False if that is missing or empty.

        images: their positions by their names in NFC. One listing is much faster than a look-up of
        each file on a file server.
        """
        place, prefix = os.path.join(os.fsencode(self.root), folder), folder + b"/" if folder else b""
        is_empty = True
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(place) as entries:
            self._folders[os.fsdecode(folder)] = os.stat(place).st_mtime_ns
            for entry in entries:
                is_empty, name = False, normal_path(entry.name)
                i = images.get(name)
                if i is None or (self._sizes[i] != MISSING and entry.name != name):
                    continue
                if entry.is_dir():
                    row, path, *_ = self._images[i]
                    raise self.wrong(row, "path", f"{_shown(path)} is a folder", "give a file")
                self._names[i], self._sizes[i] = prefix + entry.name, size_of(entry)
        return not is_empty


def _shown(text: str) -> str:
    return escaped_name(one_line(text, 100).encode())
