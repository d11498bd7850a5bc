"""`pipeline bench top1`: top-1 accuracy of a recipe against a plain loop that trains as long.

For each seed, `pipeline train` trains the recipe in its own process. Then the plain loop trains on
the same folder for as many seconds as that whole process took, start and validation included; the
plain loop's own start and validation do not count. The plain loop is torchvision's ResNet-18 at
32 px with random crop and flip, SGD with momentum, a cosine schedule over its time, batches of 128
and one loader worker per CPU. The two run one after the other, as they would compete for the cores.
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

_BATCH, _LR, _SIZE = 128, 0.1, 32


def bench_top1(recipe: str, overrides: list[str], seeds: int) -> str:
    """Return a line per seed, and both means with their range.

    Raises RequestError if the recipe does not train on an image folder, or fails.
    """
    config = load(recipe, overrides)
    kind = config.data.source
    if kind not in ("folder", "digits"):
        raise RequestError(f"data.source={kind}: the plain loop reads only image folders; use folder or digits")
    device = torch.device("cuda" if torch.cuda.is_available() and config.run.device != "cpu" else "cpu")
    torch.set_num_threads(machine.available_cpus())
    lines, top1s = [], []
    for seed in range(seeds):
        seconds, recipe_top1 = _train_recipe(recipe, [*overrides, f"run.seed={seed}", "track.uri=none"])
        plain_top1 = _train_plain(data_root(config), seconds, seed, device)
        top1s.append((recipe_top1, plain_top1))
        lines.append(f"seed {seed}, {seconds:.0f} s: {recipe} {recipe_top1:.4f}, plain ResNet-18 {plain_top1:.4f}")
        print(lines[-1], file=sys.stderr, flush=True)
    ours, plain = (f"{mean(own):.4f} ({min(own):.4f} to {max(own):.4f})" for own in zip(*top1s, strict=True))
    return "\n".join([*lines, f"mean top-1 in the same time: {recipe} {ours}, plain ResNet-18 {plain}"])


def _train_recipe(recipe: str, overrides: list[str]) -> tuple[float, float]:
    """Train the recipe; return the seconds of the whole process, and top-1."""
    with tempfile.TemporaryDirectory(prefix="pipeline-top1-", ignore_cleanup_errors=True) as scratch:
        command = [sys.executable, "-m", "pipeline", "train", recipe, *overrides, f"run.dir={Path(scratch) / 'run'}"]
        start = time.monotonic()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        seconds = time.monotonic() - start
    if done.returncode:
        raise RequestError(f"training the recipe failed with exit code {done.returncode}: see its output above")
    return seconds, float(done.stdout.split(" top1=")[1].split()[0])


def _train_plain(root: Path, seconds: float, seed: int, device: torch.device) -> float:
    """Train the plain loop for that many seconds; return its top-1."""
    torch.manual_seed(seed)
    resize = transforms.Resize((_SIZE, _SIZE), antialias=True)
    augment = [transforms.RandomCrop(_SIZE, padding=4), transforms.RandomHorizontalFlip()]
    normalise = transforms.Normalize(list(MEAN), list(STD))
    to_tensor = [transforms.ToImage(), transforms.ToDtype(torch.float32), normalise]
    train = datasets.ImageFolder(str(root / "train"), transforms.Compose([resize, *augment, *to_tensor]))
    val = datasets.ImageFolder(str(root / "val"), transforms.Compose([resize, *to_tensor]))
    workers = machine.available_cpus()
    loader = DataLoader(train, _BATCH, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=True)
    model: nn.Module = models.resnet18(num_classes=len(train.classes)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR, momentum=0.9, weight_decay=5e-4)
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        for images, labels in loader:
            progress = (time.monotonic() - start) / seconds
            if progress >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = _LR * 0.5 * (1 + math.cos(math.pi * progress))
            optimizer.zero_grad()
            functional.cross_entropy(model(images.to(device)), labels.to(device)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    model.eval()
    with torch.inference_mode():
        batches = DataLoader(val, _BATCH, num_workers=workers)
        correct = [model(images.to(device)).argmax(1) == labels.to(device) for images, labels in batches]
    return int(torch.cat(correct).sum()) / len(val)
