"""`pipeline bench data`: images/s of our data loader against other loaders.

Every row is a whole loader, from files to batches in the training process, with the same images,
number of workers and batch size. Each turn starts its own workers and is timed after a warm-up.
`reference` does what pytorch/examples does: ImageFolder, Pillow, torchvision's transforms, float32.

Quality is part of the comparison: `pixel_diff` is the mean absolute difference, on the scale of 0
to 255, to the reference's crop of the same image.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from subprocess import PIPE
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torchvision
from PIL import Image
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision import transforms

from pipeline.bench.peers import time_batches
from pipeline.bench.rounds import Row, Turn, TurnError, figures, interleave, table
from pipeline.bench.stages import HAND_OVER, EmptyBatches, StageTurn, stage_table
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.data.access import check_folder, is_image
from pipeline.data.augment import draw_crop
from pipeline.data.images import decode
from pipeline.data.loader import TrainBatches, batches
from pipeline.data.manifest import SPLITS
from pipeline.data.order import Order
from pipeline.data.sources import Images, Source, open_source
from pipeline.errors import RequestError
from pipeline.files import target_of
from pipeline.machine import available_cpus
from pipeline.model.architectures import MEAN, STD
from pipeline.operate import pack
from pipeline.plan import Plan, make_plan
from pipeline.world import World

WORKERS = 2
_BATCH = 128
SIZE = 224
_LOSSY = "max-side=500,q=90"
_MAX_IMAGES = 2000
_COMPARED_IMAGES = 64
_EMPTY_STEPS = 50
"""Empty batches for each batch of a turn: the kernel counts CPU time in ticks of 10 ms."""
WARM_UP = 4  # batches: those that the workers had ready, or had started, when the first one arrived
_PEERS = {
    "torchvision": "torchvision", "torchcodec": "torchcodec", "simplejpeg": "simplejpeg", "spdl": "spdl-io",
    "timm": "timm", "dali": "nvidia-dali-cuda130", "dali-linear": "nvidia-dali-cuda130",
    "dali-dynamic": "nvidia-dali-cuda130", "webdataset": "webdataset", "streaming": "mosaicml-streaming",
    "litdata": "litdata", "ffcv": "ffcv",
}  # fmt: skip
"""Loader in peers.py -> its package. dali-linear does not antialias: faster, but other pixels."""

_LEGEND = """\
- `reference`: ImageFolder with Pillow and torchvision's transforms. The ratios refer to it.
- `plain`, `lossless`, `lossy`: our loader, from image files, a lossless pack and a pack of the
  level `max-side=500,q=90`, which holds smaller images.
- `decoding alone`: each image decoded completely, and nothing else.
- `one worker`: time of an image by stage on one core, by Python's profiler on the workers' code.
  `cut` finds the part of a JPEG that a crop needs, `collate` is the rest of making a batch, and
  `hand over` is the CPU time of passing an empty batch to the training process.
- `pixels`: mean absolute difference to the reference's crop, on the scale of 0 to 255. The other
  loaders are compared on whole images.
"""


def bench_data(
    images: Path, rounds: int, steps: int, *,
    peers: Path | None, write: Path | None, as_json: bool, gpu_images_per_s: int | None,
) -> str:  # fmt: skip
    """Return images/s of each loader, as a table or as JSON.

    gpu_images_per_s: images/s that a GPU trains; the table then says how many cores feed it.
    peers: virtual environment of the other loaders, which is made if needed; None: without them.
    write: folder for loaders.md and a plot.
    """
    check_folder(images, f"--images {images}", "name an image folder, preferably of photos")
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        root = Path(scratch) / "images"
        num_images = link_images(images, root)
        batch = min(_BATCH, num_images)
        rows, limit, datasets = _our_rows(Path(scratch), root, batch, steps)
        stages = {name: StageTurn(dataset, steps) for name, dataset in datasets.items()}
        nothing = EmptyBatches(datasets["plain"])
        hand_over = Row(HAND_OVER, partial(time_loader, nothing, datasets["plain"].plan, _EMPTY_STEPS * steps))
        profiled = [*(Row(f"{name}, profiled", turn) for name, turn in stages.items()), hand_over]
        if peers:
            for name, package in _PEERS.items():
                row = Row(name, None, rows[0], pixel_diff=None)
                rows.append(row)
                words = (name, root / "train", Path(scratch) / name, batch, SIZE, WORKERS)
                try:
                    turn, row.pixel_diff = start_peer(peers, package, words, steps, stack)
                    row.turn = partial(per_image, turn, batch * steps)
                except TurnError as error:
                    row.failure = str(error)
        interleave([*rows, limit, *profiled], rounds, show_progress=True)
    for row in rows:
        row.remark = "" if row.pixel_diff is None else f"pixels {row.pixel_diff:.2f}"
    title = f"{num_images:,} images, {WORKERS} workers, batch {batch}, {SIZE} px"
    text = table(f"{title}; {rounds} interleaved rounds of {steps} batches", [*rows, limit])
    text += f"\n{stage_table(stages, 1e3 * median(hand_over.cpu_s))}"
    if gpu_images_per_s:
        text += f"\n{_cores(rows, gpu_images_per_s)}"
    if write:
        command = f"pipeline bench data --images {images.name} --rounds {rounds} --steps {steps}"
        _write_page(write, f"{command} --peers" if peers else command, text, [*rows, limit])
    if as_json:
        return json.dumps({"rows": [figures(row) for row in rows], "limit": figures(limit)})
    return text


def link_images(images: Path, root: Path, at_least: int = 1) -> int:
    """Link an even selection of at most 2,000 images below `root`; return how many.

    They go to two classes in turn: no loader's speed depends on the class. Fewer images than
    `at_least` are linked several times.
    """
    root_of_images = images.resolve()
    found = [path for path in root_of_images.rglob("*") if is_image(os.fsencode(path.relative_to(root_of_images)))]
    found.sort()
    if not found:
        raise RequestError(f"--images {images} holds no image: name an image folder, preferably of photos")
    found *= -(-at_least // len(found))
    chosen = [found[i] for i in np.linspace(0, len(found) - 1, min(len(found), _MAX_IMAGES)).astype(int)]
    for number, path in enumerate(chosen):
        for split_name in SPLITS if number < 2 else SPLITS[:1]:
            folder = root / split_name / str(number % 2)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number:05d}{path.suffix}").symlink_to(path)
    return len(chosen)


def _our_rows(folder: Path, root: Path, batch: int, steps: int) -> tuple[list[Row], Row, dict[str, TrainBatches]]:
    """Return the reference, our loader on files and packs, their limit, and our loader's datasets.

    The limit is decoding alone. A dataset has the name of its row.
    """
    datasets = {}
    reference = Row("reference", _reference_turn(root, batch, steps))
    rows = [reference]
    for level, name in (("lossless", "lossless"), (_LOSSY, "lossy")):
        pack.pack(root, folder / name, level, 0.1)
    for name, kind in (("plain", "folder"), ("lossless", "pack"), ("lossy", "pack")):
        config, plan, source = open_loader(kind, folder / name if kind == "pack" else root, batch)
        dataset = datasets[name] = TrainBatches(source.train, config, plan, 0)
        turn = partial(time_loader, dataset, plan, steps)
        rows.append(Row(name, turn, reference, _pixel_diff(root, dataset, config)))
    _, plan, source = open_loader("folder", root, batch)
    images = _DecodedImages(source.train, Order(plan, 0, source.train.labels))
    turn = partial(time_loader, images, plan, steps)
    return rows, Row("decoding alone", turn, reference, pixel_diff=None), datasets


def open_loader(kind: str, root: Path | str, batch: int, *more: str) -> tuple[Config, Plan, Source]:
    """Return what our loader needs. more: further overrides."""
    overrides = [f"data.source={kind}", f"data.root={root}", f"data.workers={WORKERS}", f"batch.global={batch}",
                 f"augment.size={SIZE}", "augment.scale=[0.08, 1]", "augment.ratio=[0.75, 1.33333333]",
                 "augment.flip=0.5", "train.epochs=1000000", *more]  # fmt: skip
    config = load("digits", overrides)
    source = open_source(config)
    return config, make_plan(config, World(cpus=available_cpus()), source.size), source


@dataclass
class _DecodedImages(Dataset[Any]):
    """Decodes each image completely and does nothing else: the limit of loaders that decode so."""

    images: Images
    order: Order

    def __getitem__(self, position: int) -> int:
        for sample in self.order.ids(position).tolist():
            decode(self.images.read(sample), upright=self.images.upright)
        return position


def time_loader(dataset: Dataset[Any], plan: Plan, steps: int, warm_up: int = WARM_UP) -> tuple[float, float]:
    """Run a turn of our loader; return its images/s, and the CPU seconds of an image."""
    with closing(batches(dataset, range(10**9), plan, pin=False)) as stream:
        return per_image(partial(time_batches, stream, warm_up, steps), plan.global_batch * steps)


def _reference_turn(root: Path, batch: int, steps: int) -> Turn:
    crop, flip = transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip()
    augment = transforms.Compose([crop, flip, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    dataset = torchvision.datasets.ImageFolder(str(root / "train"), augment)
    endless = RandomSampler(dataset, num_samples=10**12)
    loader = DataLoader(dataset, batch, sampler=endless, num_workers=WORKERS)
    return lambda: per_image(partial(time_batches, iter(loader), WARM_UP, steps), batch * steps)


def per_image(turn: Callable[[], tuple[float, float]], num_images: int) -> tuple[float, float]:
    """Run a turn that returns seconds and CPU seconds; return images/s, CPU seconds an image."""
    seconds, cpu_seconds = turn()
    return num_images / seconds, cpu_seconds / num_images


def start_peer(
    environment: Path, package: str, words: Sequence[object], steps: int, stack: ExitStack, warm_up: int = WARM_UP
) -> tuple[Callable[[], tuple[float, float]], float]:
    """Start another loader in a process that `stack` ends.

    words: arguments of peers.py. Returns its turn, which returns seconds and CPU seconds, and its
    pixel_diff. Raises TurnError.
    """
    python = _install(environment, package)
    log = Path(f"{words[2]}.log")
    command = [str(python), "-P", str(Path(__file__).with_name("peers.py")), *map(str, words)]
    with open(log, "wb") as errors:
        process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=errors, encoding="utf-8", bufsize=1)
    stack.callback(process.wait)
    stack.callback(process.kill)
    requests, replies = process.stdin, process.stdout
    assert requests
    assert replies

    def receive() -> Any:
        for line in replies:
            with suppress(ValueError):  # some loaders print other lines to standard output
                return json.loads(line)
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise TurnError(f"does not run: {last[-1][:150] if last else f'exit code {process.wait()}'}")

    def turn() -> tuple[float, float]:
        with suppress(BrokenPipeError):  # it has ended: `receive` raises
            requests.write(f"{warm_up} {steps}\n")
        seconds, cpu_seconds = receive()
        return seconds, cpu_seconds

    return turn, receive()["pixel_diff"]


def _install(environment: Path, package: str) -> Path:
    """Install a package in the virtual environment; return its interpreter. Raises TurnError.

    The environment also sees our own packages, above all torch.
    """
    python = environment / "bin/python"
    if not python.exists():
        venv.create(environment, with_pip=True)
        ours = sysconfig.get_path("purelib")
        theirs = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
        (theirs / "ours.pth").write_text(f"{ours}\n", encoding="utf-8")
    print(f"installing {package} in {environment} ...", file=sys.stderr, flush=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line or "error" in line]
        raise TurnError(f"cannot be installed: {(errors or ['pip failed'])[-1][:150]}")
    return python


def _pixel_diff(root: Path, dataset: TrainBatches, config: Config) -> float:
    """Compare the first images of our loader with the reference's, cropped at the same place."""
    batch = dataset[0]
    differences = []
    for sample, pixels in zip(batch.ids.tolist()[:_COMPARED_IMAGES], batch.images, strict=False):
        with Image.open(root / dataset.images.name(sample)) as file:
            image = file.convert("RGB")
        address = 0, sample, 0
        crop, is_flipped = draw_crop(image.height, image.width, config.augment, config.run.seed, address)
        expected = np.asarray(transforms.functional.resized_crop(image, *crop, [SIZE, SIZE]))
        if is_flipped:
            expected = expected[:, ::-1]
        differences.append(np.abs(pixels.permute(1, 2, 0).numpy().astype(int) - expected).mean())
    return round(float(np.mean(differences)), 3)


def _cores(rows: list[Row], gpu_images_per_s: int) -> str:
    needed = ", ".join(f"{gpu_images_per_s * median(row.cpu_s):.1f} with {row.name}" for row in rows if row.cpu_s)
    return f"cores that feed a GPU which trains {gpu_images_per_s:,} images/s: {needed}"


def _write_page(folder: Path, command: str, text: str, rows: list[Row]) -> None:
    """Write loaders.md and a plot of the medians and ranges."""
    from matplotlib.figure import Figure

    rows = [row for row in reversed(rows) if row.speeds]
    figure = Figure(figsize=(8, 0.5 * len(rows) + 1), layout="constrained")
    axes = figure.subplots()
    medians = [median(row.speeds) for row in rows]
    below = [median(row.speeds) - min(row.speeds) for row in rows]
    above = [max(row.speeds) - median(row.speeds) for row in rows]
    axes.barh([row.name for row in rows], medians, xerr=[below, above])
    axes.set_xlabel("images/s, median and range of the rounds")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(target_of(folder / "loaders.svg"))
    names = ("torch", "torchvision", "pillow", "simplejpeg")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    target_of(folder / "loaders.md").write_text(
        f"# Data loaders compared\n\n```\n{command}\n\n{text}\n```\n\n{versions}; {available_cpus()} CPU cores.\n\n"
        f"{_LEGEND}\n![images/s](loaders.svg)\n",
        encoding="utf-8",
    )
