"""The images that class folders without val/, or a table without a split, hold out for validation.

Promise: the choice depends on the names of the images and groups only, so it is the same for any
seed and on any machine. By class, the share of each class is held out, so no class lacks validation
images by chance. By file, each file is a draw of its own, as in version 0.2. By group, the images
of a group are on one side.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.addons.datasets.names import normal_path

RULES = ("class", "file", "group", "table")
_BY_FILE = "the files, drawn one by one as in version 0.2,"


@dataclass(frozen=True)
class HoldOut:
    """A share of images, and the rule by which they are chosen: see `data.split_by`.

    The rule "table" is a column of the table that says it for each image.
    """

    share: float = 0.1
    by: str = "class"

    def describe(self) -> str:
        of = {"class": "each class", "group": "each class, by whole groups,"}
        return f"{100 * self.share:g} % of {of.get(self.by, _BY_FILE)} held out"

    def chosen(self, images: Iterable[tuple[bytes, int]], groups: Sequence[str] = ()) -> set[bytes]:
        """Return the names of those images, of (name, label), that are held out.

        By class: the share of a class, rounded, and at least one of three images or more. They are
        the images with the lowest hashes of their names. One image at least is left.

        groups: the group of each image, for the rule "group".
        """
        if self.by == "file":
            return {name for name, _ in images if _hash(name) < self.share * 2**64}
        if self.by == "group":
            return self._chosen_groups([*images], groups)
        classes = defaultdict(list)
        for name, label in images:
            classes[label].append(name)
        held_out: set[bytes] = set()
        for names in classes.values():
            names.sort(key=lambda name: _hash(normal_path(name)))
            held_out.update(names[: self._count(len(names))])
        return held_out

    def _count(self, images: int) -> int:
        least = 1 if images >= 3 and self.share > 0 else 0
        return min(max(least, round(self.share * images)), images - 1)

    def _chosen_groups(self, images: list[tuple[bytes, int]], groups: Sequence[str]) -> set[bytes]:
        """Return the names of the images of the groups that are held out.

        In the order of their hashes, each group is taken that brings the counts of the classes
        nearer to their shares. Then a class without an image gets its smallest group. One image of
        each class at least is left.
        """
        counts: dict[str, Counter[int]] = defaultdict(Counter)
        for (_, label), group in zip(images, groups, strict=True):
            counts[group][label] += 1
        left = Counter(label for _, label in images)
        lacking = {label: self._count(count) for label, count in left.items()}
        wanted, held_out = dict(lacking), set()
        groups_of: dict[int, list[str]] = defaultdict(list)

        def take(group: str) -> None:
            held_out.add(group)
            for label, count in counts[group].items():
                left[label] -= count
                lacking[label] -= count

        def leaves_all_classes(group: str) -> bool:
            return all(left[label] > count for label, count in counts[group].items())

        for group in sorted(counts, key=lambda group: (_hash(group.encode()), group)):
            change = sum(abs(lacking[label] - n) - abs(lacking[label]) for label, n in counts[group].items())
            if change < 0 and leaves_all_classes(group):
                take(group)
            for label in counts[group]:
                groups_of[label].append(group)
        for label in sorted(wanted):
            fitting = [group for group in groups_of[label] if leaves_all_classes(group)]
            if fitting and lacking[label] == wanted[label] > 0:  # no group of this class is taken
                take(min(fitting, key=lambda group: counts[group].total()))
        return {name for (name, _), group in zip(images, groups, strict=True) if group in held_out}


def _hash(name: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
