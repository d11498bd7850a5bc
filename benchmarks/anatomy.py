"""Show what one update of our loop does, beside that of a minimal loop. Most rows need a GPU.

  python benchmarks/anatomy.py model.arch=resnet50 augment.size=224 batch.global=256

Each row is printed as soon as it is known, and if one fails, the rest still runs:

  machine           its hardware and software
  speed             milliseconds of an update
  hidden waits      operations for which the host waits for the device: there must be none
  kernels           kernels of an update, and their milliseconds
  host              the host's milliseconds for 2 images: no model can be faster
  calls             calls of Python functions in an update
  passes            how a batch is divided that does not fit into the memory
"""

import cProfile
import pstats
import shutil
import time
from argparse import Namespace
from collections.abc import Callable
from functools import cached_property, partial
from itertools import repeat
from statistics import median

import torch
from loop import DEFAULTS, Setup, make_update, plain_step, prepare, synchronize, timed
from rounds import row, run_script

from pipeline.addons.models.compilation import missing_to_compile
from pipeline.addons.models.memory import fit_passes, try_pass
from pipeline.addons.run.provenance import provenance
from pipeline.cli.arguments import Parser, add_overrides
from pipeline.config.load import load
from pipeline.machine import available_cpus, available_memory
from pipeline.model.architectures import build

Steps = dict[str, Callable[[], object]]


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
        facts = provenance(self.setup.config, self.device)
        known = ", ".join(f"{name} {value}" for name, value in facts.items() if "mlflow" not in name)
        gib, shared_gib = available_memory() / 2**30, shutil.disk_usage("/dev/shm").free / 2**30
        memory = f"{available_cpus()} CPUs, {gib:.0f} GiB, /dev/shm {shared_gib:.0f} GiB"
        return f"{known}, {memory}, to compile it lacks {missing_to_compile() or 'nothing'}"

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

    def calls(self) -> str:
        ours, bare = (_count_calls(self._small[loop]) for loop in ("ours", "bare"))
        return f"ours {ours:,.0f}, bare {bare:,.0f}, {ours - bare:,.0f} more"

    def passes(self) -> str:
        config, plan, group = self.setup.config, self.setup.plan, self.setup.group
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try_pass(config, plan, self._model(), plan.micro_batch)
        share = 0.7 * torch.cuda.max_memory_allocated() / torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(share)
        log: list[str] = []
        fit_passes(config, plan, group, self._model(), log.append)
        torch.cuda.set_per_process_memory_fraction(1.0)
        return f"with 70 % of the memory that a pass needs: {log}"

    def _model(self) -> torch.nn.Module:
        return build(self.setup.config.model, self.setup.plan.num_classes).to(self.device)


def _count_calls(step: Callable[[], object]) -> float:
    """Return how many Python functions an update calls, without built-in ones."""
    count = 10
    with cProfile.Profile() as profile:
        for _ in range(count):
            step()
    found = pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
    return float(sum(calls for (file, _, _), (_, calls, *_) in found if file != "~")) / count


ON_CPU = ("machine", "speed", "host", "calls")
ROWS = ("machine", "speed", "hidden waits", "kernels", "host", "calls", "passes")


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
