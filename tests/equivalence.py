"""Train the jobs of docs/equivalence.md: one job started in every way, and each recipe.

`make equivalence` trains each row of the page, and writes its figures into it.
tests/test_equivalence.py checks that a run has the weights of its row, which are the same on every
x86-64 CPU with AVX2 (`run.portable`). All rows except two make the same passes of 24 images in the
same order, so that batch norm has the same inputs; only the order of float32 additions differs. A
tolerance of 0 means bit-identical weights.
"""

import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from pipeline.addons.run import portable

if __name__ == "__main__":
    os.environ.update(portable.VARIABLES)  # before torch is imported

import torch
from harness import SMALL, Job, by_hand, spawned, two_nodes

from pipeline.addons.datasets.synthetic import make_digits
from pipeline.record.checkpoint_contents import read_model
from pipeline.record.checkpoint_files import find

STEPS = 20
# A low LR: with the recipe's LR, 20 steps amplify one rounding error to 1e-2, which hides real
# differences. Rounding errors are below 2e-5; other batch norm inputs give 7 times more. Another
# model is compiled: torch.compile takes minutes for ShuffleNet's channel shuffle on a CPU.
SIZE = ("augment.size=32", "evaluate.resize=32")
JOB = (*SMALL, *SIZE, "model.arch=shufflenet_v2_x0_5", "batch.global=96", "optimizer.lr=1e-4",
       "train.clip=1", "train.ema=0.9", f"train.max_steps={STEPS}",
       f"evaluate.every={STEPS} steps")  # fmt: skip
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Batch norm's buffers, which training never reads; with DDP each process has its own."""
SMALLER = ("data.source=synthetic", "data.root=auto", "data.num_images=48", "data.workers=0",
           "batch.global=12", "augment.first_size=auto", "schedule.warmup=1 steps", "train.max_steps=2",
           "train.precision=fp32", "evaluate.every=2 steps", "evaluate.batch=12", "run.device=cpu",
           "run.deterministic=true", "track.uri=none", "track.report=false")  # fmt: skip
"""Two steps of each recipe are short with these and the options of its row."""
PAGE = Path(__file__).parents[1] / "docs" / "equivalence.md"


class Row(NamedTuple):
    """A row of the page's first table."""

    name: str
    words: str
    processes: str
    """Their number and, if there are several, the launcher."""
    against: str
    difference: str
    """Largest absolute difference of any weight after the last step."""
    tolerance: str
    why: str
    weights: str
    """The first 16 digits of a SHA-256 of the weights; "" if they depend on the model of CPU."""

    def __str__(self) -> str:
        return "| {} | `{}` | {} | {} | {} | {} | {} | {} |".format(*self)


CELLS = [
    [cell.strip(" `") for cell in line.split("|")[1:-1]]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| run |", "| recipe |", "| ---"))
]
ROWS = {cells[0]: Row(*cells) for cells in CELLS if len(cells) == len(Row._fields)}
RECIPES = {cells[0]: (cells[1], cells[2]) for cells in CELLS if len(cells) == 3}
"""The options and the weights of each row of the page's second table."""


def measured(rows: Iterable[Row], folder: Path, digits: Path) -> Iterator[Row]:
    """Train each row's job and compare its weights with those of the row it names."""
    weights: dict[str, dict[str, torch.Tensor]] = {}
    for row in rows:
        mine = weights[row.name] = train(row, folder, digits)
        theirs = weights[row.against]
        assert mine.keys() == theirs.keys()
        pairs = ((tensor.double(), theirs[name].double()) for name, tensor in mine.items())
        difference = max(float((a - b).abs().max()) for a, b in pairs)
        yield row._replace(difference=f"{difference:.2g}", weights=digest(row, mine))


def train(row: Row, scratch: Path, digits: Path) -> dict[str, torch.Tensor]:
    """Train a row's job; return its weights and their EMA."""
    folder = scratch / row.name.replace(" ", "-").replace(",", "")
    words = ["digits", f"data.root={digits}", *JOB, *row.words.split()]
    count, _, start = row.processes.partition(", ")
    is_launched = row.name in ("2 processes", "torchrun")
    job = Job(folder, words, nproc=int(count), by_torchrun=start == "torchrun", interpreter=is_launched)
    launchers = {"two nodes": two_nodes, "spawned": spawned, "by hand": by_hand}
    # Compilation can take minutes on a busy CPU.
    done = (launchers[start](job) if start in launchers else job.start().wait(900)).done
    assert done["step"] == str(STEPS)
    contents = read_model(find(folder))
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
    """Train two steps of a recipe; return its weights as the page has them."""
    words = re.findall(r"[\w.]+=(?:{[^}]*}|\S+)", RECIPES[name][0])
    return Job(scratch / name, [name, *SMALLER, *words]).run().done["weights"][:16]


def main() -> int:
    """Write the figures of all rows; return 1 if one exceeds its tolerance."""
    page = re.sub(r"with torch \S+,", f"with torch {torch.__version__},", PAGE.read_text())
    code = 0
    with tempfile.TemporaryDirectory(prefix="equivalence-") as folder:
        scratch = Path(folder)
        make_digits(scratch / "digits")
        for row in measured(ROWS.values(), scratch, scratch / "digits"):
            print(f"{row.name:<20} {row.difference}", flush=True)
            page = page.replace(str(ROWS[row.name]), str(row))
            code |= float(row.difference) > float(row.tolerance)
        for name, (_, weights) in RECIPES.items():
            page = page.replace(weights, train_recipe(name, scratch))
    PAGE.write_text(page)
    return code


if __name__ == "__main__":
    sys.exit(main())
