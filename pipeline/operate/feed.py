"""`pipeline bench data`: how many images a second the loader hands over, beside what it is compared with.

Every row is the whole loader, from files to batches in the training process, with the same images, workers and batch.
Each turn starts its own workers and is timed from the first batches on; the rows take turns, so that what else the
machine does meets all alike. `reference` is what pytorch/examples does: ImageFolder, Pillow, torchvision's transforms,
float32. Quality is part of the comparison: `pixel_diff` is the mean absolute difference, of 255, to the reference's crop
of the same image.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torchvision
from PIL import Image
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision import transforms

from pipeline.config import Config, load
from pipeline.data import manifest
from pipeline.data.augment import draw
from pipeline.data.images import decode
from pipeline.data.loader import TrainBatches, batches
from pipeline.data.order import Order
from pipeline.data.sources import Images, Source, open_source
from pipeline.model.architectures import MEAN, STD
from pipeline.operate import pack
from pipeline.plan import Plan, make_plan
from pipeline.verdict import RequestError
from pipeline.world import World, allowed_cpus

WORKERS = 2
BATCH = 128
SIZE = 224
LOSSY = "max-side=500,q=90"
_MOST_IMAGES = 2000
_COMPARED = 64
_WARM_UP = 4  # batches: what the workers had ready, or had begun, when the first came
PEERS = {
    "timm": ("timm",),
    "dali": ("nvidia-dali-cuda130",),
    "dali-linear": ("nvidia-dali-cuda130",),
    "webdataset": ("webdataset",),
    "streaming": ("mosaicml-streaming",),
    "ffcv": ("ffcv",),
}
"""Name of the row -> what pip installs for it."""

Turn = Callable[[], float]
"""Images a second of one turn."""


@dataclass
class Row:
    name: str
    pixel_diff: float | None
    turn: Turn | None
    note: str = ""


def data(images: Path, rounds: int, steps: int, *, as_json: bool) -> str:
    """Rows for people or machines."""
    if not images.is_dir():
        raise RequestError(f"--images {images} is not a folder: name an image folder, of photos best")
    with TemporaryDirectory() as name:
        root = Path(name) / "images"
        count = _link(images, root)
        batch = min(BATCH, count)
        rows, limit = _ours(Path(name), root, batch, steps)
        speeds = _take_turns([*rows, limit], rounds)
    title = (
        f"{count:,} images, {WORKERS} workers, batch {batch}, {SIZE} px; {rounds} interleaved rounds of {steps} batches"
    )
    if as_json:
        return json.dumps({"rows": [_figures(row, speeds) for row in rows], "limit": _figures(limit, speeds)})
    return _text(title, [*rows, limit], speeds)


def _link(images: Path, root: Path) -> int:
    """At most 2,000 of the images, evenly taken, in two classes: which ones matters to no loader."""
    index = manifest.scan(images, 0.1)
    found = [split.name(i) for split in (index.train, index.val) for i in range(len(split))]
    chosen = [found[i] for i in np.linspace(0, len(found) - 1, min(len(found), _MOST_IMAGES)).astype(int)]
    for number, name in enumerate(chosen):
        for split_name in manifest.SPLITS if number < 2 else manifest.SPLITS[:1]:
            folder = root / split_name / str(number % 2)
            folder.mkdir(parents=True, exist_ok=True)
            link = f"{number:05d}{os.fsdecode(os.path.splitext(name)[1])}"
            (folder / link).symlink_to(images.resolve() / os.fsdecode(name))
    return len(chosen)


def _ours(folder: Path, root: Path, batch: int, steps: int) -> tuple[list[Row], Row]:
    """The reference and our ways, and what bounds them: decoding alone."""
    for level, name in (("lossless", "lossless"), (LOSSY, "lossy")):
        pack.pack(root, folder / name, level, 0.1)
    rows = [Row("reference", 0.0, _reference(root, batch, steps))]
    for name, source, where in (
        ("plain", "folder", root),
        ("lossless", "pack", folder / "lossless"),
        ("lossy", "pack", folder / "lossy"),
    ):
        config, plan, opened = _open(source, where, batch)
        made = TrainBatches(opened.train, config, plan, 0)
        rows.append(Row(name, _pixel_diff(root, made, config), _through(made, plan, steps)))
    config, plan, opened = _open("folder", root, batch)
    return rows, Row("decoding alone", None, _through(_Decoded(opened.train, Order(plan, 0)), plan, steps))


def _open(source: str, root: Path, batch: int) -> tuple[Config, Plan, Source]:
    words = [f"data.source={source}", f"data.root={root}", f"data.workers={WORKERS}", f"batch.global={batch}",
             f"augment.size={SIZE}", "augment.scale=[0.08, 1]", "augment.ratio=[0.75, 1.33333333]", "augment.flip=0.5",
             "train.epochs=1000000"]  # fmt: skip
    config = load("digits", words)
    opened = open_source(config)
    return config, make_plan(config, World(cpus=allowed_cpus()), opened.size), opened


@dataclass
class _Decoded(Dataset[Any]):
    """Each image decoded whole, and nothing else: what a pipeline that decodes whole images cannot pass."""

    images: Images
    order: Order

    def __getitem__(self, position: int) -> int:
        for sample in self.order.ids(position).tolist():
            decode(self.images.read(sample))
        return position


def _through(dataset: Dataset[Any], plan: Plan, steps: int) -> Turn:
    def turn() -> float:
        loaded = batches(dataset, range(10**9), plan, pin=False)
        seconds = _seconds(loaded, steps)
        loaded.close()  # type: ignore[attr-defined]
        return plan.global_batch * steps / seconds

    return turn


def _reference(root: Path, batch: int, steps: int) -> Turn:
    look = transforms.Compose([
        transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ])  # fmt: skip
    folder = torchvision.datasets.ImageFolder(str(root / "train"), look)
    endless = RandomSampler(folder, num_samples=10**12)
    loader = DataLoader(folder, batch, sampler=endless, num_workers=WORKERS)
    return lambda: batch * steps / _seconds(iter(loader), steps)


def _seconds(loaded: Iterator[Any], steps: int) -> float:
    for _ in range(_WARM_UP):
        next(loaded)
    start = time.perf_counter()
    for _ in range(steps):
        next(loaded)
    return time.perf_counter() - start


def _pixel_diff(root: Path, made: TrainBatches, config: Config) -> float:
    """Of the first images of a stream, to the reference's crop at the place that is drawn for them."""
    batch = made[0]
    differences = []
    for sample, pixels in zip(batch.ids.tolist()[:_COMPARED], batch.images, strict=False):
        with Image.open(root / made.images.name(sample)) as file:
            image = file.convert("RGB")
        (top, left, height, width), is_flipped = draw(
            image.height, image.width, config.augment, config.run.seed, 0, sample
        )
        expected = transforms.functional.resized_crop(image, top, left, height, width, [SIZE, SIZE])
        seen = np.asarray(expected)[:, :: -1 if is_flipped else 1]
        differences.append(np.abs(pixels.permute(1, 2, 0).numpy().astype(int) - seen).mean())
    return round(float(np.mean(differences)), 3)


def _take_turns(rows: list[Row], rounds: int) -> dict[str, list[float]]:
    """Images/s of each row in each round; a round before the first is not counted."""
    speeds: dict[str, list[float]] = {row.name: [] for row in rows}
    for number in range(rounds + 1):
        for row in rows if number % 2 else reversed(rows):
            if row.turn:
                speed = row.turn()
                if number:
                    speeds[row.name].append(speed)
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return speeds


def _figures(row: Row, speeds: dict[str, list[float]]) -> dict[str, Any]:
    """A row for machines; ratios are to the reference's turn of the same round."""
    own = speeds[row.name]
    ratios = [a / b for a, b in zip(own, speeds["reference"], strict=False)]
    figures: dict[str, Any] = {
        "name": row.name,
        "images_per_s": round(statistics.median(own), 1) if own else None,
        "ratio": round(statistics.median(ratios), 3) if own else None,
        "pixel_diff": row.pixel_diff,
    }
    return figures | ({"note": row.note} if row.note else {})


def _text(title: str, rows: list[Row], speeds: dict[str, list[float]]) -> str:
    lines = [f"{title}, medians"]
    for row in rows:
        figures = _figures(row, speeds)
        if figures["ratio"] is None:
            lines.append(f"  {row.name:<15} {row.note}")
            continue
        ratios = [a / b for a, b in zip(speeds[row.name], speeds["reference"], strict=False)]
        pixels = "" if row.pixel_diff is None else f"   pixels {row.pixel_diff:.2f}"
        lines.append(
            f"  {row.name:<15} {figures['images_per_s']:>8,.0f} images/s   ratio {figures['ratio']:.2f}"
            f" ({min(ratios):.2f} to {max(ratios):.2f}){pixels}"
        )
    return "\n".join(lines)
