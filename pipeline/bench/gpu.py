"""`pipeline bench gpu`: everything that needs a GPU, on one GPU, part by part.

Each part runs `pipeline` commands in their own processes, so that they free their memory and, if
one fails, the rest still runs. A row is printed as soon as it is known: what was measured is kept
if the time is over. No network, MLflow or photos are needed: without a folder of images, JPEGs are
generated.
"""

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from subprocess import DEVNULL, CompletedProcess

import torch

from pipeline import machine
from pipeline.bench.rounds import TurnError
from pipeline.bench.train import COMPILED, prepare
from pipeline.config.load import load
from pipeline.data.access import check_folder
from pipeline.data.sources import make_synthetic, open_source
from pipeline.errors import TemporaryError
from pipeline.guards.memory import fits, make_try_pass
from pipeline.model.architectures import build
from pipeline.plan import make_plan
from pipeline.world import from_environment

_TIME_LIMIT_S = 420
_STOP_LIMIT_S = 10
_TARGET_TOP1 = 0.97
_MODEL = (
    "model.arch=resnet50", "model.channels_last=true", "augment.size=224", "train.precision=bf16",
    "data.source=synthetic", "data.num_images=4096", "train.epochs=10000",
)  # fmt: skip
_SHORT = "train.max_steps=42"  # three epochs of the digits


class _Suite:
    """Runs `pipeline` commands until the time limit, and prints rows."""

    def __init__(
        self, folder: Path, overrides: list[str], batch: int, suffix: str, photos: Path | None, write: Path | None
    ) -> None:
        """Keep runs in `folder`. suffix: "-compiled", or "" if the plan does not compile."""
        self.folder, self.batch, self.photos, self.write = folder, batch, photos, write
        self.failed: list[str] = []
        """Names of the rows that failed."""
        self._overrides, self._suffix = overrides, suffix
        self._deadline = time.monotonic() + _TIME_LIMIT_S

    def report(self, name: str, measure: Callable[[], str]) -> None:
        """Print a row: what `measure` returns, or why it failed."""
        start = time.monotonic()
        try:
            self._seconds_left()
            text = measure()
        except Exception as error:
            text = f"FAILED: {error if isinstance(error, TurnError) else repr(error)}"
            self.failed.append(name)
        print(f"  {name:<20} {text} [{time.monotonic() - start:.0f} s]", flush=True)

    def compare_loops(self, name: str, loops: list[str], rounds: int, steps: int, *words: str) -> None:
        """Run `bench train`, which prints its rows. loops: "+" means compiled, if the plan is."""
        rows = dict.fromkeys(loop.replace("+", self._suffix) for loop in loops)
        only = [flag for row in rows for flag in ("--only", row)]
        flags = [f"--rounds={rounds}", f"--steps={steps}", *only]

        def measure() -> str:
            self.run("bench", "train", *self.model(*words), *flags, is_shown=True)
            return f"{rounds} rounds"

        self.report(name, measure)

    def model(self, *words: str) -> list[str]:
        """Return the words for the model whose speed and memory are measured."""
        return [*_MODEL, f"batch.global={self.batch}", *self._overrides, *words]

    def digits(self, *words: str) -> list[str]:
        """Return the words for the recipe `digits`."""
        return [f"data.root={self.folder / 'digits'}", *words, *self._overrides]

    def train(self, run: str, words: list[str], setup: str = "") -> CompletedProcess[str]:
        """Train in the folder `run`."""
        return self.run("train", *self._words(run, words), setup=setup)

    def digest(self, run: str, words: list[str]) -> str:
        """Train the digits in the folder `run`; return the digest of the weights."""
        return self.train(run, words).stdout.strip().rpartition("sha256:")[2]

    def interrupt(self, run: str, number: int, words: list[str]) -> tuple[int, float]:
        """Signal a training that has saved; return its exit code and the seconds until its end."""
        before = self._checkpoints(run)
        command = [sys.executable, "-m", "pipeline", "train", *self._words(run, words)]
        with subprocess.Popen(command, stdout=DEVNULL, stderr=DEVNULL) as process:
            try:
                while self._checkpoints(run) <= before:
                    if process.poll() is not None:
                        raise TurnError(f"ended with exit {process.returncode} before it could be stopped")
                    self._seconds_left()
                    time.sleep(0.01)
                start = time.monotonic()
                process.send_signal(number)
                return process.wait(self._seconds_left()), time.monotonic() - start
            except subprocess.TimeoutExpired:
                raise TurnError("did not end") from None
            finally:
                process.kill()

    def _checkpoints(self, run: str) -> set[Path]:
        return set((self.folder / run / "checkpoints").glob("step-*.pt"))

    def _words(self, run: str, words: list[str]) -> list[str]:
        return ["digits", f"run.dir={self.folder / run}", "track.uri=none", "track.report=false", *words]

    def run(self, *arguments: str, is_shown: bool = False, setup: str = "") -> CompletedProcess[str]:
        """Run a command. Raises TurnError if it fails or no time is left.

        is_shown: let it print. setup: Python code that its process runs first.
        """
        start = ["-c", f"{setup}\nfrom pipeline.cli.main import command\ncommand()"] if setup else ["-m", "pipeline"]
        try:
            done = subprocess.run(
                [sys.executable, *start, *arguments],
                capture_output=not is_shown, encoding="utf-8", errors="replace", timeout=self._seconds_left(),
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise TurnError("not finished: no time left") from None
        if done.returncode:
            lines = (done.stderr or "").strip().splitlines()
            raise TurnError(f"exit {done.returncode}: {lines[-1][:150] if lines else 'see above'}")
        return done

    def _seconds_left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TurnError("not run: no time left")
        return left


def _headline(suite: _Suite) -> None:
    suite.compare_loops("headline", ["reference+", "plain+"], 5, 20)


def _scripts(suite: _Suite, precision: str) -> None:
    loops = ["reference", "plain", "reference+", "torchvision+", "timm+", "plain+"]
    suite.compare_loops(precision, loops, 3, 12, f"train.precision={precision}")


def _jpeg(suite: _Suite) -> None:
    photos, count, side = suite.photos or suite.folder / "photos", 2 * suite.batch, 400

    def make_photos() -> str:
        make_synthetic(photos, count, 2, side)
        return f"{count} JPEGs of {side} px generated"

    if not suite.photos:
        suite.report("photos", make_photos)
    suite.compare_loops("jpeg", ["plain+", "loaded+"], 2, 12, "data.source=folder", f"data.root={photos}")


def _checks(suite: _Suite) -> None:
    modes = {mode: suite.digits(_SHORT, f"run.{mode}=true") for mode in ("deterministic", "exact")}
    digests = {}

    def check_machine() -> str:
        suite.run("doctor", "digits", f"run.dir={suite.folder / 'doctor'}", "track.uri=none", *suite.digits())
        return "ok"

    def reach_target() -> str:
        line = suite.train("accuracy", suite.digits()).stdout
        top1 = float(line.rpartition("top1=")[2].split()[0])
        if top1 < _TARGET_TOP1:
            raise TurnError(f"top1={top1:.4f} is below {_TARGET_TOP1}")
        return f"ok: top1={top1:.4f}"

    def repeat(mode: str) -> str:
        digests[mode] = suite.digest(f"{mode}-1", modes[mode])
        return same(mode, suite.digest(f"{mode}-2", modes[mode]))

    def stop() -> str:
        code, seconds = suite.interrupt("stopped", signal.SIGTERM, modes["deterministic"])
        if code != TemporaryError.code or seconds > _STOP_LIMIT_S:
            raise TurnError(f"exit {code} after {seconds:.1f} s")
        return f"ok: exit {code} after {seconds:.1f} s"

    def resume() -> str:
        suite.interrupt("stopped", signal.SIGKILL, modes["deterministic"])
        return same("deterministic", suite.digest("stopped", modes["deterministic"]))

    def same(mode: str, digest: str) -> str:
        if digest != digests.get(mode):
            raise TurnError(f"weights {digest[:8]} differ from {digests.get(mode, 'none')[:8]}")
        return f"ok: identical weights {digest[:8]}"

    suite.report("doctor", check_machine)
    suite.report("digits", reach_target)
    suite.report("deterministic twice", lambda: repeat("deterministic"))
    suite.report("exact twice", lambda: repeat("exact"))
    suite.report("SIGTERM", stop)
    suite.report("SIGTERM and SIGKILL", resume)


def _memory(suite: _Suite) -> None:
    largest = 0

    def measure_pass() -> str:
        nonlocal largest
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # frees the memory at its end
            largest = pool.submit(_largest_pass, suite.model(), max(1, suite.batch // 4)).result()
        return f"{largest} images"

    def cut_passes() -> str:
        if not largest:
            raise TurnError("needs the largest pass")
        if largest < suite.batch:
            return "not needed: the batch does not fit whole"
        share = 0.7 * suite.batch / largest  # of the memory, so that 0.7 of the batch fits
        limit = f"torch.cuda.is_available() and torch.cuda.set_per_process_memory_fraction({share:.3f})"
        words = suite.model("train.compile=off", "train.max_steps=2")
        log = suite.train("cut", words, setup=f"import torch\n{limit}").stderr
        lines = [line for line in log.splitlines() if "make the same batch" in line]
        if torch.cuda.is_available() and not lines:
            raise TurnError("the pass was not cut")
        return lines[0] if lines else "not cut: a CPU has no limit"

    suite.report("largest pass", measure_pass)
    suite.report("batch cut to fit", cut_passes)
    suite.report("profile", partial(_profile, suite))


def _profile(suite: _Suite) -> str:
    """Profile 20 steps of a training; return the size and the place of the profile."""
    suite.train("profile", suite.model("profile.steps=21-40", "train.max_steps=40"))  # the first ones choose kernels
    file = suite.folder / "profile/report/profile-steps-21-40.json.gz"
    if suite.write:
        suite.write.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, suite.write)
    place = str(suite.write / file.name) if suite.write else "not kept: --write FOLDER keeps it"
    return f"20 steps, {file.stat().st_size / 2**20:.1f} MiB; {place}"


def _largest_pass(words: list[str], unit: int) -> int:
    """Return the images of the largest training pass that fits, in multiples of `unit`."""
    config = load("digits", words)
    plan, group, _ = prepare(config, deterministic=False)
    try_pass = make_try_pass(build(config.model, plan.num_classes).to(group.device), config, plan, group.device)
    units = range(1, plan.train_images // unit + 1)
    return unit * bisect_left(units, True, key=lambda count: not fits(try_pass, count * unit))


PARTS: dict[str, tuple[Callable[[_Suite], None], int]] = {
    "headline": (_headline, 70),
    "bf16": (partial(_scripts, precision="bf16"), 50),
    "fp16": (partial(_scripts, precision="fp16"), 75),
    "jpeg": (_jpeg, 55),
    "checks": (_checks, 90),
    "memory": (_memory, 60),
}
"""The parts in their order, and the seconds that each is estimated to take on one H100."""


def bench_gpu(only: list[str] | None, images: Path | None, overrides: list[str], batch: int, write: Path | None) -> str:
    """Run the parts, all or those in `only`, and return a last line.

    Raises RequestError if there is no GPU, `images` is no folder, or /dev/shm is too small.
    """
    if images is not None:
        check_folder(images, f"--images {images}", "name an image folder, preferably of photos")
    config = load("digits", [*_MODEL, f"batch.global={batch}", *overrides])
    if config.run.device != "cpu" and not machine.has_gpu():
        raise machine.no_gpu_error()
    world = from_environment()
    plan = make_plan(config, world, open_source(config).size)
    rows = plan.rows()
    name = "CPU" if config.run.device == "cpu" else torch.cuda.get_device_name()
    model = f"{config.model.arch}, {plan.image_size} px, batch {batch}"
    print(f"{name}, torch {torch.__version__}, {world.cpus} CPUs; {model}")
    print(f"  workers: {rows['workers']}\n  compiled: {rows['compiled']}", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pipeline-gpu-", ignore_cleanup_errors=True) as scratch:
        suite = _Suite(Path(scratch), overrides, batch, COMPILED if plan.compiles else "", images, write)
        for part, (measure, seconds) in PARTS.items():
            if not only or part in only:
                print(f"{part}, about {seconds} s on an H100:", flush=True)
                measure(suite)
    failed = f"FAILED: {', '.join(suite.failed)}" if suite.failed else "nothing failed"
    return f"{failed}; {time.monotonic() - start:.0f} s"
