"""`pipeline data`: make a data set, check one."""

import sys
from pathlib import Path

from pipeline.data import manifest, sources
from pipeline.verdict import RequestError, StorageError


def make(kind: str, out: str | None, num_images: int, num_classes: int, side: int) -> str:
    """Writes the digits or synthetic images as an image folder; a line that says so."""
    root = Path(out or f"data/{kind}")
    if kind == "digits":
        sources.make_digits(root)
    else:
        sources.make_synthetic(root, num_images, num_classes, side)
    size = manifest.scan(root, 0.1).size
    return (
        f"made {root}: {size.train_images:,} images to train, {size.val_images:,} held out, {size.num_classes} classes"
    )


def check(root: Path, val_split: float, *, write_sums: bool) -> str:
    """Checks layout, contents against their sums, and that each image decodes; names each defect on standard error.

    RequestError for a wrong layout, StorageError if images are defect.
    """
    if not root.is_dir():
        raise RequestError(
            f"{root} is not a folder: name an image folder, or make one with 'pipeline data make digits'"
        )
    index = manifest.scan(root, val_split)
    found = []
    if (root / manifest.SUMS).exists() and not write_sums:
        found += list(manifest.check_sums(root))
    found += [
        line for line in _undecodable(root, index) if line.split(":")[0] not in {known.split(" ")[0] for known in found}
    ]
    for line in found:
        print(line, file=sys.stderr)
    size, digest = index.size, index.digest
    if found:
        raise StorageError(
            f"{len(found)} of {size.train_images + size.val_images:,} images in {root} are defect: mend or remove them"
        )
    if write_sums:
        manifest.write_sums(root, index)
        digest = manifest.scan(root, val_split).digest
    return (
        f"{root} is good: {size.train_images:,} images to train, {size.val_images:,} held out, {size.num_classes} classes,"
        f" digest {digest[:16]}" + (f", sums written to {manifest.SUMS}" if write_sums else "")
    )


def _undecodable(root: Path, index: manifest.Index) -> list[str]:
    from concurrent.futures import ThreadPoolExecutor

    from pipeline.data.images import BadImageError, decode
    from pipeline.data.sources import UnreadableError
    from pipeline.world import allowed_cpus

    source = sources.of_index(root, index)

    def defect(images: sources.Images, i: int) -> str | None:
        try:
            decode(images.read(i))
            return None
        except (BadImageError, UnreadableError) as error:
            return f"{images.name(i)}: {error}"

    found = []
    total = len(index.train) + len(index.val)
    with ThreadPoolExecutor(allowed_cpus()) as pool:  # decoding leaves the interpreter's lock
        done = 0
        for images in (source.train, source.val):
            for line in pool.map(lambda i, images=images: defect(images, i), range(len(images))):
                done += 1
                if done % 10_000 == 0:
                    print(f"{done:,} of {total:,} images looked at", file=sys.stderr, flush=True)
                if line:
                    found.append(line)
    return found
