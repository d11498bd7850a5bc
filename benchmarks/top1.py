"""Compare a recipe with a plain torchvision loop that trains the same network for as long.

  python benchmarks/top1.py cifar10 data.root=FOLDER

For each seed, `pipeline train` trains the recipe; with a `track.uri`, MLflow has these runs below
one parent. Then the plain loop trains on the same folder for as many seconds as that whole process
took; its own start and validation do not count. It has torchvision's crop and flip, one loader
worker per CPU, and network, image size, batch, optimizer, schedule and smoothing of the recipe.
"""

import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from itertools import chain, repeat
from statistics import mean

import torch
from rounds import run_script
from torch.nn import functional
from torch.utils.data import DataLoader
from torchvision import datasets
from torchvision.transforms import v2 as transforms

from pipeline import machine
from pipeline.addons.datasets.sources import data_root, data_size
from pipeline.cli.arguments import Parser, add_recipe, positive_int
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.errors import RequestError
from pipeline.model.architectures import build
from pipeline.model.normalise import MEAN, STD
from pipeline.planning import make_plan
from pipeline.train.optimizer import make_optimizer
from pipeline.world import World


def compare(options: Namespace) -> str:
    recipe, config = options.recipe, load(options.recipe, options.overrides)
    if config.data.source not in ("folder", "digits"):
        problem = f"data.source={config.data.source}: the plain loop reads only image folders"
        raise RequestError(problem, "use folder or digits")
    torch.set_num_threads(machine.available_cpus())
    parent = f"track.parent=top1 {config.recipe} {time.strftime('%F %H.%M.%S')}"
    lines, top1s = [], []
    for seed in range(options.seeds):
        words = ["track.uri=none", parent, *options.overrides, f"run.seed={seed}"]
        seconds, top1 = _train_recipe(recipe, words, f"seed-{seed}")
        torch.manual_seed(seed)
        top1s.append((top1, _train_plain(config, seconds)))
        lines.append(f"seed {seed}, {seconds:.0f} s: {recipe} {top1:.4f}, plain {top1s[-1][1]:.4f}")
        print(lines[-1], file=sys.stderr, flush=True)
    ours, plain = (f"{mean(of):.4f} ({min(of):.4f} to {max(of):.4f})" for of in zip(*top1s, strict=True))
    lines.append(f"mean top-1 in the same time: {recipe} {ours}, plain {config.model.arch} {plain}")
    return "\n".join(lines)


def _train_recipe(recipe: str, words: list[str], run: str) -> tuple[float, float]:
    """Train the recipe; return the seconds of its process, and top-1."""
    with tempfile.TemporaryDirectory(prefix="pipeline-top1-", ignore_cleanup_errors=True) as scratch:
        command = [sys.executable, "-P", "-m", "pipeline", "train", recipe, *words]
        start = time.monotonic()
        output = subprocess.check_output([*command, f"run.dir={scratch}/{run}"], text=True)
        return time.monotonic() - start, float(output.split(" top1=")[1].split()[0])


def _train_plain(config: Config, seconds: float) -> float:
    """Train the plain loop for that many seconds; return its top-1."""
    device = torch.device("cuda" if torch.cuda.is_available() and config.run.device != "cpu" else "cpu")
    size, batch, workers = config.augment.size, config.batch.global_, machine.available_cpus()
    data = data_size(config)
    plan, root = make_plan(config, World(), data), data_root(config)
    model = build(config.model, data.num_classes).to(device)
    optimizer = make_optimizer(model, config)
    resize = transforms.Resize((size, size), antialias=True)
    augment = [
        transforms.RandomCrop(size, padding=config.augment.pad or 4),
        transforms.RandomHorizontalFlip(),
    ]
    to_tensor = [transforms.ToImage(), transforms.ToDtype(torch.float32)]
    to_tensor.append(transforms.Normalize(list(MEAN), list(STD)))
    train = datasets.ImageFolder(str(root / "train"), transforms.Compose([resize, *augment, *to_tensor]))
    val = datasets.ImageFolder(str(root / "val"), transforms.Compose([resize, *to_tensor]))
    loader = DataLoader(train, batch, True, num_workers=workers, drop_last=True, persistent_workers=True)
    start = time.monotonic()
    for images, labels in chain.from_iterable(repeat(loader)):
        progress = (time.monotonic() - start) / seconds
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate(int(progress * plan.total_steps))
        optimizer.zero_grad()
        smoothing = config.train.label_smoothing
        loss = functional.cross_entropy(
            model(images.to(device)), labels.to(device), label_smoothing=smoothing
        )
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    model.eval()
    with torch.inference_mode():
        batches = DataLoader(val, batch, num_workers=workers)
        correct = [model(images.to(device)).argmax(1) == labels.to(device) for images, labels in batches]
    return int(torch.cat(correct).sum()) / len(val)


if __name__ == "__main__":
    parser = Parser(description=__doc__)
    add_recipe(parser)
    help = "number of seeds (default 3)"
    parser.add_argument("--seeds", type=positive_int, default=3, metavar="N", help=help)
    run_script(parser, compare)
