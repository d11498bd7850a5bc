"""Compare our data loader with other loaders, from image files to batches in the training process.

  python benchmarks/data.py --images data/imagenette/train --peers

All have the same images, number of workers and batch size. Each turn starts its own workers and is
timed after a warm-up. `reference` does what pytorch/examples does: ImageFolder, Pillow,
torchvision's transforms, float32. `plain`, `lossless` and `lossy` are our loader, from image files,
a lossless pack, and a pack of the level `max-side=500,q=90`, which holds smaller images.

Quality is part of the comparison: `pixel_diff` is the mean absolute difference, on the scale of 0
to 255, to the reference's crop of the same image. It is not measured for other loaders.
"""

import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from multiprocessing import get_context, set_start_method
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import simplejpeg
import torch
import torchvision
from PIL import EpsImagePlugin, Image
from rounds import Row, Turn, TurnError, add_size, interleave, run_script, show, workers_cpu_seconds
from torch.utils.data import DataLoader, RandomSampler
from torchvision import transforms
from torchvision.transforms import v2

from pipeline.addons.datasets import write_pack as pack
from pipeline.addons.datasets.names import is_image
from pipeline.addons.datasets.sources import open_source
from pipeline.cli.arguments import Parser, path
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.data.augment import draw_crop
from pipeline.data.interface import Source
from pipeline.data.loader import TrainBatches, batches
from pipeline.errors import RequestError, one_line
from pipeline.launcher import this_world
from pipeline.model.normalise import MEAN, STD
from pipeline.plan import Plan
from pipeline.planning import make_plan

# Pillow would start Ghostscript for a file that says it is EPS
EpsImagePlugin.gs_binary = False
WORKERS = 2
SIZE = 224
_BATCH = 128
_AUGMENT = v2.Compose([v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()])
_MAX_IMAGES = 2000
_WARM_UP = 4  # batches: those that the workers had ready, or had started, when the first one arrived
_EPOCH_BATCHES = 100  # more than a turn has: the start of an epoch is not part of the comparison


def compare(options: Namespace) -> str:
    steps = options.steps
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        root = folder / "images"
        num_images = link_images(options.images, root)
        batch = min(_BATCH, num_images)
        rows = _our_rows(folder, root, batch, steps)
        for name in _PEERS if options.peers else ():
            turn = _peer_turn(name, root, batch, steps, stack)
            rows.append(Row(name, turn, rows[0], pixel_diff=None))
        interleave(rows, options.rounds)
    for row in rows:
        row.remark = "" if row.pixel_diff is None else f"pixels {row.pixel_diff:.2f}"
    return show(f"{num_images:,} images, {WORKERS} workers, batch {batch}, {SIZE} px", rows, options)


def link_images(images: Path, root: Path, at_least: int = 1) -> int:
    """Link an even selection of at most 2,000 images below `root`; return how many.

    They go to two classes in turn: no loader's speed depends on the class. Fewer images than
    `at_least` are linked several times.
    """
    root_of_images = images.resolve()
    files = root_of_images.rglob("*")
    found = [file for file in files if is_image(os.fsencode(file.relative_to(root_of_images)))]
    found.sort()
    if not found:
        raise RequestError(f"--images {images} holds no image: name an image folder, preferably of photos")
    found *= -(-at_least // len(found))
    chosen = [found[i] for i in np.linspace(0, len(found) - 1, min(len(found), _MAX_IMAGES)).astype(int)]
    for number, file in enumerate(chosen):
        for split in ("train", "val") if number < 2 else ("train",):
            folder = root / split / str(number % 2)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number:05d}{file.suffix}").symlink_to(file)
    return len(chosen)


def _our_rows(folder: Path, root: Path, batch: int, steps: int) -> list[Row]:
    rows = [Row("reference", lambda: time_batches(_plain("Pillow", root, batch), _WARM_UP, steps, batch))]
    for name, level in (("plain", ""), ("lossless", "lossless"), ("lossy", "max-side=500,q=90")):
        if level:
            pack.pack(root, folder / name, level, 0.1)
        kind, place = ("pack", folder / name) if level else ("folder", root)
        config, plan, source = open_loader(kind, place, batch)
        dataset = TrainBatches(source.train, config, plan, 0)
        turn = partial(time_loader, dataset, plan, steps)
        rows.append(Row(name, turn, rows[0], _pixel_diff(root, dataset, config)))
    return rows


def open_loader(kind: str, root: Path | str, batch: int, *more: str) -> tuple[Config, Plan, Source]:
    """Return what our loader needs. more: further overrides."""
    overrides = [f"data.source={kind}", f"data.root={root}", f"data.workers={WORKERS}", "augment.flip=0.5",
                 f"batch.global={batch}", f"augment.size={SIZE}", "augment.scale=[0.08, 1]",
                 "augment.ratio=[0.75, 1.33333333]", "train.epochs=1000000", *more]  # fmt: skip
    config = load("digits", overrides)
    source = open_source(config)
    return config, make_plan(config, this_world(), source.size), source


def time_loader(
    dataset: TrainBatches, plan: Plan, steps: int, warm_up: int = _WARM_UP
) -> tuple[float, float]:
    """Run a turn of our loader; return its images/s, and the CPU seconds of an image."""
    with closing(batches(dataset, range(10**9), plan, pin=False)) as stream:
        return time_batches(stream, warm_up, steps, plan.global_batch)


def _pixel_diff(root: Path, dataset: TrainBatches, config: Config) -> float:
    """Compare the first images of our loader with the reference's, cropped at the same place."""
    batch = dataset[0]
    differences = []
    for sample, pixels in zip(batch.ids.tolist()[:64], batch.images, strict=False):
        with Image.open(root / dataset.images.name(sample)) as file:
            image = file.convert("RGB")
        where = 0, sample, 0
        crop, is_flipped = draw_crop(image.height, image.width, config.augment, config.run.seed, where)
        expected = np.asarray(transforms.functional.resized_crop(image, *crop, [SIZE, SIZE]))
        if is_flipped:
            expected = expected[:, ::-1]
        differences.append(np.abs(pixels.permute(1, 2, 0).numpy().astype(int) - expected).mean())
    return round(float(np.mean(differences)), 3)


def add_flags(parser: Parser) -> None:
    """Add the flags of a benchmark of loaders."""
    help = "an image folder, preferably of photos; at most 2,000 of its images are used"
    parser.add_argument("--images", type=path, required=True, metavar="DIR", help=help)
    add_size(parser)


def _peer_turn(peer: str, root: Path, batch: int, steps: int, stack: ExitStack) -> Turn:
    """Return the turn of another loader, used as its own documentation says.

    It runs in a process of its own, until `stack` ends it, and may write below `root`.
    """
    pool = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))

    def turn() -> tuple[float, float]:
        try:
            return pool.submit(_run_turn, peer, root, batch, steps).result()
        except ModuleNotFoundError as error:
            reason = f"not installed: {error.name} (pip install --requirement benchmarks/requirements.txt)"
        except Exception as error:
            reason = f"does not run: {one_line(error, 150)}"
        raise TurnError(reason)

    return turn


def _run_turn(peer: str, root: Path, batch: int, steps: int) -> tuple[float, float]:
    os.dup2(2, 1)  # some loaders print: standard output is for our result
    set_start_method("fork", force=True)  # of their workers: a function in a function cannot be pickled
    return time_batches(_PEERS[peer](root, batch), _WARM_UP, steps, batch)


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


def _dali(root: Path, batch: int) -> Iterator[Any]:
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=batch, num_threads=WORKERS, device_id=None)  # type: ignore[untyped-decorator]
    def crops() -> Any:
        data, labels = fn.readers.file(files=_files(root), random_shuffle=True)
        area = {"random_aspect_ratio": [3 / 4, 4 / 3], "random_area": [0.08, 1]}
        pixels = fn.decoders.image_random_crop(data, **area)
        pixels = fn.resize(pixels, size=[SIZE] * 2, interp_type=types.INTERP_LINEAR, antialias=True)
        return fn.flip(pixels, horizontal=fn.random.coin_flip()), labels

    loader = crops()
    loader.build()
    while True:
        yield loader.run()[0].as_array()


def _crop(package: str, data: bytes) -> Any:
    """Decode an image with that package, to an augmented crop."""
    if package == "torchvision":
        coded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        pixels = torchvision.io.decode_image(coded, torchvision.io.ImageReadMode.RGB)
    else:
        pixels = torch.from_numpy(simplejpeg.decode_jpeg(data)).permute(2, 0, 1)
    return _AUGMENT(pixels)


def _plain(package: str, root: Path, batch: int) -> Iterator[Any]:
    """Return the batches of a plain DataLoader that decodes with that package."""
    crop, flip = transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip()
    augment = transforms.Compose([crop, flip, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    options: dict[str, Any] = {"transform": augment}
    if package != "Pillow":
        options = {"loader": lambda path: _crop(package, Path(path).read_bytes())}
    dataset = torchvision.datasets.ImageFolder(str(root / "train"), **options)
    endless = RandomSampler(dataset, num_samples=10**12)
    return iter(DataLoader(dataset, batch, sampler=endless, num_workers=WORKERS))


def _litdata(root: Path, batch: int) -> Iterator[Any]:
    from litdata import StreamingDataLoader, StreamingDataset, optimize

    folder = root / "litdata"
    if not folder.exists():
        files = _files(root)
        files *= -(-_EPOCH_BATCHES * batch // len(files))  # its workers start again in each epoch
        options = {"chunk_bytes": "64MB", "num_workers": WORKERS, "verbose": False}
        optimize(_read_bytes, files, str(folder), **options)

    class Crops(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            return _crop("torchvision", super().__getitem__(index))

    while True:
        dataset = Crops(str(folder), shuffle=True, drop_last=True)
        yield from StreamingDataLoader(dataset, batch_size=batch, num_workers=WORKERS)


def _files(root: Path) -> list[str]:
    return sorted(str(file) for file in root.glob("train/*/*"))


def _read_bytes(path: str) -> bytes:
    return Path(path).read_bytes()


_PEERS: dict[str, Callable[[Path, int], Iterator[Any]]] = {
    "torchvision": partial(_plain, "torchvision"), "simplejpeg": partial(_plain, "simplejpeg"),
    "dali": _dali, "litdata": _litdata,
}  # fmt: skip


if __name__ == "__main__":
    parser = Parser(description=__doc__)
    add_flags(parser)
    help = "also compare other loaders, which benchmarks/requirements.txt names"
    parser.add_argument("--peers", action="store_true", help=help)
    run_script(parser, compare)
