"""`pipeline bench top1`: what a recipe is worth, as top-1 after the same seconds as a plain loop.

For each seed the recipe is trained as a person would, in a process of its own. Then the plain loop (torchvision's
ResNet-18, crop with padding and flip at 32 px, SGD with momentum, a cosine over its time, batches of 128, a worker a CPU)
trains on the same folder for as many seconds as our whole process took, with start and validation, of which the plain
loop's own are not counted. One after the other: together they would take each other's cores.
"""

import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torchvision import datasets, models
from torchvision.transforms import v2 as transforms

from pipeline import machine
from pipeline.config.load import load
from pipeline.data.sources import data_root
from pipeline.errors import RequestError
from pipeline.model.architectures import MEAN, STD

_BATCH, _RATE, _SIZE = 128, 0.1, 32


def bench_top1(recipe: str, overrides: list[str], seeds: int) -> str:
    """A line a seed, and the means with their spread. RequestError where the recipe has no image folder."""
    config = load(recipe, overrides)
    if config.data.source not in ("folder", "digits"):
        raise RequestError(
            f"data.source={config.data.source}: the plain loop reads image folders; take folder or digits"
        )
    device = torch.device("cuda" if torch.cuda.is_available() and config.run.device != "cpu" else "cpu")
    torch.set_num_threads(machine.available_cpus())
    lines, ours, theirs = [], [], []
    for seed in range(seeds):
        seconds, mine = _recipe(recipe, [*overrides, f"run.seed={seed}", "track.uri=none"])
        plain = _plain(data_root(config), seconds, seed, device)
        ours.append(mine)
        theirs.append(plain)
        lines.append(f"seed {seed}, {seconds:.0f} s: {recipe} {mine:.4f}, plain ResNet-18 {plain:.4f}")
        print(lines[-1], file=sys.stderr, flush=True)
    spread = [f"{mean(all_):.4f} ({min(all_):.4f} to {max(all_):.4f})" for all_ in (ours, theirs)]
    return "\n".join([*lines, f"top-1 in the same seconds: {recipe} {spread[0]}, plain ResNet-18 {spread[1]}"])


def _recipe(recipe: str, overrides: list[str]) -> tuple[float, float]:
    """(seconds of the whole process, top-1)."""
    with tempfile.TemporaryDirectory(prefix="pipeline-top1-", ignore_cleanup_errors=True) as scratch:
        command = [sys.executable, "-m", "pipeline", "train", recipe, *overrides, f"run.dir={Path(scratch) / 'run'}"]
        start = time.monotonic()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        seconds = time.monotonic() - start
    if done.returncode:
        raise RequestError(f"the recipe did not come through (exit {done.returncode}): what it said stands above")
    return seconds, float(done.stdout.split(" top1=")[1].split()[0])


def _plain(root: Path, seconds: float, seed: int, device: torch.device) -> float:
    """Top-1 of the plain loop."""
    torch.manual_seed(seed)
    end = [
        transforms.ToImage(), transforms.ToDtype(torch.float32),
        transforms.Normalize(list(MEAN), list(STD)),
    ]  # fmt: skip
    resize = [transforms.Resize((_SIZE, _SIZE), antialias=True)]
    moves = [transforms.RandomCrop(_SIZE, padding=4), transforms.RandomHorizontalFlip()]
    train = datasets.ImageFolder(str(root / "train"), transforms.Compose([*resize, *moves, *end]))
    val = datasets.ImageFolder(str(root / "val"), transforms.Compose([*resize, *end]))
    workers = machine.available_cpus()
    loader = DataLoader(train, _BATCH, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=True)
    model: nn.Module = models.resnet18(num_classes=len(train.classes)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE, momentum=0.9, weight_decay=5e-4)
    start = time.monotonic()
    while (share := (time.monotonic() - start) / seconds) < 1:
        for images, labels in loader:
            share = (time.monotonic() - start) / seconds
            if share >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = _RATE * 0.5 * (1 + math.cos(math.pi * share))
            optimizer.zero_grad()
            functional.cross_entropy(model(images.to(device)), labels.to(device)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    model.eval()
    with torch.inference_mode():
        right = sum(
            int((model(images.to(device)).argmax(1) == labels.to(device)).sum())
            for images, labels in DataLoader(val, _BATCH, num_workers=workers)
        )
    return right / len(val)
