"""The job: its request, data and folder, and the process that works on it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.config.schema import Config
from pipeline.data.interface import Source
from pipeline.group import Group
from pipeline.guards.signals import StopRequest
from pipeline.guards.watchdog import Watchdog
from pipeline.plan import Plan
from pipeline.record.folder import RunFolder
from pipeline.record.terminal import Terminal
from pipeline.timing import StepTimer


@dataclass(frozen=True)
class Job:
    """The request, the data and the folder of a run: the same in all processes."""

    config: Config
    plan: Plan
    source: Source
    folder: RunFolder
    request: str = ""
    """Identifies the request, so that its next start finds a permanent failure."""


@dataclass(frozen=True)
class Process:
    """One process of a job: its group, output, clocks and signals."""

    group: Group
    terminal: Terminal
    """Shows nothing on ranks other than 0."""
    timer: StepTimer
    watchdog: Watchdog
    stop: StopRequest

    def asked_to_stop(self) -> bool:
        """Report progress to the watchdog. Return True if a signal asked to stop."""
        self.watchdog.beat()
        return self.stop.is_set()


@dataclass(frozen=True)
class Settled:
    """All that is decided before the training, as `operate.start` hands it to `train.session`."""

    job: Job
    process: Process
    contents: dict[str, Any] | None
    """The checkpoint to resume from, the same in all processes; None: from step 0."""
    checkpoint: Path | None = None
    """Its file, on rank 0, as are the next two."""
    weights: dict[str, Tensor] | None = None
    """The first ones, if model.init names some and the training starts at step 0."""
    mirror: Any = None
    """Holds the lease of `checkpoint.mirror`."""
