"""Measure and check everything that needs a GPU, on one GPU, part by part.

  python benchmarks/gpu.py --images data/imagenette/train --write rows.txt
  python benchmarks/gpu.py --limit 300 --only checks --only anatomy

A part starts only if the seconds that an H100 needs for it are left of --limit. If one fails, the
rest still runs. Rows are printed as soon as they are known. It needs no MLflow and no network.

  anatomy     the machine, and one update: hidden waits, kernels, the host's time; see anatomy.py
  headline    our loop and the minimal loop in bf16, eager and compiled
  checks      SIGKILL, SIGTERM, same bits after them and in a repetition, accuracy, NaN, doctor
  jpeg, pack  our loop with the data loader, from the images of --images, and from a pack of them
  cifar       cifar10-fast from the folder --cifar, as it is, and compiled without determinism
  graphs      a small model, compiled, without and with a CUDA graph; the digits with one
  bf16, fp16  as headline, with the loops of torchvision and timm
"""

import signal
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from data import link_images
from rounds import TurnError, row, run_script

from pipeline import machine
from pipeline.cli.arguments import Parser, add_overrides, path, positive_int
from pipeline.config.load import load
from pipeline.errors import NotFiniteError, TemporaryError, one_line

_MODEL = (
    "model.arch=resnet50", "model.channels_last=true", "augment.size=224", "train.precision=bf16",
    "data.source=synthetic", "data.num_images=4096", "train.epochs=10000",
)  # fmt: skip
_SMALL = ("model.arch=resnet18_cifar", "augment.size=32", "batch.global=128")
_COMPILED = ("run.deterministic=false", "train.compile=on", "evaluate.every=4 epochs")
_PIPELINE, _UNTRACKED = ("-P", "-m", "pipeline"), ("track.uri=none", "track.report=false")
_PARTS = {  # seconds on one H100; those of checks, jpeg, pack, graphs and fp16 are estimates
    "anatomy": 150, "headline": 90, "checks": 145, "jpeg": 65, "pack": 65, "cifar": 75,
    "graphs": 125, "bf16": 60, "fp16": 75,
}  # fmt: skip
_NEEDS_GPU = ("graphs", "fp16")
_NEEDS_FOLDER = {"jpeg": "images", "pack": "images", "cifar": "cifar"}


class Suite:
    """Runs commands until the time limit, and prints rows."""

    def __init__(self, folder: Path, options: Namespace) -> None:
        self._folder, self._options = folder, options
        self._model = [*_MODEL, f"batch.global={options.batch}", *options.overrides]
        self._is_on_cpu = load("digits", self._model).run.device == "cpu"
        if not self._is_on_cpu and not machine.has_gpu():
            raise machine.no_gpu_error()
        self._end = time.monotonic() + options.limit
        self._weights: dict[str, str] = {}  # mode -> digest of the weights of its first run
        self._log: list[str] = []  # of the last command
        self.failed: list[str] = []  # rows, and parts without time

    def measure(self, part: str) -> None:
        """Run a part, if it can run here and its time is left, and print its rows."""
        seconds, left, folder = _PARTS[part], self._end - time.monotonic(), _NEEDS_FOLDER.get(part)
        self._print(f"{part}, about {seconds} s on an H100:")
        if folder and not getattr(self._options, folder):
            self._print(f"  not run: give --{folder} DIR")
        elif part in _NEEDS_GPU and self._is_on_cpu:
            self._print("  not run: needs a GPU")
        elif left < seconds:
            self._print(f"  {part:<20} FAILED: not run, {left:.0f} s are left")
        else:
            self._measure(part)

    def _measure(self, part: str) -> None:
        images, pack = self._folder / "images", self._folder / "pack"
        if part in ("jpeg", "pack") and not images.exists():
            link_images(self._options.images, images, at_least=8 * self._options.batch)
        match part:
            case "anatomy":
                self._row(part, self._show, "anatomy", *self._model)
            case "headline":
                self._loops(part, "plain", 5, 20)
            case "bf16" | "fp16":
                self._loops(part, "torchvision timm plain", 3, 12, f"train.precision={part}")
            case "jpeg":
                words = ("--compiled", "data.source=folder", f"data.root={images}")
                self._loops(part, "plain loaded", 2, 12, *words)
            case "pack":
                self._row("pipeline data pack", self._run, *_PIPELINE, "data", "pack", str(images), str(pack))
                words = ("--compiled", "data.source=pack", f"data.root={pack}")
                self._loops(part, "loaded", 2, 12, *words)
            case "graphs":
                for mode in ("on", "reduce-overhead"):
                    self._loops(mode, "plain", 3, 60, *_SMALL, f"train.compile={mode}")
                self._row("recorded", self._reach_target, "recorded", "train.compile=reduce-overhead")
            case "checks":
                self._row("SIGKILL", self._stop, signal.SIGKILL)
                self._row("SIGTERM", self._stop, signal.SIGTERM)  # of the run that resumes after SIGKILL
                self._row("resumed", self._compare_weights, "deterministic", "stopped")
                for mode in ("deterministic", "exact"):
                    for run in (mode, f"{mode}-again"):
                        self._row(run, self._compare_weights, mode, run)
                self._row("digits", self._reach_target, "accuracy")
                self._row("nan", self._diverge)
                self._row("doctor", lambda: self._run(*self._digits("doctor", command="doctor")) and "ok")
            case "cifar":
                self._row("as it is", self._train_cifar, "as-it-is")
                self._row("compiled", self._train_cifar, "compiled", *_COMPILED)

    def _print(self, text: str) -> None:
        """Print a line, and add it to the file of --write."""
        print(text, flush=True)
        if self._options.write:
            with self._options.write.open("a", encoding="utf-8") as file:
                print(text, file=file)
        if " FAILED: " in text:
            self.failed.append(text[:22].strip())

    def _row(self, name: str, measure: Callable[..., str], *arguments: object) -> None:
        self._print(row(name, measure, *arguments))

    def _show(self, script: str, *arguments: str) -> str:
        """Run a script of this folder, and print its rows when they come."""
        command = [sys.executable, str(Path(__file__).with_name(f"{script}.py")), *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as process:
            assert process.stdout
            limit = threading.Timer(max(1, self._seconds_left()), process.kill)  # a GPU is paid by time
            limit.start()
            for line in process.stdout:
                self._print(line.rstrip())
            limit.cancel()
        if process.returncode:
            raise TurnError(f"exit {process.returncode}")
        return "done"

    def _loops(self, name: str, loops: str, rounds: int, steps: int, *words: str) -> None:
        if self._options.quick:
            rounds, steps = 1, 2
        rows = [f"--only={loop}" for loop in loops.split()]
        size = (f"--rounds={rounds}", f"--steps={steps}")
        compiled = [] if self._is_on_cpu else ["train.compile=on"]
        self._row(name, self._show, "loop", *rows, *size, *compiled, *self._model, *words)

    def _reach_target(self, run: str, *words: str) -> str:
        """Train the digits to the end, and profile five steps."""
        line = self._run(*self._digits(run), "profile.steps=20-24", *words)
        top1 = float(line.rpartition("top1=")[2].split()[0])
        if top1 < 0.97:
            raise TurnError(f"top1={top1:.4f} is below 0.97")
        profiles = [file.name for file in self._folder.glob(f"{run}/report/profile-*")]
        return f"ok: top1={top1:.4f}, {profiles}"

    def _compare_weights(self, mode: str, run: str) -> str:
        """Train, or resume, a short run; fail if another one of its mode had other weights."""
        weights = self._run(*self._digits(run, mode)).rpartition("sha256:")[2][:8]
        if weights != self._weights.setdefault(mode, weights):
            raise TurnError(f"weights {weights} differ from {self._weights[mode]}")
        return f"ok: weights {weights}"

    def _stop(self, number: int) -> str:
        """Start or resume a short run, and signal it when it has saved."""
        command = [sys.executable, *self._digits("stopped", "deterministic")]
        folder = self._folder / "stopped/checkpoints"
        before = set(folder.glob("step-*.pt"))
        quiet = subprocess.DEVNULL
        with subprocess.Popen(command, stdout=quiet, stderr=quiet) as process:
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

    def _diverge(self) -> str:
        words = ("optimizer.lr=1e6", "train.precision=bf16", "model.channels_last=true")
        self._run(*self._digits("nan"), *words, code=NotFiniteError.code)
        return f"ok: {self._log[-1]}"

    def _train_cifar(self, run: str, *words: str) -> str:
        command = [*_PIPELINE, "train", "cifar10-fast", f"data.root={self._options.cifar}", *_UNTRACKED]
        command += [f"run.dir={self._folder / run}", *words, *self._options.overrides]
        result = self._run(*command).partition(" weights")[0]
        return f"{result}; {' '.join(line for line in self._log if ' since the start' in line)}"

    def _digits(self, run: str, mode: str = "", command: str = "train") -> list[str]:
        """Return the command that trains the digits: to the end, or in a mode for three epochs."""
        words = [*_PIPELINE, command, "digits", f"run.dir={self._folder / run}", *_UNTRACKED]
        short = ["train.max_steps=42", "checkpoint.every=4 steps", f"run.{mode}=true"] if mode else []
        return [*words, f"data.root={self._folder / 'digits'}", *short, *self._options.overrides]

    def _run(self, *arguments: str, code: int = 0) -> str:
        """Run Python; keep its log, and return its output.

        Raises TurnError if it exits with another code, or if the time ends before it.
        """
        command = [sys.executable, *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, encoding="utf-8", errors="replace", check=False,
                timeout=self._seconds_left(),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise TurnError("no time left") from None
        self._log = done.stderr.splitlines()
        if done.returncode != code:
            raise TurnError(f"exit {done.returncode}: {one_line('; '.join(self._log)[-500:], 500)}")
        return done.stdout.strip()

    def _seconds_left(self) -> float:
        left: float = self._end - time.monotonic()
        if left <= 0:
            raise TurnError("not run: no time left")
        return left


def measure(options: Namespace) -> str:
    """Run the parts, all or those in --only, and return a last line."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that commands end with this process
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pipeline-gpu-", ignore_cleanup_errors=True) as scratch:
        suite = Suite(Path(scratch), options)
        for part in options.only or _PARTS:
            suite.measure(part)
    failed = f"FAILED: {', '.join(suite.failed)}" if suite.failed else "nothing failed"
    return f"{failed}; {time.monotonic() - start:.0f} s"


if __name__ == "__main__":
    parser = Parser(description=__doc__)
    add_overrides(parser)
    add = parser.add_argument
    help = f"run this part only (repeat it for more; their order counts): {', '.join(_PARTS)}"
    add("--only", action="append", choices=list(_PARTS), metavar="PART", help=help)
    add("--limit", type=positive_int, default=1200, metavar="S", help="seconds for all (default 1200)")
    add("--write", type=path, metavar="FILE", help="also add the rows to this file")
    add("--images", type=path, metavar="DIR", help="an image folder, preferably of photos")
    add("--cifar", type=path, metavar="DIR", help="CIFAR-10 as an image folder")
    add("--batch", type=positive_int, default=256, metavar="N", help="images per step (default 256)")
    add("--quick", action="store_true", help="compare two steps in one round, to try the script itself")
    run_script(parser, measure)
