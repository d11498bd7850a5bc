"""Other data loaders, each used as its own documentation says, for `pipeline bench data --peers`.

Run as a script, `peers.py NAME IMAGES FOLDER BATCH SIZE WORKERS`, in an environment that has the
loaders but not this package. It prepares NAME's own format below FOLDER and prints
{"pixel_diff": …}. Then, for each line `WARM_UP STEPS` on standard input, it fetches that many
batches and prints [seconds, CPU seconds] of the STEPS.

Two further arguments, `STORE EPOCH`, have it read from s3://bucket/prefix, which it fills. In
epoch 1 its cache below FOLDER is empty at the start, in epoch 2 everything is in it.

Each loader decodes, takes a random crop, resizes and flips it, and delivers batches in host memory.
Those that normalise on the host by default also do so here. `pixel_diff` compares whole images,
resized to SIZE × SIZE, with Pillow's, antialiased.
"""

import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from PIL import EpsImagePlugin, Image

EpsImagePlugin.gs_binary = False  # Pillow would start Ghostscript for a file that says it is EPS
_EPOCH_BATCHES = 100
"""More than a turn has: the start of an epoch is not part of the comparison."""

Fetch = Callable[[], Iterator[Any]]
"""Starts the loader and returns its endless stream of batches."""
Resize = Callable[[bytes], Any]
"""Decodes a whole image and resizes it: [SIZE, SIZE, 3] from 0 to 255."""


def timm(files: list[Path], folder: Path, batch: int, size: int, workers: int) -> tuple[Fetch, Resize]:
    import torch
    from timm.data import ImageDataset, create_loader

    (folder / "images").mkdir()
    for number in range(_EPOCH_BATCHES * batch):  # its workers start again in each epoch
        (folder / "images" / f"{number}.jpg").symlink_to(files[number % len(files)])

    def fetch() -> Iterator[Any]:
        loader = create_loader(
            ImageDataset(str(folder)), (3, size, size), batch, is_training=True, use_prefetcher=True,
            interpolation="bilinear", num_workers=workers, color_jitter=0, device=torch.device("cpu"),
            persistent_workers=False,
        )  # fmt: skip
        while True:
            yield from loader

    return fetch, lambda data: _pillow_resize(data, size)


def dali(antialias: bool, files: list[Path], folder: Path, batch: int, size: int, workers: int) -> tuple[Fetch, Resize]:
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=batch, num_threads=workers, device_id=None)  # type: ignore[untyped-decorator]
    def crops() -> Any:
        data, labels = fn.readers.file(files=[str(file) for file in files], random_shuffle=True)
        pixels = fn.decoders.image_random_crop(data, random_aspect_ratio=[3 / 4, 4 / 3], random_area=[0.08, 1])
        pixels = fn.resize(pixels, size=[size, size], interp_type=types.INTERP_LINEAR, antialias=antialias)
        return fn.flip(pixels, horizontal=fn.random.coin_flip()), labels

    @pipeline_def(batch_size=1, num_threads=1, device_id=None)  # type: ignore[untyped-decorator]
    def whole() -> Any:
        pixels = fn.decoders.image(fn.external_source(name="data", dtype=types.UINT8, ndim=1))
        return fn.resize(pixels, size=[size, size], interp_type=types.INTERP_LINEAR, antialias=antialias)

    resizer = whole(prefetch_queue_depth=1, exec_async=False, exec_pipelined=False)  # no prefetching
    resizer.build()

    def resize(data: bytes) -> Any:
        resizer.feed_input("data", [np.frombuffer(data, np.uint8)])
        return np.asarray(resizer.run()[0].at(0))

    def fetch() -> Iterator[Any]:
        loader = crops()
        loader.build()
        while True:
            yield loader.run()[0].as_array()

    return fetch, resize


def dali_dynamic(files: list[Path], folder: Path, batch: int, size: int, workers: int) -> tuple[Fetch, Resize]:
    from nvidia.dali.experimental import dynamic as ndd
    from nvidia.dali.types import INTERP_LINEAR

    ndd.set_num_threads(workers)
    options = {"size": [size, size], "interp_type": INTERP_LINEAR, "antialias": True}

    def resize(data: bytes) -> Any:
        return np.asarray(ndd.resize(ndd.decoders.image(np.frombuffer(data, np.uint8)), **options))

    def fetch() -> Iterator[Any]:
        reader = ndd.readers.File(files=[str(file) for file in files] * _EPOCH_BATCHES, random_shuffle=True)
        while True:
            for data, _ in reader.next_epoch(batch_size=batch):
                pixels = ndd.decoders.image_random_crop(data, random_aspect_ratio=[3 / 4, 4 / 3], random_area=[0.08, 1])
                pixels = ndd.resize(pixels, **options)
                yield ndd.flip(pixels, horizontal=ndd.random.coin_flip(batch_size=data.batch_size)).torch()

    return fetch, resize


def spdl(files: list[Path], folder: Path, batch: int, size: int, workers: int) -> tuple[Fetch, Resize]:
    """Return functions that use threads, and FFmpeg's filters to crop, resize and flip."""
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    scale = f"scale={size}:{size}:flags=bilinear,format=pix_fmts=rgb24"
    generator = np.random.default_rng()

    def paths() -> Iterator[str]:
        while True:
            for number in generator.permutation(len(files)):
                yield str(files[number])

    def crop(path: str) -> Any:
        area, (left, top, mirror) = generator.uniform(0.08, 1), generator.random(3)
        ratio = np.exp(generator.uniform(np.log(3 / 4), np.log(4 / 3)))
        sides = (f"min({side}\\,sqrt(iw*ih*{share}))" for side, share in (("iw", area * ratio), ("ih", area / ratio)))
        cut = f"crop={':'.join(sides)}:(iw-ow)*{left}:(ih-oh)*{top},{scale}{',hflip' if mirror < 0.5 else ''}"
        packets = spdl.io.demux_image(path)
        return spdl.io.decode_packets(packets, filter_desc=cut)

    def resize(data: bytes) -> Any:
        return spdl.io.to_numpy(spdl.io.load_image(data, filter_desc=scale))

    def fetch() -> Iterator[Any]:
        loader = (
            PipelineBuilder().add_source(paths()).pipe(crop, concurrency=workers).aggregate(batch)
            .pipe(spdl.io.convert_frames).pipe(spdl.io.to_torch).add_sink(workers).build(num_threads=workers)
        )  # fmt: skip
        with loader.auto_stop():
            yield from loader.get_iterator()

    return fetch, resize


def plain_loader(
    package: str, files: list[Path], folder: Path, batch: int, size: int, workers: int
) -> tuple[Fetch, Resize]:
    """Return the functions of a plain DataLoader with the decoder of that package."""
    from torch.utils.data import DataLoader, Dataset, RandomSampler

    crop, resize = _crops(package, size)

    class Crops(Dataset[Any]):
        def __len__(self) -> int:
            return len(files)

        def __getitem__(self, index: int) -> Any:
            return crop(files[index].read_bytes())

    def fetch() -> Iterator[Any]:
        endless = RandomSampler(Crops(), num_samples=10**12)
        return iter(DataLoader(Crops(), batch, sampler=endless, num_workers=workers))

    return fetch, resize


def _decoder(package: str) -> Callable[[bytes], Any]:
    """Return the function of that package which decodes a file to a tensor [3, H, W]."""
    import torch

    if package == "simplejpeg":
        import simplejpeg

        return lambda data: torch.from_numpy(simplejpeg.decode_jpeg(data)).permute(2, 0, 1)
    if package == "torchcodec":
        from torchcodec.decoders import decode_image as decode_with_torchcodec

        return partial(decode_with_torchcodec, mode="RGB")

    from torchvision.io import ImageReadMode, decode_image

    return lambda data: decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)


def _crops(package: str, size: int) -> tuple[Callable[[bytes], Any], Resize]:
    """Return functions that decode with that package: to an augmented crop, to a resized image."""
    from torchvision.transforms import v2

    decode = _decoder(package)
    augment = v2.Compose([v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()])

    def resize(data: bytes) -> Any:
        return v2.functional.resize(decode(data), [size, size], antialias=True).permute(1, 2, 0).numpy()

    return lambda data: augment(decode(data)), resize


def webdataset(
    files: list[Path], folder: Path, batch: int, size: int, workers: int, store: str = "", epoch: str = ""
) -> tuple[Fetch, Resize]:
    import webdataset

    crop, resize = _crops("torchvision", size)
    shards = [str(folder / f"{shard}.tar") for shard in range(2 * workers)]
    for number, shard in enumerate(shards):
        with webdataset.TarWriter(shard) as writer:
            for i, file in enumerate(files[number :: len(shards)]):
                writer.write({"__key__": f"{i:06d}", "jpg": file.read_bytes(), "cls": b"0"})
    if store:
        shards = [_upload(shard, store) for shard in shards]
    cache = {"cache_dir": str(folder / "cache")} if epoch == "2" else {}
    if cache:
        (folder / "cache").mkdir()
        for _ in webdataset.WebDataset(shards, shardshuffle=False, **cache):
            pass

    def fetch() -> Iterator[Any]:
        source = webdataset.WebDataset(shards, shardshuffle=len(shards), resampled=True, **cache)
        batches = source.shuffle(500).map(lambda sample: crop(sample["jpg"])).batched(batch)
        return iter(webdataset.WebLoader(batches, batch_size=None, num_workers=workers))

    return fetch, resize


def _upload(file: str, store: str) -> str:
    """Upload a file to the store and return a URL to read it."""
    import boto3
    from botocore.config import Config

    client = boto3.client("s3", region_name=os.environ.get("AWS_REGION"), config=Config(signature_version="s3v4"))
    bucket, _, prefix = store.removeprefix("s3://").partition("/")
    key = f"{prefix}/{Path(file).name}"
    client.upload_file(file, bucket, key)
    return str(client.generate_presigned_url("get_object", {"Bucket": bucket, "Key": key}, ExpiresIn=24 * 3600))


def streaming(
    files: list[Path], folder: Path, batch: int, size: int, workers: int, store: str = "", epoch: str = ""
) -> tuple[Fetch, Resize]:
    from streaming import MDSWriter, StreamingDataset
    from torch.utils.data import DataLoader

    local = str(folder / "local")
    out = (local, store) if store else local
    with MDSWriter(out=out, columns={"jpg": "bytes"}, keep_local=True) as writer:
        for file in files:
            writer.write({"jpg": file.read_bytes()})

    crop, resize = _crops("torchvision", size)

    class Crops(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            return crop(super().__getitem__(index)["jpg"])

    def fetch() -> Iterator[Any]:
        # a folder for each turn: the processes of the turn before may still write to theirs
        place = mkdtemp(dir=folder) if epoch == "1" else local
        dataset = Crops(
            remote=store or None, local=place, shuffle=True, batch_size=batch, epoch_size=_EPOCH_BATCHES * batch
        )
        while True:
            yield from DataLoader(dataset, batch, num_workers=workers, drop_last=True)

    return fetch, resize


def litdata(files: list[Path], folder: Path, batch: int, size: int, workers: int) -> tuple[Fetch, Resize]:
    from litdata import StreamingDataLoader, StreamingDataset, optimize

    out = str(folder / "chunks")
    repeated = [str(file) for file in files * -(-_EPOCH_BATCHES * batch // len(files))]  # workers start in each epoch
    optimize(_read_bytes, repeated, out, chunk_bytes="64MB", num_workers=workers, verbose=False)
    crop, resize = _crops("torchvision", size)

    class Crops(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            return crop(super().__getitem__(index))

    def fetch() -> Iterator[Any]:
        while True:
            dataset = Crops(out, shuffle=True, drop_last=True)
            yield from StreamingDataLoader(
                dataset, batch_size=batch, num_workers=workers, multiprocessing_context="fork"
            )  # forked, because a class in a function cannot be pickled

    return fetch, resize


def _read_bytes(path: str) -> bytes:
    return Path(path).read_bytes()


def ffcv(files: list[Path], folder: Path, batch: int, size: int, workers: int) -> tuple[Fetch, Resize]:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor
    from ffcv.writer import DatasetWriter

    class Files:
        def __len__(self) -> int:
            return len(files)

        def __getitem__(self, index: int) -> tuple[Image.Image, int]:
            return Image.open(files[index]).convert("RGB"), 0

    fields = {"image": RGBImageField(write_mode="jpg", max_resolution=500, jpeg_quality=90), "label": IntField()}
    DatasetWriter(str(folder / "beton"), fields, num_workers=workers).from_indexed_dataset(Files())

    def fetch() -> Iterator[Any]:
        image = [RandomResizedCropRGBImageDecoder((size, size)), RandomHorizontalFlip(), ToTensor()]
        pipelines = {"image": image, "label": None}
        order = OrderOption.RANDOM
        loader = Loader(str(folder / "beton"), batch, workers, order=order, pipelines=pipelines, drop_last=True)
        while True:
            yield from loader

    return fetch, lambda data: _pillow_resize(data, size)


def _pillow_resize(data: bytes, size: int) -> Any:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))


PEERS: dict[str, Callable[..., tuple[Fetch, Resize]]] = {
    "torchvision": partial(plain_loader, "torchvision"), "torchcodec": partial(plain_loader, "torchcodec"),
    "simplejpeg": partial(plain_loader, "simplejpeg"), "spdl": spdl, "timm": timm, "dali": partial(dali, True),
    "dali-linear": partial(dali, False), "dali-dynamic": dali_dynamic, "webdataset": webdataset,
    "streaming": streaming, "litdata": litdata, "ffcv": ffcv,
}  # fmt: skip


def cpu_s(process: int) -> float:
    """Return the CPU seconds of a process and its descendants, with those that were waited for."""
    seconds = 0.0
    with suppress(OSError):  # it has just ended
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        seconds = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        for thread in Path(f"/proc/{process}/task").iterdir():
            seconds += sum(map(cpu_s, map(int, (thread / "children").read_text(encoding="utf-8").split())))
    return seconds


def time_batches(stream: Iterator[Any], warm_up: int, steps: int) -> tuple[float, float]:
    """Return the seconds that `steps` batches take after the warm-up, and their CPU seconds."""
    for _ in range(warm_up):
        next(stream)
    start, cpu_start = time.perf_counter(), cpu_s(os.getpid())
    for _ in range(steps):
        next(stream)
    return time.perf_counter() - start, cpu_s(os.getpid()) - cpu_start


def main(name: str, images: str, folder_name: str, *words: str) -> None:
    batch, size, workers = map(int, words[:3])
    folder = Path(folder_name)
    folder.mkdir(parents=True)
    files = sorted(path for path in Path(images).rglob("*") if path.is_file())
    fetch, resize = PEERS[name](files, folder, batch, size, workers, *words[3:])
    samples = [file.read_bytes() for file in files[:64]]
    differences = [np.abs(resize(data).astype(float) - _pillow_resize(data, size)).mean() for data in samples]
    print(json.dumps({"pixel_diff": round(float(np.mean(differences)), 3)}), flush=True)
    for line in sys.stdin:
        warm_up, steps = map(int, line.split())
        stream = fetch()
        print(json.dumps(time_batches(stream, warm_up, steps)), flush=True)
        del stream  # stops its workers


if __name__ == "__main__":
    main(*sys.argv[1:])
