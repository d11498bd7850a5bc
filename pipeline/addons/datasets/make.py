"""`pipeline data make`, `get` and `import`: make, fetch or import a data set."""

import os
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from pipeline.addons.datasets import cifar10, manifest, synthetic
from pipeline.addons.datasets.pack import Level
from pipeline.addons.store.bucket import Store
from pipeline.data import sources
from pipeline.data.access import check_folder
from pipeline.data.holdout import HoldOut
from pipeline.data.index import SplitImages
from pipeline.data.interface import Images, UnreadableError
from pipeline.errors import RequestError, StorageError, TemporaryError
from pipeline.files import atomic_write

_CIFAR10_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"  # as its page gives it
_TASKS_AT_ONCE = 10_000  # each task in the queue of a pool takes 1 KB


def make(kind: str, root: Path, num_images: int, num_classes: int, side: int) -> str:
    """Write the digits or synthetic images as an image folder. Return a line that describes it."""
    if kind == "digits":
        synthetic.make_digits(root)
    else:
        synthetic.make_synthetic(root, num_images, num_classes, side)
    return f"made {root}: {manifest.scan(root, HoldOut()).size.describe()}"


def import_imagenet(archives: Path, out: Path | Store, level: str | None, workers: int | None = None) -> str:
    """Write the archives of ILSVRC2012 as an image folder or a pack of `level`, or resume that.

    workers: as of `write_pack.pack`. Returns a line that describes the result.
    """
    if level:
        from pipeline.addons.datasets import write_pack as pack

        pack_level = Level.parse(level)
        pack.check_programs(pack_level)  # before the archives are read
        return pack.pack_source(_open_archives(archives), out, pack_level, workers)
    if isinstance(out, Store):
        raise RequestError(
            f"{out} can hold a pack only: give its level, such as --pack max-side=500,q=90, or a folder"
        )
    source = _open_archives(archives)
    total = source.size.train_images + source.size.val_images
    try:
        for done in _unpack(source, out):
            print(f"{done:,} of {total:,} images unpacked", file=sys.stderr, flush=True)
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror}: {error.filename}") from None
    return f"imported {out}: {source.size.describe()}, as the development kit counts them"


def _open_archives(folder: Path) -> sources.Source:
    from pipeline.addons.datasets import imagenet

    check_folder(folder, str(folder), f"name the folder that holds {imagenet.TRAIN}")
    source = imagenet.open_archives(folder)
    assert source.index
    manifest.check_train_classes(source.index, folder)
    return source


def _unpack(source: sources.Source, out: Path) -> Iterator[int]:
    """Write each image that does not exist yet. Yield the number of images so far, now and then."""

    def write(images: Images, i: int) -> None:
        assert isinstance(images, SplitImages)
        path = out / os.fsdecode(images.split.name(i))
        if path.exists() and path.stat().st_size == images.split.sizes[i]:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            data = images.read(i)
        except UnreadableError as error:
            raise RequestError(
                f"{images.name(i)} cannot be unpacked: {error}: download the archive again"
            ) from None
        assert isinstance(data, bytes)
        atomic_write(path, data, durable=False)

    done = 0
    with ThreadPoolExecutor(8) as pool:  # reading and writing release the interpreter's lock
        for images in (source.train, source.val):
            for start in range(0, len(images), _TASKS_AT_ONCE):
                ids = range(start, min(start + _TASKS_AT_ONCE, len(images)))
                list(pool.map(partial(write, images), ids))
                done += len(ids)
                yield done


def get(kind: str, root: Path) -> str:
    """Fetch a data set with torchvision's downloader. Return a line that describes it."""
    synthetic.check_absent(root)
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
    from torchvision.datasets import Imagenette

    tarfile.TarFile.extraction_filter = staticmethod(tarfile.data_filter)  # the default from Python 3.14 on
    folder = download / "imagenette2"
    Imagenette(str(download), split="train", size="full", download=not folder.is_dir())
    return folder


def _get_cifar10(download: Path) -> Path:
    from torchvision.datasets.utils import download_url

    archive = download / "cifar-10-binary.tar.gz"
    download_url(
        f"https://www.cs.toronto.edu/~kriz/{archive.name}", str(download), archive.name, _CIFAR10_MD5
    )
    folder = download / "images"
    shutil.rmtree(folder, ignore_errors=True)
    cifar10.unpack(archive, folder)
    return folder


_DATA_SETS: dict[str, Callable[[Path], Path]] = {"imagenette": _get_imagenette, "cifar10": _get_cifar10}
"""Each fetches and unpacks a data set into a folder, and returns the folder of its images."""
