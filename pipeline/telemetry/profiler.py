"""A few steps under torch's profiler, for those who look at a trace (Perfetto, chrome://tracing).

What torch.profiler records of rank 0 between two steps is written to the run's `report/`, compressed; other processes run
as ever. A step costs more while it is recorded, so its report is marked by nothing but its place: choose a window between
two reports, and behind the first steps, in which kernels are chosen and compiled.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from pipeline.config.schema import Config
from pipeline.group import Group


class NullProfiler:
    """Of other processes than the first, or with profile.steps=none."""

    def updated(self, step: int) -> None:
        """At the start and after each update: begin or end when it is due."""


class Profiler(NullProfiler):
    def __init__(self, first: int, last: int, folder: Path, device: torch.device, log: Callable[[str], None]) -> None:
        self._first, self._last, self._log = first, last, log
        self._file = folder / f"profile-steps-{first}-{last}.json.gz"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile = profile(activities=activities)
        self._is_on = False

    def updated(self, step: int) -> None:
        if step == self._first - 1:
            self._profile.start()
            self._is_on = True
        elif step == self._last and self._is_on:  # a resumption may begin within the window: then there is no trace
            self._profile.stop()
            self._is_on = False
            self._write()

    def _write(self) -> None:
        try:
            self._file.parent.mkdir(exist_ok=True)
            self._profile.export_chrome_trace(str(self._file))
        except (OSError, RuntimeError) as error:
            self._log(f"the profile could not be written: {error}")
        else:
            self._log(f"profile of steps {self._first} to {self._last}: {self._file}")


def start_profile(config: Config, report: Path, group: Group, log: Callable[[str], None]) -> NullProfiler:
    """report: the run's folder of that name."""
    if config.profile.steps is None or not group.is_main:
        return NullProfiler()
    return Profiler(*config.profile.steps, report, group.device, log)
