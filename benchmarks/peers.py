"""Other data loaders, each used as its own documentation says.

Each decodes, takes a random crop, resizes it with antialiasing, flips it, and delivers batches of
uint8 in host memory. `requirements.txt` beside this file installs them.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context, set_start_method
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from PIL import EpsImagePlugin
from rounds import Turn, TurnError, workers_cpu_seconds

from pipeline.addons.store.bucket import Store
from pipeline.errors import one_line

# in all scripts that import this: Pillow would start Ghostscript for a file that says it is EPS
EpsImagePlugin.gs_binary = False
_EPOCH_BATCHES = 100  # more than a turn has: the start of an epoch is not part of the comparison


@dataclass(frozen=True)
class Job:
    """What a loader is to read, and how."""

    images: Path
    folder: Path  # for its own format; made by its first turn
    batch: int
    size: int
    workers: int
    store: str = ""  # s3://bucket/prefix to fill and to read, in place of local files

    @property
    def files(self) -> list[Path]:
        return sorted(path for path in self.images.rglob("*") if path.is_file())


def make_turn(peer: str, job: Job, warm_up: int, steps: int, stack: ExitStack) -> Turn:
    """Return the turn of a loader, which runs in a process of its own, until `stack` ends it."""
    pool = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))

    def turn() -> tuple[float, float]:
        try:
            return pool.submit(_run_turn, peer, job, warm_up, steps).result()
        except ModuleNotFoundError as error:
            reason = f"not installed: {error.name} (pip install --requirement benchmarks/requirements.txt)"
        except Exception as error:
            reason = f"does not run: {one_line(error, 150)}"
        raise TurnError(reason)

    return turn


def _run_turn(peer: str, job: Job, warm_up: int, steps: int) -> tuple[float, float]:
    os.dup2(2, 1)  # some loaders print: standard output is for our result
    set_start_method("fork", force=True)  # of their workers: a function in a function cannot be pickled
    return time_batches(_LOADERS[peer](job), warm_up, steps, job.batch)


def time_batches(stream: Iterator[Any], warm_up: int, steps: int, batch: int) -> tuple[float, float]:
    """Return the images/s of `steps` batches after the warm-up, and the CPU seconds of an image."""
    for _ in range(warm_up):
        next(stream)
    start, cpu_start = time.perf_counter(), time.process_time() + workers_cpu_seconds()
    for _ in range(steps):
        next(stream)
    seconds = time.perf_counter() - start
    cpu_seconds = time.process_time() + workers_cpu_seconds() - cpu_start
    return steps * batch / seconds, cpu_seconds / (steps * batch)


def _dali(job: Job) -> Iterator[Any]:
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=job.batch, num_threads=job.workers, device_id=None)  # type: ignore[untyped-decorator]
    def crops() -> Any:
        data, labels = fn.readers.file(files=[str(file) for file in job.files], random_shuffle=True)
        area = {"random_aspect_ratio": [3 / 4, 4 / 3], "random_area": [0.08, 1]}
        pixels = fn.decoders.image_random_crop(data, **area)
        pixels = fn.resize(pixels, size=[job.size] * 2, interp_type=types.INTERP_LINEAR, antialias=True)
        return fn.flip(pixels, horizontal=fn.random.coin_flip()), labels

    loader = crops()
    loader.build()
    while True:
        yield loader.run()[0].as_array()


def _spdl(job: Job) -> Iterator[Any]:
    import torch
    from spdl.pipeline import PipelineBuilder

    torch.set_num_threads(1)  # it makes the images in threads
    crop, files = _make_crop("spdl", job.size), job.files
    crop(files[0].read_bytes())  # an error in its threads would only be logged

    def paths() -> Iterator[Path]:
        while True:
            yield from random.sample(files, len(files))

    loader = (
        PipelineBuilder().add_source(paths())
        .pipe(lambda path: crop(path.read_bytes()), concurrency=job.workers)
        .aggregate(job.batch).pipe(torch.stack).add_sink(job.workers).build(num_threads=job.workers)
    )  # fmt: skip
    with loader.auto_stop():
        yield from loader.get_iterator()


def _make_crop(package: str, size: int) -> Callable[[bytes], Any]:
    """Return a function that decodes an image with that package, to an augmented crop."""
    import simplejpeg
    import torch
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms import v2

    augment = v2.Compose([v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()])

    def crop(data: bytes) -> Any:
        if package == "torchvision":
            coded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            return augment(decode_image(coded, ImageReadMode.RGB))
        if package == "simplejpeg":
            return augment(torch.from_numpy(simplejpeg.decode_jpeg(data)).permute(2, 0, 1))
        import spdl.io

        frame = spdl.io.load_image(data, filter_desc="format=pix_fmts=rgb24")
        return augment(spdl.io.to_torch(frame).permute(2, 0, 1))

    return crop


def _plain(package: str, job: Job) -> Iterator[Any]:
    """Return the batches of a plain DataLoader with the decoder of that package."""
    from torch.utils.data import DataLoader, RandomSampler
    from torchvision.datasets import ImageFolder

    crop = _make_crop(package, job.size)
    dataset = ImageFolder(str(job.images), loader=lambda path: crop(Path(path).read_bytes()))
    endless = RandomSampler(dataset, num_samples=10**12)
    return iter(DataLoader(dataset, job.batch, sampler=endless, num_workers=job.workers))


def _litdata(job: Job) -> Iterator[Any]:
    from litdata import StreamingDataLoader, StreamingDataset, optimize

    if not job.folder.exists():
        files = [str(file) for file in job.files]
        files *= -(-_EPOCH_BATCHES * job.batch // len(files))  # its workers start again in each epoch
        options = {"chunk_bytes": "64MB", "num_workers": job.workers, "verbose": False}
        optimize(_read_bytes, files, str(job.folder), **options)
    crop = _make_crop("torchvision", job.size)

    class Crops(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            return crop(super().__getitem__(index))

    while True:
        dataset = Crops(str(job.folder), shuffle=True, drop_last=True)
        yield from StreamingDataLoader(dataset, batch_size=job.batch, num_workers=job.workers)


def _read_bytes(path: str) -> bytes:
    return Path(path).read_bytes()


def _webdataset(job: Job) -> Iterator[Any]:
    import webdataset

    store, shards = Store(job.store), [f"{number}.tar" for number in range(2 * job.workers)]
    if not job.folder.exists():
        job.folder.mkdir()
        for number, shard in enumerate(shards):
            with webdataset.TarWriter(str(job.folder / shard)) as writer:
                for i, file in enumerate(job.files[number :: len(shards)]):
                    writer.write({"__key__": f"{i:06d}", "jpg": file.read_bytes(), "cls": b"0"})
            store.upload(job.folder / shard, shard)
    crop = _make_crop("torchvision", job.size)
    urls = [store.presign(shard, 24 * 3600) for shard in shards]
    source = webdataset.WebDataset(urls, shardshuffle=len(urls), resampled=True)
    batches = source.shuffle(500).map(lambda sample: crop(sample["jpg"])).batched(job.batch)
    return iter(webdataset.WebLoader(batches, batch_size=None, num_workers=job.workers))


def _streaming(job: Job) -> Iterator[Any]:
    from streaming import MDSWriter, StreamingDataset
    from torch.utils.data import DataLoader

    if not job.folder.exists():
        job.folder.mkdir()
        with MDSWriter(out=job.store, columns={"jpg": "bytes"}) as writer:
            for file in job.files:
                writer.write({"jpg": file.read_bytes()})
    crop = _make_crop("torchvision", job.size)

    class Crops(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            return crop(super().__getitem__(index)["jpg"])

    # a folder for each turn: the processes of the turn before may still write to theirs
    local = mkdtemp(dir=job.folder)
    size = {"batch_size": job.batch, "epoch_size": _EPOCH_BATCHES * job.batch}
    dataset = Crops(remote=job.store, local=local, shuffle=True, **size)
    while True:
        yield from DataLoader(dataset, job.batch, num_workers=job.workers, drop_last=True)


_LOADERS: dict[str, Callable[[Job], Iterator[Any]]] = {
    "torchvision": partial(_plain, "torchvision"), "simplejpeg": partial(_plain, "simplejpeg"), "spdl": _spdl,
    "dali": _dali, "litdata": _litdata, "streaming": _streaming, "webdataset": _webdataset,
}  # fmt: skip
