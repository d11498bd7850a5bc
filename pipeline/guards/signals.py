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
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NoReturn, TypeVar

from pipeline.errors import TemporaryError

T = TypeVar("T")
_SHUTDOWN_TIMEOUT_S = 30  # torchrun's default
_MARGIN_S = 5  # for what follows
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LAUNCHER_REPORTS = "PIPELINE_LAUNCHER_REPORTS"
"""Environment variable of ranks that end by the signal at an early stop: a launcher reports it."""


class EarlyStopError(TemporaryError):
    """A signal has arrived before the first step."""

    def __init__(self) -> None:
        super().__init__("asked to stop before a step was made: the same command starts again")


class _Stop(BaseException):
    """Leaves a block at a signal. No Exception: code that catches all would call it its own."""


def handle(handler: Any) -> dict[int, Any]:
    """Have `handler` called at each signal that asks to stop; return the handlers before it."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    numbers = [number for number in SIGNALS if number != signal.SIGHUP or not is_hangup_ignored()]
    return {number: signal.signal(number, handler) for number in numbers}


def is_hangup_ignored() -> bool:
    """Return True if this process is to outlive its terminal."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def die_of_signal() -> NoReturn:
    """End this process as SIGTERM does by default."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(TemporaryError.code)


class StopRequest:
    """The signals that have asked this process to stop."""

    def __init__(self) -> None:
        self._received: list[int] = []
        self._noticed_at = 0.0
        self._has_raised = False
        self._pipe, self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def listen(self) -> None:
        """Note each signal from now on: before torch is imported."""
        if handle(lambda number, frame: self.is_set()):
            signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)

    def is_set(self) -> bool:
        """Return True if a signal has arrived, in any thread, whatever the main one waits for."""
        if not self._received:
            self._noticed_at = time.monotonic()
        with suppress(BlockingIOError):
            self._received += [number for number in os.read(self._pipe, 512) if number in SIGNALS]
        return bool(self._received) or self._has_raised

    def seconds_left(self) -> float | None:
        """Return how long this process may take until its launcher kills it; None: no signal."""
        if not self.is_set():
            return None
        if signal.SIGINT in self._received[1:]:  # a second Ctrl-C
            return 0.0
        timeout_s = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_TIMEOUT_S))
        return max(0.0, timeout_s - _MARGIN_S - (time.monotonic() - self._noticed_at))

    def check(self) -> None:
        """Raise EarlyStopError if a signal has arrived before the first step."""
        if self.is_set():
            raise EarlyStopError

    def exit_on_signal(self) -> AbstractContextManager[None]:
        """End the process at a signal: native code that waits for peers reads no flag."""
        return self._handled_by(signal.SIG_DFL)

    @contextmanager
    def raise_on_signal(self, repeat: Callable[[int], None] = lambda number: None) -> Iterator[None]:
        """Raise EarlyStopError at a signal, in code that changes nothing and may take long.

        It also replaces what a library, or a callback of the interpreter's, makes of the exception
        with which the code is left. repeat: called with the number of each further signal.
        """
        is_leaving = False

        def stop(number: int, frame: object) -> None:
            nonlocal is_leaving
            if is_leaving:
                return repeat(number)
            is_leaving = self._has_raised = True  # another thread may be reading the pipe just now
            raise _Stop

        try:
            with self._handled_by(stop):
                yield
        finally:
            self.check()

    def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, done in a thread. Raises EarlyStopError at a signal.

        For work in a library that takes an exception of a signal's handler for one of its own.
        """
        result: Future[T] = Future()

        def call() -> None:
            try:
                result.set_result(work())
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=call, name="stoppable", daemon=True).start()
        while not result.done():
            self.check()
            wait([result], timeout=0.1)
        return result.result()

    @contextmanager
    def _handled_by(self, handler: Any) -> Iterator[None]:
        self.check()
        previous = handle(handler)
        try:
            yield
        finally:
            for number, handler_before in previous.items():
                signal.signal(number, handler_before)
