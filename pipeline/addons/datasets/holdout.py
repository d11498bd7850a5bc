"""The images that class folders without val/ hold out for validation.

Promise: the choice depends on the names of the images only, so it is the same for any seed and on
any machine. By class, the share of each class is held out, so no class lacks validation images by
chance. By file, each file is a draw of its own, as in version 0.2.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.addons.datasets.names import normal_path


@dataclass(frozen=True)
class HoldOut:
    """A share of images, and the rule by which they are chosen: see `data.split_by`."""

    share: float = 0.1
    by: str = "class"

    def describe(self) -> str:
        of = "each class" if self.by == "class" else "the files, drawn one by one as in version 0.2,"
        return f"{100 * self.share:g} % of {of} held out"

    def chosen(self, images: Iterable[tuple[bytes, int]]) -> set[bytes]:
        """Return the names of those images, of (name, label), that are held out.

        By class: the share of a class, rounded, and at least one of three images or more. They are
        the images with the lowest hashes of their names. One image at least is left.
        """
        if self.by == "file":
            return {name for name, _ in images if _hash(name) < self.share * 2**64}
        classes = defaultdict(list)
        for name, label in images:
            classes[label].append(name)
        held_out: set[bytes] = set()
        for names in classes.values():
            least = 1 if len(names) >= 3 and self.share > 0 else 0
            count = max(least, round(self.share * len(names)))
            names.sort(key=lambda name: _hash(normal_path(name)))
            held_out.update(names[: min(count, len(names) - 1)])
        return held_out


def _hash(name: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
