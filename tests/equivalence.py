"""The equivalence certificate: one job of 20 steps started and spread in every way, and how far its weights come apart.

`make equivalence` writes docs/equivalence.md; tests/test_equivalence.py holds every row within its
tolerance. All rows but two make the same passes, of 24 images in the same order, so that batch norm
sees the same: what is then left is the order in which float32 adds. A tolerance of 0 means the same
bits.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from harness import SMALL, Job, by_hand, spawned, two_nodes

from pipeline.data.sources import make_digits
from pipeline.record.checkpoint import decode, find, read_verified

STEPS = 20
# a low rate: at the recipe's own, 20 steps make 1e-2 of the last bit of a sum, and nothing could be
# told from it
JOB = (
    *SMALL, "batch.global=96", "optimizer.lr=1e-4", "train.clip=1", "train.ema=0.9", f"train.max_steps={STEPS}",
    f"evaluate.every={STEPS} steps",
)  # fmt: skip
ROUNDING = 2e-5
"""20 steps carry the last bit of a sum to less; another function, as of the rows of other passes, to seven times more."""
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Of batch norm, which no step of training reads: under DDP each process has its own."""


@dataclass(frozen=True)
class Row:
    name: str
    words: str
    processes: int = 1
    start: str = ""
    """How the processes are started, where not by --nproc."""
    against: str = "one process"
    tolerance: float = 0
    why: str = "the same arithmetic"


ROWS = (
    Row("one process", "batch.accumulate=4"),
    Row("one process, again", "batch.accumulate=4", why="deterministic"),
    Row("dataparallel", "batch.accumulate=4 parallel=dataparallel", why="a pass-through on a CPU"),
    Row("2 processes", "batch.accumulate=2", 2, tolerance=ROUNDING, why="two processes' sums are added"),
    Row("torchrun", "batch.accumulate=2", 2, "torchrun", "2 processes"),
    Row("two nodes", "batch.accumulate=2", 2, "two nodes", "2 processes", why="two torchrun agents on one machine"),
    Row("spawned", "batch.accumulate=2", 2, "spawned", "2 processes", why="torch.multiprocessing.spawn, tcp://"),
    Row("by hand", "batch.accumulate=2", 2, "by hand", "2 processes", why="RANK and WORLD_SIZE given, tcp://"),
    Row("4 processes", "batch.accumulate=1", 4, tolerance=ROUNDING, why="four processes' sums are added"),
    Row("accumulation 2", "batch.accumulate=2", tolerance=1e-3, why="batch norm sees 48 images, not 24: another function"),
    Row("accumulation 1", "batch.accumulate=1", tolerance=1e-3, why="batch norm sees 96 images, not 24: another function"),
    Row("exact", "run.exact=true exact.shards=4", tolerance=ROUNDING, why="gradients are rounded to 2^-44, then added"),
    Row("exact, 2 processes", "run.exact=true exact.shards=4", 2, against="exact", why="integers add in any order"),
    Row("fsdp, 2 processes", "parallel=fsdp batch.accumulate=2", 2, tolerance=ROUNDING, why="slices and norms are added"),
    Row("fsdp, again", "parallel=fsdp batch.accumulate=2", 2, against="fsdp, 2 processes", why="deterministic"),
    Row("fsdp, 4 processes", "parallel=fsdp batch.accumulate=1", 4, tolerance=ROUNDING, why="slices and norms are added"),
    Row("2 stages", "parallel=stages stages.micro_batches=4", 2, tolerance=ROUNDING,
        why="the gradient's norm is added up stage by stage"),
    Row("2 stages, again", "parallel=stages stages.micro_batches=4", 2, against="2 stages", why="deterministic"),
    Row("2 stages, gpipe", "parallel=stages stages.micro_batches=4 stages.schedule=gpipe", 2, against="2 stages",
        why="each stage goes backward in the same order"),
    Row("2 stages, 2 copies", "parallel=stages stages.micro_batches=2", 4, tolerance=ROUNDING,
        why="two copies' sums are added"),
)  # fmt: skip
# of another model, since the ShuffleNet's channels, shuffled, take a CPU's compiler minutes
COMPILED = (
    Row("ResNet-18", "model.arch=resnet18 batch.accumulate=4", against="ResNet-18"),
    Row("ResNet-18, compiled", "model.arch=resnet18 batch.accumulate=4 train.compile=on", against="ResNet-18",
        tolerance=ROUNDING, why="fused kernels round elsewhere"),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    row: Row
    difference: float
    """The largest, of any weight after the last step."""

    @property
    def holds(self) -> bool:
        return self.difference <= self.row.tolerance


def outcomes(rows: tuple[Row, ...], folder: Path, digits: Path) -> Iterator[Outcome]:
    weights: dict[str, dict[str, torch.Tensor]] = {}
    for row in rows:
        weights[row.name] = _train(row, folder / row.name.replace(" ", "-").replace(",", ""), digits)
        yield Outcome(row, _largest_difference(weights[row.name], weights[row.against]))


def _train(row: Row, folder: Path, digits: Path) -> dict[str, torch.Tensor]:
    job = Job(
        folder,
        ["digits", f"data.root={digits}", *JOB, *row.words.split()],
        nproc=row.processes,
        by_torchrun=row.start == "torchrun",
    )
    other_ways = {"two nodes": two_nodes, "spawned": spawned, "by hand": by_hand}
    # compiling takes a busy CPU minutes
    done = (other_ways[row.start](job) if row.start in other_ways else job.start().wait(900)).done
    assert done["step"] == str(STEPS)
    path = find(folder)
    contents = decode(read_verified(path), path)
    return {
        f"{kind} {name}": tensor
        for kind in ("model", "average")
        for name, tensor in contents[kind].items()
        if not name.endswith(STATISTICS)
    }


def _largest_difference(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert mine.keys() == theirs.keys()
    return max(float((mine[name].double() - theirs[name].double()).abs().max()) for name in mine)


def table(found: list[Outcome]) -> str:
    lines = [
        "# Equivalence",
        "",
        f"The digits, {STEPS} steps of 96 images, a ShuffleNet (or a ResNet-18) with batch norm, momentum, clipping and a",
        f"moving average, on a CPU with torch {torch.__version__}, deterministic. Largest difference of any weight, or of",
        "its average, after the last step, from the run named; 0 is the same bits. Made by `make equivalence`;",
        "`tests/test_equivalence.py` holds every row within its tolerance.",
        "",
        "| run | with | processes | compared with | largest difference | tolerance | because |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in found:
        row, words = one.row, f"`{one.row.words}`"
        start = row.start or ("--nproc" if row.processes > 1 else "")
        lines.append(
            f"| {row.name} | {words} | {row.processes}{f', {start}' * bool(start)} | {row.against} |"
            f" {one.difference:.2g} | {row.tolerance:g} | {row.why} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the certificate; exit 1 if a row is out of its tolerance.")
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    found = []
    with tempfile.TemporaryDirectory(prefix="equivalence-") as scratch:
        make_digits(Path(scratch) / "digits")
        for one in outcomes(ROWS + COMPILED, Path(scratch), Path(scratch) / "digits"):
            found.append(one)
            print(f"{one.row.name:<20} {one.difference:.2g}", flush=True)
    out.write_text(table(found))
    return int(not all(one.holds for one in found))


if __name__ == "__main__":
    sys.exit(main())
