"""SIGTERM, SIGINT and SIGHUP are only noted: the loop asks, all processes decide together.

Python runs a signal's handler in the main thread, once that returns from native code, where it may
wait for a device or for peers. But Python's C handler writes to the wake-up file descriptor at
once. It is a pipe, from which any thread learns of the signal.

SIGHUP, which says that the terminal was closed, is left alone if it is ignored (`nohup`). In a
thread of another program, which handles the signals itself, all are left alone.
"""

import os
import signal
import threading
import time
from contextlib import suppress
from typing import Any

_SHUTDOWN_TIMEOUT_S = 30  # torchrun's default
_MARGIN_S = 5  # for what follows
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def handle(handler: Any) -> dict[int, Any]:
    """Have `handler` called at each signal that asks to stop; return the handlers before it."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    numbers = [number for number in SIGNALS if number != signal.SIGHUP or not is_hangup_ignored()]
    return {number: signal.signal(number, handler) for number in numbers}


def is_hangup_ignored() -> bool:
    """Return True if this process is to outlive its terminal."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


class StopRequest:
    """The signals that have asked this process to stop."""

    def __init__(self) -> None:
        self._received: list[int] = []
        self._noticed_at = 0.0
        self._is_noticed = False
        self._pipe, self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def listen(self) -> None:
        """Note each signal from now on: before torch is imported."""
        if handle(lambda number, frame: self.is_set()):
            signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)

    def notice(self) -> None:
        """Note a signal in its handler: another thread may be reading the pipe just now."""
        self._is_noticed = True

    def is_set(self) -> bool:
        """Return True if a signal has arrived, in any thread, whatever the main one waits for."""
        if not self._received:
            self._noticed_at = time.monotonic()
        with suppress(BlockingIOError):
            self._received += [number for number in os.read(self._pipe, 512) if number in SIGNALS]
        return bool(self._received) or self._is_noticed

    def seconds_left(self) -> float | None:
        """Return how long this process may take until its launcher kills it; None: no signal."""
        if not self.is_set():
            return None
        if signal.SIGINT in self._received[1:]:  # a second Ctrl-C
            return 0.0
        timeout_s = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_TIMEOUT_S))
        return max(0.0, timeout_s - _MARGIN_S - (time.monotonic() - self._noticed_at))
