"""Ends a hang: a process that makes no progress for too long says where each of its threads stands, and leaves.

Promise: no process waits for ever, for a peer, a device, a disk or a loader worker. Why that holds: a thread of its own
counts seconds since the last sign of life, in which the loop has no part; `os._exit` asks nobody, and the disk that the
account goes to cannot hold it up either. It counts its own seconds and not a clock's, so that a machine that slept, or a
job that was paused whole, is not taken for one that hangs. A compilation takes minutes and gives no sign of life: the loop
announces it, and the watchdog waits `COMPILING_S` longer.
"""

import faulthandler
import os
import sys
import threading
import time
from pathlib import Path

from pipeline.errors import CRASH

_WRITING_S = 5
COMPILING_S = 1800
"""How much longer no sign of life is tolerated while a model is compiled."""


class Watchdog:
    def __init__(self, seconds: float, account: Path, rank: int) -> None:
        """seconds: how long no sign of life is tolerated; account: file for the stacks of this process."""
        self._seconds, self._account, self._rank = seconds, account, rank
        self._silent_for = 0
        self._extra = 0
        self._over = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self) -> None:
        """A sign of life."""
        self._silent_for = self._extra = 0

    def wait_for_compilation(self) -> None:
        """Take a sign of life, and expect that a model is compiled before the next one."""
        self._silent_for, self._extra = 0, COMPILING_S

    def stop(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(1):
            self._silent_for += 1
            if self._silent_for > self._seconds + self._extra:
                self._bark()

    def _bark(self) -> None:
        writer = threading.Thread(target=self._write_account, daemon=True)
        writer.start()
        writer.join(_WRITING_S)
        print(
            f"pipeline: rank {self._rank} made no progress for {self._silent_for} s (run.timeout"
            f"{f', and {self._extra} s to compile' if self._extra else ''}) and leaves; where each of"
            f" its threads stood is in {self._account}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        os._exit(CRASH)

    def _write_account(self) -> None:
        head = f"rank {self._rank}, {time.strftime('%F %T')}: no progress for {self._silent_for} s"
        try:
            with open(self._account, "w") as file:
                print(head, file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError:
            faulthandler.dump_traceback(all_threads=True)
