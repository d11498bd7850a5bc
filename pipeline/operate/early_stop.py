"""A signal before the first step ends the start at once, whatever that waits for.

There is nothing to save yet. A library that is being imported, native code that waits for peers and
a callback of the interpreter's ask no flag, so that each block of the start says what a signal does
in it.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn, TypeVar

from pipeline.errors import TemporaryError
from pipeline.guards.signals import StopRequest, handle

T = TypeVar("T")
LAUNCHER_REPORTS = "PIPELINE_LAUNCHER_REPORTS"
"""Environment variable of ranks that end by the signal at an early stop: a launcher reports it."""


class EarlyStopError(TemporaryError):
    """A signal has arrived before the first step."""

    def __init__(self) -> None:
        super().__init__("asked to stop before a step was made: the same command starts again")


class _Stop(BaseException):
    """Leaves a block at a signal. No Exception: code that catches all would call it its own."""


def check(stop: StopRequest) -> None:
    """Raise EarlyStopError if a signal has arrived."""
    if stop.is_set():
        raise EarlyStopError


def exit_on_signal(stop: StopRequest) -> AbstractContextManager[None]:
    """End the process at a signal: native code that waits for peers reads no flag."""
    return _handled_by(stop, signal.SIG_DFL)


@contextmanager
def raise_on_signal(stop: StopRequest, repeat: Callable[[int], None] = lambda number: None) -> Iterator[None]:
    """Raise EarlyStopError at a signal, in code that changes nothing and may take long.

    It also replaces what a library, or a callback of the interpreter's, makes of the exception with
    which the code is left. repeat: called with the number of each further signal.
    """
    is_leaving = False

    def leave(number: int, frame: object) -> None:
        nonlocal is_leaving
        if is_leaving:
            return repeat(number)
        is_leaving = True
        stop.notice()
        raise _Stop

    try:
        with _handled_by(stop, leave):
            yield
    finally:
        check(stop)


def run(stop: StopRequest, work: Callable[[], T]) -> T:
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
        check(stop)
        wait([result], timeout=0.1)
    return result.result()


def die_of_signal() -> NoReturn:
    """End this process as SIGTERM does by default."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(TemporaryError.code)


@contextmanager
def _handled_by(stop: StopRequest, handler: Any) -> Iterator[None]:
    check(stop)
    previous = handle(handler)
    try:
        yield
    finally:
        for number, handler_before in previous.items():
            signal.signal(number, handler_before)
