"""SIGTERM and SIGINT set a flag, and nothing else: the loop asks it once a step, and all processes decide together."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.verdict import TemporaryError

_NUMBERS = (signal.SIGTERM, signal.SIGINT)


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
        if self._asked:
            raise TemporaryError("asked to stop before a step was made: the same command starts again")
        before = [signal.signal(number, signal.SIG_DFL) for number in _NUMBERS]
        yield
        for number, handler in zip(_NUMBERS, before, strict=True):
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        self._asked = True
