"""`pipeline data make`, `get`, `import` and `check`: make, fetch, import or check a data set."""

import hashlib
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pipeline.data import checksums, cifar10, manifest, pack, sources
from pipeline.data.access import UnreadableError, check_folder
from pipeline.data.holdout import HoldOut
from pipeline.data.index import Index, Split
from pipeline.data.store import ConflictError, MissingError, Store
from pipeline.errors import RequestError, StorageError, TemporaryError
from pipeline.files import atomic_write

_CIFAR10_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"  # as its page gives it
_TASKS_AT_ONCE = 10_000  # each task in the queue of a pool takes 1 KB


def make(kind: str, out: str | None, num_images: int, num_classes: int, side: int) -> str:
    """Write the digits or synthetic images as an image folder. Return a line that describes it."""
    root = Path(out or f"data/{kind}")
    if kind == "digits":
        sources.make_digits(root)
    else:
        sources.make_synthetic(root, num_images, num_classes, side)
    return f"made {root}: {manifest.scan(root, HoldOut()).size.describe()}"


def import_imagenet(archives: Path, out: Path | Store, level: str | None, workers: int | None = None) -> str:
    """Write the archives of ILSVRC2012 as an image folder or a pack of `level`, or resume that.

    workers: processes that pack, by default one for each CPU. Returns a line that describes the
    result.
    """
    from pipeline.data import imagenet

    pack_level = pack.Level.parse(level) if level else None  # before the archives are read
    if isinstance(out, Store) and not pack_level:
        raise RequestError(f"{out} can hold a pack only: give its level, such as --pack max-side=500,q=90, or a folder")
    check_folder(archives, str(archives), f"name the folder that holds {imagenet.TRAIN}")
    source = imagenet.open_archives(archives)
    assert source.index
    manifest.check_train_classes(source.index, archives)
    if pack_level:
        from pipeline.operate.pack import pack_source

        return pack_source(source, out, pack_level, workers)
    assert isinstance(out, Path)
    total, done = source.size.train_images + source.size.val_images, 0
    try:
        for written in _unpack(source, out):
            done += written
            print(f"{done:,} of {total:,} images unpacked", file=sys.stderr, flush=True)
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror}: {error.filename}") from None
    return f"imported {out}: {source.size.describe()}, as the development kit counts them"


def _unpack(source: sources.Source, out: Path) -> Iterator[int]:
    """Write each image that does not exist yet. Yield the number of images after each part."""

    def write(images: sources.Images, split: Split, i: int) -> None:
        path = out / os.fsdecode(split.name(i))
        if path.exists() and path.stat().st_size == split.sizes[i]:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            data = images.read(i)
        except UnreadableError as error:
            raise RequestError(f"{images.name(i)} cannot be unpacked: {error}: download the archive again") from None
        assert isinstance(data, bytes)
        atomic_write(path, data, durable=False)

    assert source.index
    with ThreadPoolExecutor(8) as pool:  # reading and writing release the interpreter's lock
        for images, split in ((source.train, source.index.train), (source.val, source.index.val)):
            for ids in _parts(len(images)):
                list(pool.map(partial(write, images, split), ids))
                yield len(ids)


def _parts(count: int) -> Iterator[range]:
    for start in range(0, count, _TASKS_AT_ONCE):
        yield range(start, min(start + _TASKS_AT_ONCE, count))


def get(kind: str, out: str | None) -> str:
    """Fetch a data set with torchvision's downloader. Return a line that describes it."""
    root = Path(out or f"data/{kind}")
    sources.check_absent(root)
    download = root.parent / f".{root.name}.download"
    try:
        download.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{root} cannot be made: {error.strerror}") from None
    try:
        os.rename(_DATA_SETS[kind](download), root)
    except (tarfile.FilterError, ValueError) as error:
        shutil.rmtree(download, ignore_errors=True)
        problem = f"the archive of {kind} is damaged or not safe to unpack ({error})"
        raise StorageError(f"{problem}: nothing of it is used") from None
    except (OSError, RuntimeError) as error:
        raise TemporaryError(f"{kind} cannot be fetched: {error}: give the same command again") from None
    shutil.rmtree(download, ignore_errors=True)
    return f"fetched {root}: {manifest.scan(root, HoldOut()).size.describe()}"


def _get_imagenette(download: Path) -> Path:
    """Fetch and unpack Imagenette. Return the folder of its images."""
    from torchvision.datasets import Imagenette

    tarfile.TarFile.extraction_filter = staticmethod(tarfile.data_filter)  # the default from Python 3.14 on
    folder = download / "imagenette2"
    Imagenette(str(download), split="train", size="full", download=not folder.is_dir())
    return folder


def _get_cifar10(download: Path) -> Path:
    """Fetch CIFAR-10 in its binary form, which needs no pickle, and write its images as PNG files.

    Return their folder. Raises ValueError if the archive is not CIFAR-10.
    """
    from torchvision.datasets.utils import download_url

    archive = download / "cifar-10-binary.tar.gz"
    download_url(f"https://www.cs.toronto.edu/~kriz/{archive.name}", str(download), archive.name, _CIFAR10_MD5)
    folder = download / "images"
    shutil.rmtree(folder, ignore_errors=True)
    cifar10.unpack(archive, folder)
    return folder


_DATA_SETS: dict[str, Callable[[Path], Path]] = {"imagenette": _get_imagenette, "cifar10": _get_cifar10}


def check(root: Path | Store, val_split: float, *, write_sums: bool) -> str:
    """Check layout, checksums and that each image decodes. Log each defect to standard error.

    Returns a line that describes the data. Raises RequestError if the layout is wrong, StorageError
    if images are corrupt.
    """
    if isinstance(root, Store):
        return _check_pack(root, write_sums=write_sums)
    check_folder(root, str(root), "name an image folder, or make one with 'pipeline data make digits'")
    if os.path.exists(root / pack.SUMMARY):
        return _check_pack(root, write_sums=write_sums)
    if write_sums and not os.access(root, os.W_OK | os.X_OK):
        raise RequestError(f"{root} is read-only: --write-sums needs to write {checksums.SUMS} there")
    index = manifest.scan(root, HoldOut(val_split))
    # a file fixed in place changes no folder's time: training would use an older cached index
    manifest.save_index(index, root / manifest.CACHE)
    has_sums = (root / checksums.SUMS).exists() and not write_sums
    defects = dict(checksums.check_sums(root, index)) if has_sums else {}
    for name, defect in _undecodable(sources.source_from_index(root, index)):
        defects.setdefault(name, defect)
    total = len(index.train) + len(index.val)
    _refuse_defects(defects, f"the {total:,} images of {root}", "fix or remove the files")
    written = ""
    if write_sums:
        checksums.write_sums(root, index)
        index = manifest.scan(root, HoldOut(val_split))  # its digest is over the sums, too
        written = f", sums written to {checksums.SUMS}"
    return f"{root} is good: {index.size.describe()}, digest {index.digest[:16]}{written}"


def _check_pack(root: Path | Store, *, write_sums: bool) -> str:
    if write_sums:
        raise RequestError(f"{root} is a pack, which has its sums in {pack.SUMMARY}: leave --write-sums out")
    index, summary = pack.open_index(root), pack.read_summary(root)
    manifest.check_train_classes(index, root)
    if isinstance(root, Store):
        defects = _stored_defects(root, index, summary["shards"])
    else:
        changed = dict(pack.changed_shards(root, summary))
        defects = changed | dict(_undecodable(sources.source_from_index(root, index)))
    _refuse_defects(defects, f"the pack {root}", "copy it again, or remove it, fix the source and pack it again")
    return f"{root} is good: a {summary['level']} pack of {index.size.describe()}, digest {index.digest[:16]}"


def _stored_defects(store: Store, index: Index, shards: list[dict[str, Any]]) -> dict[str, str]:
    """Return the defects of a pack in a bucket, by name. Reads each shard once, to a local file."""
    changed: dict[str, str] = {}
    undecodable: dict[str, str] = {}
    done, total = 0, len(index.train) + len(index.val)
    try:
        reads = _read_shards(store, [shard["name"] for shard in shards])
        for shard, (file, sha256) in zip(shards, reads, strict=True):
            with file:
                if sha256 != shard["sha256"]:
                    changed[shard["name"]] = pack.CHANGED
                split_name, _, number = shard["name"].removesuffix(".tar").partition("-")
                split = index.train if split_name == "train" else index.val
                images = pack.PackImages(Path(), split, split_name, {int(number): file.fileno()})
                ids = np.flatnonzero(split.places[::3] == int(number)).tolist()
                for part in _parts(len(ids)):
                    undecodable |= dict(_undecodable_of(images, ids[part.start : part.stop]))
            done += len(ids)
            if done < total:
                print(f"{done:,} of {total:,} images checked", file=sys.stderr, flush=True)
    except OSError as error:
        problem = f"the shards of {store} cannot be written to {tempfile.gettempdir()} ({error})"
        raise StorageError(f"{problem}: make room for two, or set TMPDIR to a folder on a larger disk") from None
    if done < total:
        raise StorageError(f"{total - done:,} images of {store} are in no shard of {pack.SUMMARY}: {pack.REPACK}")
    return changed | undecodable


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


def _refuse_defects(defects: dict[str, str], place: str, remedy: str) -> None:
    """Log each defect. Raises StorageError if there is one."""
    for name, defect in defects.items():
        print(f"{name}: {defect}", file=sys.stderr)
    if defects:
        raise StorageError(f"{len(defects)} defects in {place}: {remedy}")


def _undecodable(source: sources.Source) -> Iterator[tuple[str, str]]:
    """Yield (name, defect) for each image that cannot be read or decoded."""
    done, total = 0, len(source.train) + len(source.val)
    for images in (source.train, source.val):
        for ids in _parts(len(images)):
            yield from _undecodable_of(images, ids)
            done += len(ids)
            if done < total:
                print(f"{done:,} of {total:,} images checked", file=sys.stderr, flush=True)


def _undecodable_of(images: sources.Images, ids: Sequence[int]) -> Iterator[tuple[str, str]]:
    from pipeline.data.images import BadImageError, decode
    from pipeline.machine import available_cpus

    def defect(i: int) -> str | None:
        try:
            decode(images.read(i))
            return None
        except (BadImageError, UnreadableError) as error:
            return str(error)

    with ThreadPoolExecutor(available_cpus()) as pool:  # decoding releases the interpreter's lock
        for i, found in zip(ids, pool.map(defect, ids), strict=True):
            if found:
                yield images.name(i), found
