"""SIGTERM and SIGINT set a flag, and nothing else: the loop asks it once a step, and all processes decide together."""

import signal


class StopRequest:
    def __init__(self) -> None:
        self._asked = False

    def listen(self) -> None:
        """From now on a signal asks to stop. Called on a process's first lines, before torch is imported."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def asked(self) -> bool:
        return self._asked

    def _note(self, number: int, frame: object) -> None:
        self._asked = True
