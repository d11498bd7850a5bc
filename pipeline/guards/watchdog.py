"""The watchdog ends a hang: a process without progress writes its threads' stacks and exits.

Promise: no process waits forever, for a peer, a device, a disk or a loader worker. Why it holds: a
thread of its own counts the seconds since the last progress; `os._exit` waits for nothing, and the
disk that the stacks are written to cannot delay it. It counts seconds itself instead of reading a
clock, so that a machine that slept, or a job that was paused as a whole, does not look like a hang.
A compilation takes minutes without progress: the loop announces it, and the watchdog waits
`COMPILATION_S` longer.
"""

import faulthandler
import os
import sys
import threading
import time
from pathlib import Path

from pipeline.errors import CRASH

_WRITING_S = 5
COMPILATION_S = 1800
"""Additional seconds without progress while a model is compiled."""


class Watchdog:
    def __init__(self, timeout_s: float, stacks: Path, rank: int) -> None:
        """Watch this process. stacks: the file to which the stacks of its threads are written."""
        self._timeout_s, self._stacks, self._rank = timeout_s, stacks, rank
        self._idle_s = 0
        self._extra_s = 0
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start to watch."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self) -> None:
        """Report progress."""
        self._idle_s = self._extra_s = 0

    def expect_compilation(self) -> None:
        """Report progress, and wait longer for the next: a model is compiled until then."""
        self._idle_s, self._extra_s = 0, COMPILATION_S

    def stop(self) -> None:
        """Stop to watch."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(1):
            self._idle_s += 1
            if self._idle_s > self._timeout_s + self._extra_s:
                self._end_process()

    def _end_process(self) -> None:
        writer = threading.Thread(target=self._write_stacks, daemon=True)
        writer.start()
        writer.join(_WRITING_S)
        compiling = f", and {self._extra_s} s to compile" if self._extra_s else ""
        print(
            f"pipeline: rank {self._rank} made no progress for {self._idle_s} s (run.timeout{compiling}) and exits; the"
            f" stacks of its threads are in {self._stacks}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(CRASH)

    def _write_stacks(self) -> None:
        head = f"rank {self._rank}, {time.strftime('%F %T')}: no progress for {self._idle_s} s"
        try:
            with open(self._stacks, "w") as file:
                print(head, file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError:
            faulthandler.dump_traceback(all_threads=True)
