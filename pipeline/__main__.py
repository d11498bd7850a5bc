"""Entry point of `pipeline` and of `python -m pipeline`."""

import os
import signal
import sys
from typing import NoReturn

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def command() -> NoReturn:
    """Run the command line. A signal while it is imported ends the process with exit code 75.

    A rank ends as by default: its launcher reports it. `train` sets handlers of its own next.
    """
    before = [signal.signal(number, _exit) for number in _SIGNALS if "RANK" not in os.environ]

    from pipeline.cli import main  # takes a quarter of a second

    if sys.argv[1:2] != ["train"]:
        for number, handler in zip(_SIGNALS, before, strict=False):
            signal.signal(number, handler)
    main.command()


def _exit(*_: object) -> NoReturn:
    try:
        os.write(2, b"pipeline: interrupted: give the same command again\n")
    finally:
        os._exit(75)


if __name__ == "__main__":
    command()
