"""Train one job of 20 steps with every launcher and parallel mode, and compare the weights.

`make equivalence` writes docs/equivalence.md. tests/test_equivalence.py checks that a run has the
weights of its row, which are the same on every x86-64 CPU with AVX2 (`run.portable`). All rows
except two make the same passes of 24 images in the same order, so that batch norm has the same
inputs; only the order of float32 additions differs. A tolerance of 0 means bit-identical weights.
Below are two steps of each recipe, with fewer and smaller images.
"""

import argparse
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pipeline.addons.run import portable

if __name__ == "__main__":
    os.environ.update(portable.VARIABLES)  # before torch is imported

import torch
from harness import SMALL, Job, by_hand, spawned, two_nodes

from pipeline.addons.datasets.synthetic import make_digits
from pipeline.record.checkpoint_contents import decode
from pipeline.record.checkpoint_files import find, read_verified

STEPS = 20
# A low LR: with the recipe's LR, 20 steps amplify one rounding error to 1e-2, which hides real
# differences.
JOB = (*SMALL, "batch.global=96", "optimizer.lr=1e-4", "train.clip=1", "train.ema=0.9",
       f"train.max_steps={STEPS}", f"evaluate.every={STEPS} steps")  # fmt: skip
ROUNDING = 2e-5
"""Rounding errors after 20 steps are smaller; other batch norm inputs give 7 times more."""
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Batch norm's buffers, which training never reads; with DDP each process has its own."""


@dataclass(frozen=True)
class Row:
    name: str
    words: str
    processes: int = 1
    start: str = ""
    """The launcher, if it is not --nproc."""
    against: str = "one process"
    tolerance: float = 0
    why: str = "the same arithmetic"


ROWS = (
    Row("one process", "batch.accumulate=4"),
    Row("one process, again", "batch.accumulate=4", why="deterministic"),
    Row("dataparallel", "batch.accumulate=4 parallel=dataparallel", why="does nothing on a CPU"),
    Row("2 processes", "batch.accumulate=2", 2, tolerance=ROUNDING, why="two processes' sums are added"),
    Row("torchrun", "batch.accumulate=2", 2, "torchrun", "2 processes"),
    Row("two nodes", "batch.accumulate=2", 2, "two nodes", "2 processes",
        why="two torchrun agents on one machine"),
    Row("spawned", "batch.accumulate=2", 2, "spawned", "2 processes",
        why="torch.multiprocessing.spawn, tcp://"),
    Row("by hand", "batch.accumulate=2", 2, "by hand", "2 processes", why="RANK and WORLD_SIZE set, tcp://"),
    Row("4 processes", "batch.accumulate=1", 4, tolerance=ROUNDING, why="four processes' sums are added"),
    Row("accumulation 2", "batch.accumulate=2", tolerance=1e-3, why="batch norm over 48 images, not 24"),
    Row("accumulation 1", "batch.accumulate=1", tolerance=1e-3, why="batch norm over 96 images, not 24"),
    Row("exact", "run.exact=true exact.shards=4", tolerance=ROUNDING,
        why="gradients are rounded to 2^-44, then added"),
    Row("exact, 2 processes", "run.exact=true exact.shards=4", 2, against="exact",
        why="integer sums have no order"),
    Row("fsdp, 2 processes", "parallel=fsdp batch.accumulate=2", 2, tolerance=ROUNDING,
        why="sums and norms of slices are added"),
    Row("fsdp, again", "parallel=fsdp batch.accumulate=2", 2, "", "fsdp, 2 processes", why="deterministic"),
    Row("fsdp, 4 processes", "parallel=fsdp batch.accumulate=1", 4, tolerance=ROUNDING,
        why="sums and norms of slices are added"),
    Row("fsdp, two nodes", "parallel=fsdp fsdp.shard=node batch.accumulate=1", 4, "two nodes",
        tolerance=ROUNDING, why="sums and norms of slices are added, then those of two nodes"),
    Row("2 stages", "parallel=stages stages.micro_batches=4", 2, tolerance=ROUNDING,
        why="the gradient norms of the stages are added"),
    Row("2 stages, again", "parallel=stages stages.micro_batches=4", 2, "", "2 stages", why="deterministic"),
    Row("2 stages, gpipe", "parallel=stages stages.micro_batches=4 stages.schedule=gpipe", 2,
        against="2 stages", why="each stage has the same order of backward passes"),
    Row("2 stages, 2 copies", "parallel=stages stages.micro_batches=2", 4, tolerance=ROUNDING,
        why="two copies' sums are added"),
)  # fmt: skip
# Another model: torch.compile takes minutes for ShuffleNet's channel shuffle on a CPU.
COMPILED = (
    Row("ResNet-18", "model.arch=resnet18 batch.accumulate=4", against="ResNet-18"),
    Row("ResNet-18, compiled", "model.arch=resnet18 batch.accumulate=4 train.compile=on", against="ResNet-18",
        tolerance=ROUNDING, why="fused kernels round differently"),
)  # fmt: skip

PAGE = Path(__file__).parents[1] / "docs" / "equivalence.md"
SMALLER = ("data.source=synthetic", "data.root=auto", "data.num_images=48", "data.workers=0",
           "batch.global=12", "augment.first_size=auto", "schedule.warmup=1 steps", "train.max_steps=2",
           "train.precision=fp32", "evaluate.every=2 steps", "evaluate.batch=12", "run.device=cpu",
           "run.deterministic=true", "track.uri=none", "track.report=false")  # fmt: skip
RECIPES = {
    "cifar10": "augment.size=32",
    "cifar10-96": "augment.size=32",
    "cifar10-fast": "augment.size=32",
    "imagenette": "augment.size=64",
    "resnet50-90": "augment.size=64 evaluate.resize=64",
    "resnet50-fast": "augment.size=64 evaluate.size=64",
    "resnet50-v2": "augment.size=64 evaluate.size=64 evaluate.resize=64",
    "vit-l16": "augment.size=64 evaluate.resize=64 model.arch=vit_s_16 model.args={image_size: 64}",
    "vit-s16": "augment.size=64 evaluate.resize=64 model.args={image_size: 64}",
}
"""Options that make two steps of each recipe short, in addition to SMALLER."""


class Outcome(NamedTuple):
    row: Row
    weights: str
    """The first 16 digits of a SHA-256 of the weights; "" if they depend on the model of CPU."""
    difference: float
    """Largest absolute difference of any weight after the last step."""


def outcomes(rows: tuple[Row, ...], folder: Path, digits: Path) -> Iterator[Outcome]:
    """Train each row's job and compare its weights with those of the row it names."""
    weights: dict[str, dict[str, torch.Tensor]] = {}
    for row in rows:
        mine = weights[row.name] = train(row, folder, digits)
        theirs = weights[row.against]
        assert mine.keys() == theirs.keys()
        pairs = ((tensor.double(), theirs[name].double()) for name, tensor in mine.items())
        yield Outcome(row, digest(row, mine), max(float((a - b).abs().max()) for a, b in pairs))


def train(row: Row, scratch: Path, digits: Path) -> dict[str, torch.Tensor]:
    """Train a row's job; return its weights and their EMA."""
    folder = scratch / row.name.replace(" ", "-").replace(",", "")
    words = ["digits", f"data.root={digits}", *JOB, *row.words.split()]
    is_launched = row.name in ("2 processes", "torchrun")
    job = Job(
        folder, words, nproc=row.processes, by_torchrun=row.start == "torchrun", interpreter=is_launched
    )
    launchers = {"two nodes": two_nodes, "spawned": spawned, "by hand": by_hand}
    # Compilation can take minutes on a busy CPU.
    done = (launchers[row.start](job) if row.start in launchers else job.start().wait(900)).done
    assert done["step"] == str(STEPS)
    path = find(folder)
    contents = decode(read_verified(path), path)
    return {
        f"{kind} {name}": tensor
        for kind in ("model", "average")
        for name, tensor in contents[kind].items()
        if not name.endswith(STATISTICS)
    }


def digest(row: Row, weights: dict[str, torch.Tensor]) -> str:
    """Return the row's weights as the page has them."""
    if "train.compile=on" in row.words:
        return ""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode() + weights[name].numpy().tobytes())
    return found.hexdigest()[:16]


def train_recipe(name: str, scratch: Path) -> str:
    """Train two steps of a recipe; return the first 16 digits of its done line's weights."""
    words = re.findall(r"[\w.]+=(?:{[^}]*}|\S+)", RECIPES[name])
    return Job(scratch / name, [name, *SMALLER, *words]).run().done["weights"][:16]


def published() -> dict[str, str]:
    """Return the weights on the page, by the name of the row or recipe."""
    rows = re.findall(r"^\| `?([^|`]+)`? \|.*\| ([0-9a-f]{16}) \|", PAGE.read_text(), re.MULTILINE)
    return dict(rows)


def table(found: list[Outcome], recipes: dict[str, str]) -> str:
    lines = [
        "# Equivalence",
        "",
        f"The digits, {STEPS} steps of 96 images, a ShuffleNet (or a ResNet-18) with batch norm, momentum,",
        f"gradient clipping and EMA, on a CPU with torch {torch.__version__}, portable. The table has the",
        "largest difference of any weight or EMA weight after the last step from the run named (0 means",
        "bit-identical), and the first 16 digits of a SHA-256 of the weights. They are the same on every",
        "x86-64 CPU with AVX2. Made by `make equivalence`; each change of this project is tested against",
        "these weights (`tests/test_equivalence.py`).",
        "",
        "| run | with | processes | compared with | largest difference | tolerance | reason | weights |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for outcome in found:
        row = outcome.row
        start = row.start or ("--nproc" if row.processes > 1 else "")
        processes = f"{row.processes}, {start}" if start else str(row.processes)
        lines.append(
            f"| {row.name} | `{row.words}` | {processes} | {row.against} |"
            f" {outcome.difference:.2g} | {row.tolerance:g} | {row.why} | {outcome.weights} |"
        )
    lines += [
        "",
        "## A short run of each recipe",
        "",
        "Two steps of 12 synthetic images in fp32, deterministic, with the first 16 digits of the weights",
        "in the `done` line.",
        "",
        "| recipe | with | weights |",
        "| --- | --- | --- |",
        *(f"| `{name}` | `{RECIPES[name]}` | {weights} |" for name, weights in recipes.items()),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the table; exit 1 if a row exceeds its tolerance.")
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    found = []
    with tempfile.TemporaryDirectory(prefix="equivalence-") as scratch:
        make_digits(Path(scratch) / "digits")
        for outcome in outcomes(ROWS + COMPILED, Path(scratch), Path(scratch) / "digits"):
            found.append(outcome)
            print(f"{outcome.row.name:<20} {outcome.difference:.2g}", flush=True)
        recipes = {name: train_recipe(name, Path(scratch)) for name in RECIPES}
    out.write_text(table(found, recipes))
    return int(any(outcome.difference > outcome.row.tolerance for outcome in found))


if __name__ == "__main__":
    sys.exit(main())
