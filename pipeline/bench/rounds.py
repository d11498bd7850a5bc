"""Interleaved rounds and the table of their results, for benchmarks that compare speeds.

A speed measured on a shared machine says little. So everything that is compared takes turns, and
each speed is divided by the reference's speed in the same round. The median of these ratios says
what our code costs.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

Turn = Callable[[], float | tuple[float, float]]
"""Runs one turn; returns its images/s, or (images/s, CPU seconds of an image)."""


class TurnError(Exception):
    """A row cannot run, for the reason in the message. The other rows continue."""


@dataclass
class Row:
    """Something that is compared, such as a training loop or a data loader, and its speeds."""

    name: str
    turn: Turn | None
    """May raise TurnError. None: it cannot run here."""
    reference: "Row | None" = None
    """Row that the ratio refers to; None: this row itself."""
    pixel_diff: float | None = 0.0
    """Mean absolute difference of pixels from 0 to 255 to those of the reference, if it has any."""
    failure: str = ""
    """Reason why it cannot run, or could not run to the end."""
    remark: str = ""
    """Text after the figures in the table."""
    speeds: list[float] = field(default_factory=list)
    """Images/s of each round."""
    cpu_s: list[float] = field(default_factory=list)
    """CPU seconds of an image in each round, where they are measured."""

    @property
    def cost(self) -> str:
        """Return what an image costs, or "" where it is not measured."""
        if not self.cpu_s:
            return ""
        seconds = median(self.cpu_s)
        rate = f", {1 / seconds:,.0f} images/s a core" if seconds else ""  # the kernel counts ticks of 10 ms
        return f"CPU {1e3 * seconds:.2f} ms an image{rate}"

    @property
    def ratios(self) -> list[float]:
        reference = self.reference or self
        return [speed / other for speed, other in zip(self.speeds, reference.speeds, strict=False)]


class Loop:
    """A training loop, called to run one turn, and the GPU memory that it takes."""

    def __init__(
        self, device: torch.device, images: int, steps: int, build: Callable[..., Callable[[], object]], *arguments: Any
    ) -> None:
        """Build the loop: `build(*arguments)` returns the function that runs a step.

        A turn has `steps` steps of `images` images.
        """
        self._device, self._images, self._steps = device, images, steps
        before = self._allocated()
        self._run_step = build(*arguments)
        self.resident_bytes = self._allocated() - before
        """Weights and optimizer state."""
        self.step_bytes = 0
        """Peak of what the steps of the last turn allocated in addition."""

    def __call__(self) -> float:
        """Run one turn and return its images/s."""
        is_cuda = self._device.type == "cuda"
        before = self._allocated()
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
            torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        for _ in range(self._steps):
            self._run_step()
        if is_cuda:
            torch.cuda.synchronize(self._device)
            self.step_bytes = torch.cuda.max_memory_allocated(self._device) - before
        return self._images * self._steps / (time.perf_counter() - start)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0


def interleave(rows: list[Row], rounds: int, *, show_progress: bool = False) -> None:
    """Run the turns of all rows and keep their speeds, except those of a first warm-up round."""
    for number in range(rounds + 1):
        for row in rows if number % 2 else reversed(rows):  # alternate, as later turns find warmer caches
            if row.turn is None:
                continue
            try:
                result = row.turn()
            except TurnError as error:
                row.turn, row.failure = None, str(error)
                continue
            speed, *cpu_s = result if isinstance(result, tuple) else (result,)
            if number:
                row.speeds.append(speed)
                row.cpu_s += cpu_s
            if show_progress:
                turn = f"round {number} of {rounds}" if number else "warm-up"
                print(f"{turn}: {row.name} {speed:,.1f} images/s", file=sys.stderr, flush=True)


def figures(row: Row) -> dict[str, object]:
    """Return a row of `bench … --json`."""
    speed = ratio = None
    if row.speeds:
        speed, ratio = round(median(row.speeds), 1), round(median(row.ratios), 4)
    note = {"note": row.failure} if row.failure else {}
    return {"name": row.name, "images_per_s": speed, "ratio": ratio, "pixel_diff": row.pixel_diff, **note}


def table(title: str, rows: list[Row]) -> str:
    lines = [f"{title}, medians"]
    for row in rows:
        parts = [row.cost, row.remark, row.failure]
        if row.speeds:
            span = f"{min(row.ratios):.3f} to {max(row.ratios):.3f}"
            parts.insert(0, f"{median(row.speeds):>10,.1f} images/s   ratio {median(row.ratios):.3f} ({span})")
        lines.append(f"  {row.name:<20} " + "   ".join(filter(None, parts)))
    return "\n".join(lines)


def show(title: str, rows: list[Row], *, as_json: bool) -> str:
    """Return the rows as JSON or as a table."""
    return json.dumps({"rows": [figures(row) for row in rows]}) if as_json else table(title, rows)
