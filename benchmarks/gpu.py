"""Measure everything that needs a GPU, on one GPU, part by part, and end after 7 minutes.

  python benchmarks/gpu.py --images data/imagenette/train
  python benchmarks/gpu.py --only checks

Each row is printed as soon as it is known. Its command runs in a process of its own, so that it
frees its memory and, if it fails, the rest still runs. MLflow and a network are not needed.

  headline    our loop and the minimal loop in bf16, eager and compiled
  bf16, fp16  the same, with the loops of torchvision and timm
  jpeg        our loop with the data loader, from the images of --images
  checks      doctor, accuracy, bit-identical repetition and resumption, SIGTERM
"""

import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import torch
from rounds import TurnError, run_script

from pipeline import machine
from pipeline.cli.arguments import Parser, add_overrides, path, positive_int
from pipeline.config.load import load
from pipeline.errors import TemporaryError, one_line

_TIME_LIMIT_S = 420
_MODEL = (
    "model.arch=resnet50", "model.channels_last=true", "augment.size=224", "train.precision=bf16",
    "data.source=synthetic", "data.num_images=4096", "train.epochs=10000",
)  # fmt: skip
_PARTS = {"headline": 70, "bf16": 50, "fp16": 75, "jpeg": 55, "checks": 90}  # seconds on one H100, estimated


class Suite:
    """Runs commands until the time limit, and prints rows."""

    def __init__(self, folder: Path, options: Namespace) -> None:
        self._folder, self._options = folder, options
        self._deadline = time.monotonic() + _TIME_LIMIT_S
        self._weights: dict[str, str] = {}  # mode -> digest of the weights of its first run
        self.failed: list[str] = []  # rows

    def measure(self, part: str) -> None:
        """Run a part and print its rows."""
        match part:
            case "headline":
                self._row(part, self._compare_loops, "plain", 5, 20)
            case "bf16" | "fp16":
                others = "torchvision timm plain"
                self._row(part, self._compare_loops, others, 3, 12, f"train.precision={part}")
            case "jpeg" if self._options.images:
                words = ("data.source=folder", f"data.root={self._options.images}")
                self._row(part, self._compare_loops, "plain loaded", 2, 12, *words)
            case "jpeg":
                print("  not run: give --images DIR")
            case "checks":
                self._row("doctor", lambda: self._run(*self._train("doctor", command="doctor")) and "ok")
                self._row("digits", self._reach_target)
                for mode in ("deterministic", "exact"):
                    for run in (mode, f"{mode}-again"):
                        self._row(run, self._compare_weights, mode, run)
                self._row("SIGTERM", self._stop, signal.SIGTERM)
                self._row("SIGKILL", self._stop, signal.SIGKILL)
                self._row("resumed", self._compare_weights, "deterministic", "stopped")

    def _row(self, name: str, measure: Callable[..., str], *arguments: Any) -> None:
        """Print what `measure` returns, or why it failed."""
        start = time.monotonic()
        try:
            text = measure(*arguments)
        except Exception as error:
            text = f"FAILED: {error if isinstance(error, TurnError) else repr(error)}"
            self.failed.append(name)
        print(f"  {name:<20} {text} [{time.monotonic() - start:.0f} s]", flush=True)

    def _compare_loops(self, loops: str, rounds: int, steps: int, *words: str) -> str:
        """Run loop.py, which prints its rows."""
        flags = [f"--rounds={rounds}", f"--steps={steps}", *(f"--only={name}" for name in loops.split())]
        model = [*_MODEL, f"batch.global={self._options.batch}", *self._options.overrides, *words]
        self._run(str(Path(__file__).with_name("loop.py")), *flags, *model, stdout=None)
        return f"{rounds} rounds"

    def _reach_target(self) -> str:
        line = self._run(*self._train("accuracy"))
        top1 = float(line.rpartition("top1=")[2].split()[0])
        if top1 < 0.97:
            raise TurnError(f"top1={top1:.4f} is below 0.97")
        return f"ok: top1={top1:.4f}"

    def _compare_weights(self, mode: str, run: str) -> str:
        """Train, or resume, a short run; fail if another one of its mode had other weights."""
        weights = self._run(*self._train(run, mode)).rpartition("sha256:")[2][:8]
        if weights != self._weights.setdefault(mode, weights):
            raise TurnError(f"weights {weights} differ from {self._weights[mode]}")
        return f"ok: weights {weights}"

    def _stop(self, number: int) -> str:
        """Start or resume a short run, and signal it when it has saved."""
        command = [sys.executable, *self._train("stopped", "deterministic")]
        folder = self._folder / "stopped/checkpoints"
        before = set(folder.glob("step-*.pt"))
        with subprocess.Popen(command, stdout=DEVNULL, stderr=DEVNULL) as process:
            try:
                while process.poll() is None and set(folder.glob("step-*.pt")) <= before:
                    self._seconds_left()
                    time.sleep(0.01)
                start = time.monotonic()
                process.send_signal(number)
                code = process.wait(timeout=10)
            finally:
                process.kill()
        if code not in (TemporaryError.code, -signal.SIGKILL):
            raise TurnError(f"exit {code}")  # 0: it ended before it could be stopped
        return f"ok: exit {code} after {time.monotonic() - start:.1f} s"

    def _train(self, run: str, mode: str = "", command: str = "train") -> list[str]:
        """Return the command that trains the digits: to the end, or in a mode for three epochs."""
        words = ["-P", "-m", "pipeline", command, "digits", f"run.dir={self._folder / run}", "track.uri=none"]
        short = ["train.max_steps=42", f"run.{mode}=true"] if mode else []
        data = f"data.root={self._folder / 'digits'}"
        return [*words, "track.report=false", data, *short, *self._options.overrides]

    def _run(self, *arguments: str, stdout: int | None = PIPE) -> str:
        """Run Python; return its output. Raises TurnError if it fails or no time is left."""
        try:
            done = subprocess.run(
                [sys.executable, *arguments], stdout=stdout, stderr=PIPE, encoding="utf-8", errors="replace",
                timeout=self._seconds_left(), check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise TurnError("not finished: no time left") from None
        if done.returncode:
            raise TurnError(f"exit {done.returncode}: {one_line(done.stderr[-200:])}")
        return done.stdout or ""

    def _seconds_left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TurnError("not run: no time left")
        return left


def measure(options: Namespace) -> str:
    """Run the parts, all or those in --only, and return a last line."""
    config = load("digits", [*_MODEL, f"batch.global={options.batch}", *options.overrides])
    if config.run.device != "cpu" and not machine.has_gpu():
        raise machine.no_gpu_error()
    name = "CPU" if config.run.device == "cpu" else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, {machine.available_cpus()} CPUs, {config.model.arch}")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pipeline-gpu-", ignore_cleanup_errors=True) as scratch:
        suite = Suite(Path(scratch), options)
        for part, seconds in _PARTS.items():
            if not options.only or part in options.only:
                print(f"{part}, about {seconds} s on an H100:", flush=True)
                suite.measure(part)
    failed = f"FAILED: {', '.join(suite.failed)}" if suite.failed else "nothing failed"
    return f"{failed}; {time.monotonic() - start:.0f} s"


if __name__ == "__main__":
    parser = Parser(description=__doc__)
    add_overrides(parser)
    help = f"run only this part (repeat it for more): {', '.join(_PARTS)}"
    parser.add_argument("--only", action="append", choices=list(_PARTS), metavar="PART", help=help)
    parser.add_argument("--images", type=path, metavar="DIR", help="an image folder, preferably of photos")
    help = "images per step (default 256)"
    parser.add_argument("--batch", type=positive_int, default=256, metavar="N", help=help)
    run_script(parser, measure)
