"""The job: its request, data and folder, and the process that works on it."""

from dataclasses import dataclass

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
