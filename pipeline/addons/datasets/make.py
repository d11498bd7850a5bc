"""`pipeline data make`, `get` and `import`: make, fetch or import a data set."""

import csv
import io
import os
import shutil
import sys
import tarfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from pipeline.addons.datasets import synthetic
from pipeline.addons.datasets.holdout import HoldOut
from pipeline.addons.datasets.index import SplitImages
from pipeline.addons.datasets.manifest import check_folder, scan
from pipeline.addons.datasets.names import printable_name
from pipeline.addons.store.bucket import Store
from pipeline.data.interface import Images, UnreadableError
from pipeline.errors import RequestError, StorageError, TemporaryError
from pipeline.files import atomic_write

_CIFAR10_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"  # as its page gives it, www.cs.toronto.edu/~kriz/cifar.html
_CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
_TASKS_AT_ONCE = 10_000  # each task in the queue of a pool takes 1 KB


def make(kind: str, root: Path, num_images: int, num_classes: int, side: int) -> str:
    """Write the digits or synthetic images as an image folder. Return a line that describes it."""
    if kind == "digits":
        synthetic.make_digits(root)
    else:
        synthetic.make_synthetic(root, num_images, num_classes, side)
    return f"made {root}: {scan(root, HoldOut()).size.describe()}"


def make_table(root: Path) -> str:
    """Write labels.csv with the images of a folder. Return a line that describes it."""
    path, index = root / "labels.csv", scan(root, HoldOut())
    synthetic.check_absent(path)
    lines = io.StringIO(newline="")
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(["path", "label", "split"])
    for name, split in (("train", index.train), ("val", index.val)):
        for i in range(len(split)):
            writer.writerow([os.fsdecode(split.name(i)), index.label_name(split.labels[i]), name])
    try:
        atomic_write(path, lines.getvalue().encode())
    except UnicodeEncodeError as error:
        name = error.object[: error.end].rpartition("\n")[2]
        raise RequestError(f"the name of {printable_name(name)!a} is not UTF-8", "rename it") from None
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror}") from None
    return f"made {path}: {index.size.describe()}"


def import_imagenet(archives: Path, out: Path | Store, level: str | None, workers: int | None = None) -> str:
    """Write the archives of ILSVRC2012 as an image folder or a pack of `level`, or resume that.

    workers: as of `write_pack.pack`. Returns a line that describes the result.
    """
    from pipeline.addons.datasets import imagenet, write_pack

    pack_level = write_pack.open_level(level) if level else None  # before the archives are read
    check_folder(archives, str(archives), f"name the folder that holds {imagenet.TRAIN}")
    if isinstance(out, Store) and not pack_level:
        given = f"{out} can hold a pack only"
        raise RequestError(given, "give its level, such as --pack max-side=500,q=90, or a folder")
    source = imagenet.open_archives(archives)
    if pack_level:
        return write_pack.pack_source(source, out, pack_level, workers)
    total, done = len(source.train) + len(source.val), 0
    try:
        with ThreadPoolExecutor(8) as pool:  # reading and writing release the interpreter's lock
            for images in (source.train, source.val):
                for start in range(0, len(images), _TASKS_AT_ONCE):
                    ids = range(start, min(start + _TASKS_AT_ONCE, len(images)))
                    list(pool.map(partial(_unpack, Path(str(out)), images), ids))
                    done += len(ids)
                    print(f"{done:,} of {total:,} images unpacked", file=sys.stderr, flush=True)
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror}: {error.filename}") from None
    return f"imported {out}: {source.size.describe()}, as the development kit counts them"


def _unpack(out: Path, images: Images, i: int) -> None:
    """Write an image, unless it was written before."""
    assert isinstance(images, SplitImages)
    path = out / os.fsdecode(images.split.name(i))
    if not path.exists() or path.stat().st_size != images.split.sizes[i]:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            data = bytes(images.read(i))
        except UnreadableError as error:
            problem = f"{images.name(i)} cannot be unpacked: {error}"
            raise RequestError(problem, "download the archive again") from None
        atomic_write(path, data, durable=False)


def get(kind: str, root: Path) -> str:
    """Fetch a data set with torchvision's downloader. Return a line that describes it."""
    synthetic.check_absent(root)
    download = root.parent / f".{root.name}.download"
    try:
        download.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{root} cannot be made: {error.strerror}") from None
    try:
        os.rename(_get_imagenette(download) if kind == "imagenette" else _get_cifar10(download), root)
    except (tarfile.FilterError, ValueError) as error:
        shutil.rmtree(download, ignore_errors=True)
        problem = f"the archive of {kind} is damaged or not safe to unpack ({error})"
        raise StorageError(f"{problem}: nothing of it is used") from None
    except (OSError, RuntimeError) as error:
        raise TemporaryError(f"{kind} cannot be fetched: {error}: give the same command again") from None
    shutil.rmtree(download, ignore_errors=True)
    return f"fetched {root}: {scan(root, HoldOut()).size.describe()}"


def _get_imagenette(download: Path) -> Path:
    from torchvision.datasets import Imagenette

    tarfile.TarFile.extraction_filter = staticmethod(tarfile.data_filter)  # the default from Python 3.14 on
    folder = download / "imagenette2"
    Imagenette(str(download), split="train", size="full", download=not folder.is_dir())
    return folder


def _get_cifar10(download: Path) -> Path:
    """Unpack the binary form of CIFAR-10, which needs no pickle, without loss."""
    from torchvision.datasets.utils import download_url

    archive, folder = download / "cifar-10-binary.tar.gz", download / "images"
    url = f"https://www.cs.toronto.edu/~kriz/{archive.name}"
    download_url(url, str(download), archive.name, _CIFAR10_MD5)
    shutil.rmtree(folder, ignore_errors=True)
    splits = {f"cifar-10-batches-bin/data_batch_{number}.bin": "train" for number in range(1, 6)}
    splits["cifar-10-batches-bin/test_batch.bin"] = "val"  # no other name in the archive is used
    written = Counter[str]()
    with tarfile.open(archive, "r|gz") as members:
        for member in members:
            split = splits.get(member.name)
            file = members.extractfile(member) if split else None
            if split and file:
                records = np.frombuffer(file.read(), np.uint8).reshape(-1, 1 + 3 * 32 * 32)
                for row, record in enumerate(records, written[split]):
                    name = f"{split}/{_CIFAR10_CLASSES[record[0]]}/{row:05}.png"
                    synthetic.save(folder / name, record[1:].reshape(3, 32, 32).transpose(1, 2, 0))
                written[split] += len(records)
                print(f"{written.total():,} images unpacked", file=sys.stderr, flush=True)
    return folder
