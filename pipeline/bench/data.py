"""`pipeline bench data`: how many images a second the loader hands over, beside what it is compared with.

Every row is the whole loader, from files to batches in the training process, with the same images, workers and batch.
Each turn starts its own workers and is timed from the first batches on; the rows take turns, so that what else the
machine does meets all alike. `reference` is what pytorch/examples does: ImageFolder, Pillow, torchvision's transforms,
float32. Quality is part of the comparison: `pixel_diff` is the mean absolute difference, of 255, to the reference's crop
of the same image.
"""

import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torchvision
from PIL import Image
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision import transforms

from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.data import manifest
from pipeline.data.access import check_folder
from pipeline.data.augment import draw
from pipeline.data.images import decode
from pipeline.data.loader import TrainBatches, batches
from pipeline.data.order import Order
from pipeline.data.sources import Images, Source, open_source
from pipeline.machine import available_cpus
from pipeline.model.architectures import MEAN, STD
from pipeline.operate import pack
from pipeline.plan import Plan, make_plan
from pipeline.world import World

WORKERS = 2
BATCH = 128
SIZE = 224
LOSSY = "max-side=500,q=90"
_MOST_IMAGES = 2000
_COMPARED = 64
_WARM_UP = 4  # batches: what the workers had ready, or had begun, when the first came
PEERS = {
    "timm": "timm", "dali": "nvidia-dali-cuda130", "dali-linear": "nvidia-dali-cuda130", "webdataset": "webdataset",
    "streaming": "mosaicml-streaming", "ffcv": "ffcv",
}  # fmt: skip
"""Row -> what pip installs for it. dali-linear is DALI without antialiasing: faster, and other pixels."""

Turn = Callable[[], float]
"""Images a second of one turn."""


@dataclass
class Row:
    name: str
    pixel_diff: float | None
    turn: Turn | None
    note: str = ""


def data(images: Path, rounds: int, steps: int, *, peers: Path | None, write: Path | None, as_json: bool) -> str:
    """Rows for people or machines; `peers` is where the others' virtual environment is, or is to be made."""
    check_folder(images, f"--images {images}", "name an image folder, of photos best")
    with TemporaryDirectory() as name, ExitStack() as stack:
        root = Path(name) / "images"
        count = _link(images, root)
        batch = min(BATCH, count)
        rows, limit = _ours(Path(name), root, batch, steps)
        if peers:
            rows += [stack.enter_context(_peer(peer, peers, root, Path(name) / peer, batch, steps)) for peer in PEERS]
        speeds = _take_turns([*rows, limit], rounds)
    title = (
        f"{count:,} images, {WORKERS} workers, batch {batch}, {SIZE} px; {rounds} interleaved rounds of {steps} batches"
    )
    text = _text(title, [*rows, limit], speeds)
    if write:
        command = (
            f"pipeline bench data --images {images.name} --rounds {rounds} --steps {steps}{' --peers' if peers else ''}"
        )
        _write(write, command, text, {row.name: speeds[row.name] for row in [*rows, limit] if speeds[row.name]})
    if as_json:
        return json.dumps({"rows": [_figures(row, speeds) for row in rows], "limit": _figures(limit, speeds)})
    return text


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
    return config, make_plan(config, World(cpus=available_cpus()), opened.size), opened


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


@contextmanager
def _peer(name: str, environment: Path, root: Path, folder: Path, batch: int, steps: int) -> Iterator[Row]:
    """Another loader, in a process of its own; where it cannot be installed or does not run, its row says so."""
    python = _install(environment, PEERS[name])
    if isinstance(python, str):
        yield Row(name, None, None, python)
        return
    log = folder.with_suffix(".log")
    words = [root / "train", folder, batch, SIZE, WORKERS]
    with open(log, "wb") as errors:
        process = subprocess.Popen(
            [python, "-P", Path(__file__).with_name("peers.py"), name, *map(str, words)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1,
        )  # fmt: skip
    assert process.stdin
    assert process.stdout

    def answer() -> Any:
        assert process.stdout
        for line in process.stdout:
            with suppress(ValueError):  # some say other things on standard output
                return json.loads(line)
        last = log.read_text(errors="replace").strip().splitlines()
        raise RuntimeError(f"does not run: {last[-1][:150] if last else f'exit code {process.wait()}'}")

    def turn() -> float:
        assert process.stdin
        process.stdin.write(f"{_WARM_UP} {steps}\n")
        return batch * steps / float(answer())

    try:
        try:
            yield Row(name, answer()["pixel_diff"], turn)
        except RuntimeError as error:
            yield Row(name, None, None, str(error))
    finally:
        process.kill()
        process.wait()


def _install(environment: Path, package: str) -> Path | str:
    """The environment's interpreter, or why the package is not there. What we have ourselves, torch above all, it sees."""
    python = environment / "bin/python"
    if not python.exists():
        venv.create(environment, with_pip=True)
        ours = sysconfig.get_path("purelib")
        (Path(sysconfig.get_path("purelib", vars={"base": str(environment)})) / "ours.pth").write_text(f"{ours}\n")
    print(f"installing {package} in {environment} ...", file=sys.stderr, flush=True)
    done = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    errors = [line for line in done.stderr.splitlines() if "ERROR" in line or "error" in line]
    return python if done.returncode == 0 else f"cannot be installed: {(errors or ['pip failed'])[-1][:150]}"


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
            image.height, image.width, config.augment, config.run.seed, (0, sample, 0)
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
                try:
                    speed = row.turn()
                except (RuntimeError, OSError) as error:  # of a peer's process
                    row.turn, row.note = None, str(error)
                    continue
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


def _write(folder: Path, command: str, text: str, speeds: dict[str, list[float]]) -> None:
    """benchmarks.md and a plot of the medians, with the least and the largest."""
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("Agg")
    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(speeds) + 1), layout="constrained")
    names = list(reversed(speeds))
    middles = [statistics.median(speeds[name]) for name in names]
    spread = [[middle - min(speeds[name]) for name, middle in zip(names, middles, strict=True)],
              [max(speeds[name]) - middle for name, middle in zip(names, middles, strict=True)]]  # fmt: skip
    axes.barh(names, middles, xerr=spread)
    axes.set_xlabel("images/s, median of the rounds, least to largest")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "benchmarks.svg")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "torchvision", "pillow"))
    (folder / "benchmarks.md").write_text(
        f"# Input pipeline\n\n```\n{command}\n\n{text}\n```\n\n{versions}; {available_cpus()} CPU cores. `pixels` is the mean"
        " absolute difference to the reference's crop, of 255; for the peers, of whole pictures.\n\n"
        "![images/s](benchmarks.svg)\n"
    )
