"""Interleaved rounds, the table of their results, and what all benchmarks do with a command line.

A speed measured on a shared machine says little. So what is compared takes turns, and each speed is
divided by the reference's in the same round. The median of these ratios is the result.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import active_children
from statistics import median
from typing import NoReturn

from pipeline import launcher
from pipeline.cli.arguments import Parser, positive_int
from pipeline.cli.main import execute, exit_with
from pipeline.errors import one_line
from pipeline.supervision import process_stat

Turn = Callable[[], float | tuple[float, float]]
"""Runs one turn; returns images/s, or (images/s, CPU seconds of an image). May raise TurnError."""


class TurnError(Exception):
    """A row cannot run, for the reason in the message. The other rows continue."""


@dataclass
class Row:
    """Something that is compared, such as a training loop or a data loader, and its speeds."""

    name: str
    turn: Turn
    reference: "Row | None" = None
    """Row that the ratio refers to; None: this row itself."""
    pixel_diff: float | None = 0.0
    """Mean absolute difference of pixels from 0 to 255 to those of the reference, if measured."""
    failure: str = ""
    """Reason why it could not run to the end."""
    remark: str = ""
    """Text after the figures in the table."""
    speeds: list[float] = field(default_factory=list)  # images/s of each round
    cpu_s: list[float] = field(default_factory=list)  # CPU seconds of an image, where they are measured

    @property
    def ratios(self) -> list[float]:
        reference = self.reference or self
        return [speed / other for speed, other in zip(self.speeds, reference.speeds, strict=False)]


def interleave(rows: list[Row], rounds: int) -> None:
    """Run the turns of all rows and keep their speeds, except those of a first warm-up round."""
    for number in range(rounds + 1):
        for row in rows if number % 2 else reversed(rows):  # alternate, as later turns find warmer caches
            if row.failure:
                continue
            try:
                result = row.turn()
            except TurnError as error:
                row.failure = str(error)
                continue
            speed, *cpu_s = result if isinstance(result, tuple) else (result,)
            if number:
                row.speeds.append(speed)
                row.cpu_s += cpu_s
            if launcher.is_first():
                turn = f"round {number} of {rounds}" if number else "warm-up"
                print(f"{turn}: {row.name} {speed:,.1f} images/s", file=sys.stderr, flush=True)


def show(title: str, rows: list[Row], options: argparse.Namespace) -> str:
    """Return the rows as JSON or as a table."""
    if options.json:
        return json.dumps({"rows": [_figures(row) for row in rows]})
    lines = [f"{title}; medians of {options.rounds} interleaved rounds of {options.steps} steps"]
    for row in rows:
        parts = [row.remark, row.failure]
        if row.cpu_s:
            seconds = max(1e-6, median(row.cpu_s))
            parts.insert(0, f"CPU {1e3 * seconds:.2f} ms an image, {1 / seconds:,.0f} images/s a core")
        if row.speeds:
            span = f"{min(row.ratios):.3f} to {max(row.ratios):.3f}"
            speed = f"{median(row.speeds):>10,.1f} images/s   ratio {median(row.ratios):.3f} ({span})"
            parts.insert(0, speed)
        lines.append(f"  {row.name:<20} " + "   ".join(filter(None, parts)))
    return "\n".join(lines)


def _figures(row: Row) -> dict[str, object]:
    speed = round(median(row.speeds), 1) if row.speeds else None
    ratio = round(median(row.ratios), 4) if row.speeds else None
    note = {"note": row.failure} if row.failure else {}
    return {"name": row.name, "images_per_s": speed, "ratio": ratio, "pixel_diff": row.pixel_diff, **note}


def row(name: str, measure: Callable[..., str], *arguments: object) -> str:
    """Return the row of what `measure` returns, or of why it failed, with its seconds."""
    start = time.monotonic()
    try:
        text = measure(*arguments)
    except Exception as error:
        text = f"FAILED: {one_line(error if isinstance(error, TurnError) else repr(error), 800)}"
    return f"  {name:<20} {text} [{time.monotonic() - start:.0f} s]"


def workers_cpu_seconds() -> float:
    """Return the CPU time that the worker processes of this process have used."""
    stats = [process_stat(process.pid) for process in active_children() if process.pid]
    return sum(int(ticks) for stat in stats for ticks in stat[11:13]) / os.sysconf("SC_CLK_TCK")


def add_size(parser: Parser, steps: int = 8) -> None:
    """Add the flags of a benchmark that has rounds."""
    add = parser.add_argument
    add("--rounds", type=positive_int, default=7, metavar="N", help="interleaved rounds (default 7)")
    add("--steps", type=positive_int, default=steps, metavar="N", help=f"steps of a round (default {steps})")
    add("--json", action="store_true", help="print JSON")


def run_script(
    parser: Parser, measure: Callable[[argparse.Namespace], str], *, has_ranks: bool = False
) -> NoReturn:
    """Run a benchmark as a process: print its result, or its error in one line, and exit.

    has_ranks: it may run under torchrun, and only rank 0 prints.
    """
    if not has_ranks:
        launcher.forget_launcher()
    parser.set_defaults(run=measure, parser=parser)
    exit_with(execute(sys.argv[1:], parser))
