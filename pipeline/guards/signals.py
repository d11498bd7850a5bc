"""SIGTERM and SIGINT only set a flag: the loop reads it, and all processes decide together.

Python runs a signal's handler in the main thread, once that returns from native code. While it
waits there, for a device or for peers, the flag is not set. But Python's C handler writes to the
wake-up file descriptor at once. It is a pipe, from which any thread learns of the signal.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeVar

from pipeline.errors import TemporaryError

T = TypeVar("T")
_SHUTDOWN_TIMEOUT_S = 30  # torchrun's default
_MARGIN_S = 5  # for what follows
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_TOO_EARLY = "asked to stop before a step was made: the same command starts again"


class StopRequest:
    def __init__(self) -> None:
        self._asked_at: float | None = None
        """When the signal was noticed, on the monotonic clock."""
        self._pipe, self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def listen(self) -> None:
        """Set the flag at each signal from now on.

        Called first in a process, before torch is imported.
        """
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, self._set_flag)

    def is_set(self) -> bool:
        """Return True if a signal has arrived, in any thread, whatever the main one waits for."""
        with suppress(BlockingIOError):
            if any(number in _SIGNALS for number in os.read(self._pipe, 512)):
                self._set_flag()
        return self._asked_at is not None

    def seconds_left(self) -> float | None:
        """Return how long this process may take until its launcher kills it; None: no signal."""
        if not self.is_set():
            return None
        timeout_s = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_TIMEOUT_S))
        return max(0.0, timeout_s - _MARGIN_S - (time.monotonic() - (self._asked_at or time.monotonic())))

    def check(self) -> None:
        """Raise TemporaryError if a signal has arrived before the first step."""
        if self.is_set():
            raise TemporaryError(_TOO_EARLY)

    def exit_on_signal(self) -> AbstractContextManager[None]:
        """End the process at a signal: native code that waits for peers reads no flag.

        No step has been made, so nothing is lost. Raises TemporaryError if a signal arrived
        earlier.
        """
        return self._handled_by(signal.SIG_DFL)

    def raise_on_signal(self) -> AbstractContextManager[None]:
        """Raise TemporaryError at a signal, in code that changes nothing and may take long."""

        def stop(number: int, frame: object) -> None:
            raise TemporaryError(_TOO_EARLY)

        return self._handled_by(stop)

    def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, done in a thread. Raises TemporaryError at a signal.

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
            if self.is_set():
                raise TemporaryError(_TOO_EARLY)
            wait([result], timeout=0.1)
        return result.result()

    @contextmanager
    def _handled_by(self, handler: Any) -> Iterator[None]:
        self.check()
        previous = [signal.signal(number, handler) for number in _SIGNALS]
        try:
            yield
        finally:
            for number, handler_before in zip(_SIGNALS, previous, strict=True):
                signal.signal(number, handler_before)

    def _set_flag(self, *_: object) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
