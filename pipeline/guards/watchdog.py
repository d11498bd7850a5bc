"""The watchdog ends a hang: a process without progress writes its threads' stacks and exits.

Promise: no process waits forever, for a peer, a device, a disk or a loader worker. Why it holds: a
thread of its own counts the seconds since the last progress; `os._exit` waits for nothing, and the
disk that the stacks are written to cannot delay it. It counts seconds itself instead of reading a
clock, so that a machine that slept, or a job that was paused as a whole, does not look like a hang.

A process that is asked to stop does so after its step. If it makes no progress, it cannot: a GPU
may wait in an NCCL kernel for a peer that has died. It then leaves after `STOP_S`, before the
launcher kills it (torchrun's shutdown timeout is 30 s by default). Slow steps are not cut short: it
waits at least twice the longest time between two of the last steps. Nor are compilations and saves.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import RunError, TemporaryError
from pipeline.group import Group
from pipeline.guards.signals import StopRequest

_WRITING_S = 5
COMPILATION_S = 1800
"""Additional seconds without progress while a model is compiled."""
_FADING = 0.95  # a stall of 100 s counts as 10 s after 45 reports
STOP_S = 20
"""Seconds without progress after which a process that was asked to stop leaves."""


class Watchdog:
    def __init__(
        self, timeout_s: float, stacks: Path, rank: int, stop: StopRequest,
        check_ours: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Watch this process.

        stacks: the file to which the stacks of its threads are written. check_ours: called before
        that; ends the process if the run was taken over.
        """
        self._timeout_s, self._stacks, self._rank = timeout_s, stacks, rank
        self._stop, self._check_ours = stop, check_ours
        self._idle_s = 0
        self._stopping_s = 0
        """The part of `_idle_s` since the process was asked to stop."""
        self._longest_s = 0.0
        """The longest time between two reports of progress. One stall fades."""
        self._is_pause_allowed = False
        self._extra_s = 0
        self._stopped = threading.Event()
        self._record_exit: Callable[[RunError], None] = lambda error: None
        self._same_command = "the same command"

    def start(self) -> None:
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def begin_training(self, record_exit: Callable[[RunError], None], same_command: str) -> None:
        """Report progress, and forget how long the start took.

        record_exit: records why the process exits. It has a few seconds, in a thread of its own.
        """
        self.beat()
        self._longest_s, self._record_exit, self._same_command = 0.0, record_exit, same_command

    def beat(self) -> None:
        """Report progress."""
        if not self._is_pause_allowed:
            self._longest_s = max(_FADING * self._longest_s, self._idle_s)
        self._idle_s = self._stopping_s = 0

    @contextmanager
    def allow_pause(self, extra_s: int = 0) -> Iterator[None]:
        """Wait `extra_s` longer in this context, and as long if the process is asked to stop."""
        self.beat()
        self._extra_s, self._is_pause_allowed = extra_s, True
        try:
            yield
        finally:
            self.beat()
            self._extra_s, self._is_pause_allowed = 0, False

    @contextmanager
    def allow_compilation(self, group: Group) -> Iterator[None]:
        """Wait COMPILATION_S longer in this context, for this process and for its peers.

        The context ends once all processes have reached its end.
        """
        with self.allow_pause(COMPILATION_S), group.extended_timeout(COMPILATION_S):
            yield
            group.any_rank(False)

    def stop(self) -> None:
        """Stop to watch."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(1):
            self._idle_s += 1
            self._stopping_s += int(self._stop.is_set())
            problem = f"made no progress for {self._idle_s} s"
            stacks = f"the stacks of its threads are in {self._stacks}"
            if self._idle_s > self._timeout_s + self._extra_s:
                self._end_process(RunError(f"rank {self._rank} {problem} (run.timeout) and exits; {stacks}"))
            if self._stopping_s > max(STOP_S, 2 * self._longest_s) and not self._is_pause_allowed:
                self._end_process(
                    TemporaryError(
                        f"rank {self._rank} was asked to stop, {problem} and exits without a save",
                        f"{self._same_command} resumes from the newest checkpoint; {stacks}",
                    )
                )

    def _end_process(self, error: RunError) -> None:
        writer = threading.Thread(target=self._write_stacks, args=(error,), daemon=True)
        writer.start()
        writer.join(_WRITING_S)
        print(f"pipeline: {error}", file=sys.stderr, flush=True)
        os._exit(error.code)

    def _write_stacks(self, error: RunError) -> None:
        self._check_ours()
        try:
            with open(self._stacks, "w", encoding="utf-8") as file:
                print(f"rank {self._rank}, {time.strftime('%F %T')}: {error}", file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError:
            faulthandler.dump_traceback(all_threads=True)
        self._record_exit(error)
