"""`pipeline bench top1`: top-1 accuracy of a recipe against a plain loop that trains as long.

For each seed, `pipeline train` trains the recipe in its own process; with a `track.uri`, MLflow has
these runs below one parent. Then the plain loop trains on the same folder for as many seconds as
that whole process took, start and validation included; the plain loop's own start and validation do
not count. It has random crop and flip of torchvision, and one loader worker per CPU. The two run
one after the other, as they would compete for the cores.

The network of the plain loop is torchvision's ResNet-18 at 32 px, with SGD with momentum, a cosine
schedule over its time, and batches of 128. Or it is the recipe's, with the recipe's image size,
batch, optimizer, schedule and label smoothing: the difference is then what the pipeline costs. Both
speeds are those of the training steps alone, loading included.
"""

import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torchvision import datasets, models
from torchvision.transforms import v2 as transforms

from pipeline import machine
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.data.sources import data_root, data_size
from pipeline.errors import RequestError
from pipeline.model.architectures import MEAN, STD, build
from pipeline.plan import make_plan
from pipeline.record.folder import RunFolder
from pipeline.record.journal import read
from pipeline.train.optimizer import make_optimizer
from pipeline.world import World


@dataclass
class _Plain:
    """The settings of a plain loop."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    learning_rate: Callable[[float], float]
    """The learning rate by the share of the training that is done, 0..1."""
    batch: int = 128
    size: int = 32
    padding: int = 4
    label_smoothing: float = 0.0


def bench_top1(recipe: str, overrides: list[str], seeds: int, *, same_network: bool) -> str:
    """Return a line per seed, and both means with their range.

    same_network: the plain loop trains the recipe's network. Raises RequestError if the recipe does
    not train on an image folder, or fails.
    """
    config = load(recipe, overrides)
    kind = config.data.source
    if kind not in ("folder", "digits"):
        raise RequestError(f"data.source={kind}: the plain loop reads only image folders; use folder or digits")
    device = torch.device("cuda" if torch.cuda.is_available() and config.run.device != "cpu" else "cpu")
    torch.set_num_threads(machine.available_cpus())
    name = f"plain {config.model.arch if same_network else 'ResNet-18'}"
    lines, top1s, speeds = [], [], []
    overrides = ["track.uri=none", f"track.parent=top1 {config.recipe} {time.strftime('%F %H.%M.%S')}", *overrides]
    for seed in range(seeds):
        seconds, recipe_top1, recipe_speed = _train_recipe(recipe, overrides, seed)
        torch.manual_seed(seed)
        plain = _same_network(config, device) if same_network else _resnet18(config, device)
        plain_top1, plain_speed = _train_plain(plain, data_root(config), seconds, device)
        top1s.append((recipe_top1, plain_top1))
        speeds.append(recipe_speed / plain_speed)
        lines.append(
            f"seed {seed}, {seconds:.0f} s: {recipe} {recipe_top1:.4f}, {recipe_speed:.0f} images/s; {name}"
            f" {plain_top1:.4f}, {plain_speed:.0f} images/s"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    ours, plain_figures = (f"{mean(own):.4f} ({min(own):.4f} to {max(own):.4f})" for own in zip(*top1s, strict=True))
    lines.append(f"mean top-1 in the same time: {recipe} {ours}, {name} {plain_figures}")
    if same_network:
        lines.append(f"speed of the steps: {median(speeds):.3f} ({min(speeds):.3f} to {max(speeds):.3f}) of {name}'s")
    return "\n".join(lines)


def _train_recipe(recipe: str, overrides: list[str], seed: int) -> tuple[float, float, float]:
    """Train the recipe; return the seconds of its process, top-1, and images/s of its steps."""
    with tempfile.TemporaryDirectory(prefix="pipeline-top1-", ignore_cleanup_errors=True) as scratch:
        folder = RunFolder(Path(scratch) / f"seed-{seed}")
        words = [*overrides, f"run.seed={seed}", f"run.dir={folder.path}"]
        command = [sys.executable, "-m", "pipeline", "train", recipe, *words]
        start = time.monotonic()
        done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", errors="replace", check=False)
        seconds = time.monotonic() - start
        if done.returncode:
            raise RequestError(f"training the recipe failed with exit code {done.returncode}: see its output above")
        rows = [row.get("metrics", {}) for row, _ in read(folder.journal)]
    speeds = [metrics["time/images_per_s"] for metrics in rows if "time/images_per_s" in metrics]
    return seconds, float(done.stdout.split(" top1=")[1].split()[0]), median(speeds)


def _resnet18(config: Config, device: torch.device) -> _Plain:
    lr = 0.1
    model: nn.Module = models.resnet18(num_classes=data_size(config).num_classes).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
    return _Plain(model, optimizer, lambda progress: lr * 0.5 * (1 + math.cos(math.pi * progress)))


def _same_network(config: Config, device: torch.device) -> _Plain:
    size = data_size(config)
    plan = make_plan(config, World(), size)
    model = build(config.model, size.num_classes).to(device)
    return _Plain(
        model, make_optimizer(model, config), lambda progress: plan.learning_rate(int(progress * plan.total_steps)),
        config.batch.global_, config.augment.size, config.augment.pad or 4, config.train.label_smoothing,
    )  # fmt: skip


def _train_plain(plain: _Plain, root: Path, seconds: float, device: torch.device) -> tuple[float, float]:
    """Train the plain loop for that many seconds; return its top-1, and images/s of its steps."""
    model, optimizer, size = plain.model, plain.optimizer, plain.size
    resize = transforms.Resize((size, size), antialias=True)
    augment = [transforms.RandomCrop(size, padding=plain.padding), transforms.RandomHorizontalFlip()]
    normalise = transforms.Normalize(list(MEAN), list(STD))
    to_tensor = [transforms.ToImage(), transforms.ToDtype(torch.float32), normalise]
    train = datasets.ImageFolder(str(root / "train"), transforms.Compose([resize, *augment, *to_tensor]))
    val = datasets.ImageFolder(str(root / "val"), transforms.Compose([resize, *to_tensor]))
    workers = machine.available_cpus()
    loader = DataLoader(train, plain.batch, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=True)
    start, steps = time.monotonic(), 0
    while (progress := (time.monotonic() - start) / seconds) < 1:
        for images, labels in loader:
            progress = (time.monotonic() - start) / seconds
            if progress >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = plain.learning_rate(progress)
            optimizer.zero_grad()
            loss = functional.cross_entropy(
                model(images.to(device)), labels.to(device), label_smoothing=plain.label_smoothing
            )
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            steps += 1
    speed = steps * plain.batch / (time.monotonic() - start)
    model.eval()
    with torch.inference_mode():
        batches = DataLoader(val, plain.batch, num_workers=workers)
        correct = [model(images.to(device)).argmax(1) == labels.to(device) for images, labels in batches]
    return int(torch.cat(correct).sum()) / len(val), speed
