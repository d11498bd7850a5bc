"""`pipeline data`: make a data set, fetch or import one, check one."""

import os
import shutil
import sys
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from pipeline.data import manifest, pack, sources
from pipeline.errors import RequestError, StorageError, TemporaryError
from pipeline.files import atomic_write

_AT_ONCE = 10_000  # each piece of work in a pool's queue is 1 KB


def make(kind: str, out: str | None, num_images: int, num_classes: int, side: int) -> str:
    """Writes the digits or synthetic images as an image folder; a line that says so."""
    root = Path(out or f"data/{kind}")
    if kind == "digits":
        sources.make_digits(root)
    else:
        sources.make_synthetic(root, num_images, num_classes, side)
    return f"made {root}: {_sizes(root)}"


def _sizes(root: Path) -> str:
    size = manifest.scan(root, 0.1).size
    return f"{size.train_images:,} images to train, {size.val_images:,} held out, {size.num_classes} classes"


def import_imagenet(archives: Path, out: Path, level: str | None) -> str:
    """ILSVRC2012's archives as an image folder, or as a pack; given again it goes on. A line that says what is there."""
    from pipeline.data import imagenet

    manifest.check_folder(archives, str(archives), f"name the one that holds {imagenet.TRAIN}")
    source = imagenet.open_archives(archives)
    assert source.index
    manifest.refuse_untrained(source.index, archives)
    if level:
        from pipeline.operate.pack import pack_source

        return pack_source(source, out, level)
    total, done = source.size.train_images + source.size.val_images, 0
    try:
        for written in _unpack(source, out):
            done += written
            print(f"{done:,} of {total:,} images unpacked", file=sys.stderr, flush=True)
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror}: {error.filename}") from None
    size = source.size
    return (
        f"imported {out}: {size.train_images:,} images to train, {size.val_images:,} held out, {size.num_classes} classes,"
        " as the development kit counts them"
    )


def _unpack(source: sources.Source, out: Path) -> Iterator[int]:
    """Writes each image that is not there yet; how many are, time and again."""
    from concurrent.futures import ThreadPoolExecutor

    def write(images: sources.Images, split: manifest.Split, i: int) -> None:
        path = out / os.fsdecode(split.name(i))
        if path.exists() and path.stat().st_size == split.sizes[i]:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            data = images.read(i)
        except manifest.UnreadableError as error:
            raise RequestError(f"{images.name(i)} cannot be unpacked: {error}: download the archive again") from None
        assert isinstance(data, bytes)
        atomic_write(path, data, durable=False)

    assert source.index
    with ThreadPoolExecutor(8) as pool:  # reading and writing leave the interpreter's lock
        for images, split in ((source.train, source.index.train), (source.val, source.index.val)):
            for start in range(0, len(images), _AT_ONCE):
                ids = range(start, min(start + _AT_ONCE, len(images)))
                list(pool.map(partial(write, images, split), ids))
                yield len(ids)


def get(kind: str, out: str | None) -> str:
    """Fetches imagenette by torchvision's own downloader, and lays it out; a line that says what is there."""
    root = Path(out or f"data/{kind}")
    if os.path.exists(root):
        raise RequestError(f"{root} is there already: remove it, or name another folder")
    aside = root.parent / f".{root.name}.download"
    try:
        aside.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{root} cannot be made: {error.strerror}") from None

    from torchvision.datasets import Imagenette

    tarfile.TarFile.extraction_filter = staticmethod(tarfile.data_filter)  # nothing outside, before Python 3.14 as well
    try:
        Imagenette(str(aside), split="train", size="full", download=not (aside / "imagenette2").is_dir())
        os.rename(aside / "imagenette2", root)
    except tarfile.FilterError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise StorageError(f"{kind} holds what is no part of a data set ({error}): nothing of it is used") from None
    except (OSError, RuntimeError) as error:
        raise TemporaryError(f"{kind} cannot be fetched: {error}: give the same command again") from None
    shutil.rmtree(aside, ignore_errors=True)
    return f"fetched {root}: {_sizes(root)}"


def check(root: Path, val_split: float, *, write_sums: bool) -> str:
    """Checks layout, contents against their sums, and that each image decodes; names each defect on standard error.

    RequestError for a wrong layout, StorageError if images are defect.
    """
    manifest.check_folder(root, str(root), "name an image folder, or make one with 'pipeline data make digits'")
    if os.path.exists(root / pack.SUMMARY):
        return _check_pack(root, write_sums=write_sums)
    if write_sums and not os.access(root, os.W_OK | os.X_OK):
        raise RequestError(f"{root} is read-only: --write-sums wants to write {manifest.SUMS} there")
    index = manifest.scan(root, val_split)
    manifest.store(
        index, root / manifest.CACHE
    )  # a file mended in place moves no folder's time, so training cannot see it
    has_sums = (root / manifest.SUMS).exists() and not write_sums
    defects = dict(manifest.check_sums(root, index)) if has_sums else {}
    for name, defect in _undecodable(root, index):
        defects.setdefault(name, defect)
    for name, defect in defects.items():
        print(f"{name}: {defect}", file=sys.stderr)
    size, digest = index.size, index.digest
    if defects:
        raise StorageError(
            f"{len(defects)} of {size.train_images + size.val_images:,} images in {root} are defect: mend or remove them"
        )
    if write_sums:
        manifest.write_sums(root, index)
        digest = manifest.scan(root, val_split).digest
    return (
        f"{root} is good: {size.train_images:,} images to train, {size.val_images:,} held out, {size.num_classes} classes,"
        f" digest {digest[:16]}" + (f", sums written to {manifest.SUMS}" if write_sums else "")
    )


def _check_pack(root: Path, *, write_sums: bool) -> str:
    if write_sums:
        raise RequestError(f"{root} is a pack, which has its sums in {pack.SUMMARY}: leave --write-sums out")
    index, summary = pack.open_index(root), pack.read_summary(root)
    manifest.refuse_untrained(index, root)
    defects = dict(pack.changed_shards(root, summary))
    defects |= dict(_undecodable(root, index))
    for name, defect in defects.items():
        print(f"{name}: {defect}", file=sys.stderr)
    size = index.size
    if defects:
        raise StorageError(
            f"{len(defects)} defects in the pack {root}: copy it anew, or mend the source and pack it again"
        )
    return (
        f"{root} is good: a {summary['level']} pack of {size.train_images:,} images to train, {size.val_images:,} held out,"
        f" {size.num_classes} classes, digest {index.digest[:16]}"
    )


def _undecodable(root: Path, index: manifest.Index) -> Iterator[tuple[str, str]]:
    from concurrent.futures import ThreadPoolExecutor

    from pipeline.data.images import BadImageError, decode
    from pipeline.machine import available_cpus

    source = sources.of_index(root, index)

    def defect(images: sources.Images, i: int) -> str | None:
        try:
            decode(images.read(i))
            return None
        except (BadImageError, manifest.UnreadableError) as error:
            return str(error)

    done, total = 0, len(index.train) + len(index.val)
    with ThreadPoolExecutor(available_cpus()) as pool:  # decoding leaves the interpreter's lock
        for images in (source.train, source.val):
            for start in range(0, len(images), _AT_ONCE):
                ids = range(start, min(start + _AT_ONCE, len(images)))
                for i, found in zip(ids, pool.map(partial(defect, images), ids), strict=True):
                    if found:
                        yield images.name(i), found
                done += len(ids)
                if done < total:
                    print(f"{done:,} of {total:,} images looked at", file=sys.stderr, flush=True)
