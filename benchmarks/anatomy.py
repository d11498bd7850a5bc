"""Show what one update of our loop does, beside that of a minimal loop. Most rows need a GPU.

  python benchmarks/anatomy.py model.arch=resnet50 augment.size=224 batch.global=256

Each row is printed as soon as it is known, and if one fails, the rest still runs:

  machine           its hardware and software
  ceilings          the device's fastest copy and matrix product
  speed             milliseconds of an update
  hidden waits      operations for which the host waits for the device: there must be none
  kernels           kernels of an update, and their milliseconds
  host              the host's milliseconds for 2 images: no model can be faster
  host profile      the functions in which the host spends them
  calls             calls of Python functions in an update
  skipped update    fused optimizers leave out an update whose loss is not finite
  waiting for data  what a run reports if the loader is 10 % too slow
  out of memory     the errors of passes that do not fit
  largest pass      images of the largest pass, and the passes of a batch that does not fit
"""

import cProfile
import pstats
import shutil
import time
from argparse import Namespace
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from itertools import repeat
from pathlib import Path
from statistics import median

import torch
from loop import DEFAULTS, Setup, make_update, plain_step, prepare, synchronize, timed
from rounds import TurnError, row, run_script

from pipeline.addons.models.compilation import missing_to_compile
from pipeline.addons.models.memory import fit_passes, is_out_of_memory, try_pass
from pipeline.addons.ops.provenance import provenance
from pipeline.cli.arguments import Parser, add_overrides
from pipeline.config.load import load
from pipeline.data.batch import Batch
from pipeline.data.transfer import to_device
from pipeline.errors import one_line
from pipeline.machine import available_cpus, available_memory
from pipeline.model.architectures import build
from pipeline.train.listener import Listener, Update

Steps = dict[str, Callable[[], object]]


class LastReport(Listener):
    """Keeps the metrics that the loop last reported."""

    def stepped(self, update: Update) -> None:
        if update.metrics:
            self.metrics = update.metrics


class Anatomy:
    """A method for each row, which returns its text."""

    def __init__(self, overrides: list[str]) -> None:
        self._words = [*DEFAULTS, "train.compile=off", "track.every=1000000 steps", *overrides]
        self.setup = self._prepare()
        self.device = self.setup.group.device

    def _prepare(self, *more: str) -> Setup:
        return prepare(load("digits", [*self._words, *more]))

    def _steps(self, setup: Setup) -> Steps:
        """Return our update and the minimal loop's, warmed up, on one batch in memory."""
        batch = setup.first_batch()
        steps: Steps = {"ours": partial(make_update(setup), repeat(batch)), "bare": plain_step(setup, batch)}
        for step in steps.values():
            timed(setup, 4, step)()
        return steps

    @cached_property
    def _full(self) -> Steps:
        return self._steps(self.setup)

    @cached_property
    def _small(self) -> Steps:
        return self._steps(self._prepare("batch.global=2"))

    @cached_property
    def _seconds(self) -> dict[str, float]:
        """Seconds of an update of each loop."""
        return {name: median(self._time(step) for _ in range(3)) for name, step in self._full.items()}

    def _time(self, step: Callable[[], object], count: int = 6) -> float:
        return self.setup.plan.global_batch / timed(self.setup, count, step)()

    def machine(self) -> str:
        facts = provenance("", self.setup.config.model.arch, self.device)
        known = ", ".join(f"{name} {value}" for name, value in facts.items() if "mlflow" not in name)
        gib, shared_gib = available_memory() / 2**30, shutil.disk_usage("/dev/shm").free / 2**30
        memory = f"{available_cpus()} CPUs, {gib:.0f} GiB, /dev/shm {shared_gib:.0f} GiB"
        return f"{known}, {memory}, to compile it lacks {missing_to_compile() or 'nothing'}"

    def ceilings(self) -> str:
        numbers, target = torch.randn(2**29, device="cuda"), torch.empty(2**29, device="cuda")
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        copied = 2 * numbers.nbytes / self._time(lambda: target.copy_(numbers), 20)
        product = 2 * 8192**3 / self._time(lambda: a @ b, 20)
        return f"copy {copied / 1e12:.2f} TB/s, bf16 product {product / 1e12:.0f} TFLOP/s"

    def speed(self) -> str:
        parts = [f"{name} {1000 * seconds:.2f} ms" for name, seconds in self._seconds.items()]
        return f"{', '.join(parts)}, ratio {self._seconds['bare'] / self._seconds['ours']:.4f}"

    def hidden_waits(self) -> str:
        step = self._full["ours"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return "none in three updates"

    def kernels(self) -> str:
        parts = []
        for name, step in self._full.items():
            torch.cuda.synchronize()  # work of the row before
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
                step()
                torch.cuda.synchronize()
            events = [event for event in recorded.events() or () if event.device_type.name == "CUDA"]
            ms = sum(event.device_time_total for event in events) / 1000
            parts.append(f"{name} {len(events)} in {ms:.2f} ms")
        return ", ".join(parts)

    def host(self) -> str:
        parts = []
        for name, step in self._small.items():
            times = []
            for _ in range(20):
                synchronize(self.device)  # an idle device: the host never waits for it
                start = time.perf_counter()
                step()
                times.append(time.perf_counter() - start)
            parts.append(f"{name} {1000 * median(times):.2f} ms")
        return ", ".join(parts)

    def host_profile(self) -> str:
        profile = sorted(_profile(self._small["ours"]), key=lambda item: -item[2])
        return "".join(f"\n    {ms:.2f} ms, {calls:.0f} times: {name}" for name, calls, ms in profile[:12])

    def calls(self) -> str:
        ours, bare = (
            sum(calls for name, calls, _ in _profile(self._small[loop]) if not name.startswith("~"))
            for loop in ("ours", "bare")
        )
        return f"ours {ours:,.0f}, bare {bare:,.0f}, {ours - bare:,.0f} more"

    def skipped_update(self) -> str:
        for kind in (torch.optim.SGD, torch.optim.AdamW):
            weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
            optimizer = kind([weight], lr=0.1, fused=True)
            for is_bad in (False, True, False):
                before = weight.detach().clone()
                weight.grad = torch.full_like(weight, float("nan") if is_bad else 1.0)
                optimizer.found_inf = torch.full((), float(is_bad), device="cuda")  # type: ignore[union-attr]
                optimizer.step()
                if torch.equal(before, weight) != is_bad:
                    raise TurnError(f"{kind.__name__}: wrong with found_inf={is_bad}")
        return "left out by fused SGD and AdamW, and the next one made"

    def waiting_for_data(self) -> str:
        report, count, period = LastReport(), 20, 1.1 * self._seconds["ours"]
        setup = replace(self.setup, plan=replace(self.setup.plan, log_every=count))
        batch = setup.data()[0]
        if self.device.type == "cuda":
            batch = batch._replace(images=batch.images.pin_memory(), labels=batch.labels.pin_memory())

        def slow() -> Iterator[Batch]:
            ready = time.perf_counter()
            while True:  # at most two batches are ready
                ready = max(ready, time.perf_counter() - 2 * period) + period
                time.sleep(max(0.0, ready - time.perf_counter()))
                yield batch

        update = partial(make_update(setup, report), to_device(slow(), self.device))
        self._time(update, count)  # its report is not read
        idle = 1 - self._seconds["ours"] / self._time(update, count)
        reported = report.metrics["time/waiting_for_data"]
        return f"time/waiting_for_data reports {reported:.0%}, the device was idle {idle:.0%}"

    def out_of_memory(self) -> str:
        error_of = self._make_trial()
        torch.cuda.set_per_process_memory_fraction(0.06)
        found = ", ".join(f"{size}: {error_of(size) or 'fits'}" for size in range(16, 176, 16))
        torch.cuda.set_per_process_memory_fraction(1.0)
        return found

    def largest_pass(self) -> str:
        error_of, sizes, images = self._make_trial(), range(64, 4096, 64), self.setup.plan.micro_batch
        fitting = bisect(sizes, False, key=lambda size: bool(error_of(size)))
        most = sizes[fitting - 1] if fitting else 1
        torch.cuda.set_per_process_memory_fraction(min(1.0, 0.7 * images / most))
        log: list[str] = []
        fit_passes(self.setup.config, self.setup.plan, self.setup.group, self._model(), log.append)
        return f"{most} images; with memory for {0.7 * images:.0f}: {log}"

    def _model(self) -> torch.nn.Module:
        return build(self.setup.config.model, self.setup.plan.num_classes).to(self.device)

    def _make_trial(self) -> Callable[[int], str]:
        """Return a function that tries a pass of so many images; it returns the error or ""."""
        model = self._model()

        def error_of(images: int) -> str:
            try:
                try_pass(self.setup.config, self.setup.plan, model, images)
            except Exception as error:
                known = "" if is_out_of_memory(error) else "not recognised: "
                return f"{known}{type(error).__name__} ({one_line(error, 60)})"
            return ""

        return error_of


def _profile(step: Callable[[], object]) -> list[tuple[str, float, float]]:
    """Return each function that an update calls, how often, and its own milliseconds.

    The name of a built-in function begins with `~`.
    """
    count = 10
    with cProfile.Profile() as profile:
        for _ in range(count):
            step()
    found = pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
    return [
        (f"{Path(file).name}:{line} {name}", calls / count, 1000 * seconds / count)
        for (file, line, name), (_, calls, seconds, *_) in found
    ]


ON_CPU = ("machine", "speed", "host", "host profile", "calls", "waiting for data")
ROWS = ("machine", "ceilings", "speed", "hidden waits", "kernels", "host", "host profile", "calls",
        "skipped update", "waiting for data", "out of memory", "largest pass")  # fmt: skip


def show(options: Namespace) -> str:
    anatomy = Anatomy(options.overrides)
    for name in options.only or ROWS:
        measure = getattr(anatomy, name.replace(" ", "_"))
        if anatomy.device.type == "cpu" and name not in ON_CPU:
            print(f"  {name:<20} not run: needs a GPU")
        else:
            print(row(name, measure), flush=True)
    return anatomy.setup.title()


if __name__ == "__main__":
    parser = Parser(description=__doc__)
    add_overrides(parser)
    help = f"show only this row (repeat it for more): {', '.join(ROWS)}"
    parser.add_argument("--only", action="append", choices=ROWS, metavar="ROW", help=help)
    run_script(parser, show)
