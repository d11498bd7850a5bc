"""SIGTERM and SIGINT set a flag, and nothing else: the loop asks it once a step, and all processes decide together."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.errors import TemporaryError

_NUMBERS = (signal.SIGTERM, signal.SIGINT)
_TOO_EARLY = "asked to stop before a step was made: the same command starts again"


class StopRequest:
    def __init__(self) -> None:
        self._asked = False

    def listen(self) -> None:
        """From now on a signal asks to stop. Called on a process's first lines, before torch is imported."""
        for number in _NUMBERS:
            signal.signal(number, self._note)

    def asked(self) -> bool:
        return self._asked

    @contextmanager
    def obeyed_at_once(self) -> Iterator[None]:
        """Meanwhile a signal ends this process: it waits for its peers in native code, which would never ask a flag.

        No step has been made, so nothing is lost. TemporaryError if the signal was here before.
        """
        with self._handled_by(signal.SIG_DFL):
            yield

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Meanwhile a signal raises TemporaryError, in Python code that changes nothing and may take long."""

        def stop(number: int, frame: object) -> None:
            raise TemporaryError(_TOO_EARLY)

        with self._handled_by(stop):
            yield

    @contextmanager
    def _handled_by(self, handler: Any) -> Iterator[None]:
        if self._asked:
            raise TemporaryError(_TOO_EARLY)
        before = [signal.signal(number, handler) for number in _NUMBERS]
        yield
        for number, handler_before in zip(_NUMBERS, before, strict=True):
            signal.signal(number, handler_before)

    def _note(self, number: int, frame: object) -> None:
        self._asked = True
