"""Output for people, on standard error: a live line on a terminal, lines with times in a log."""

import os
import shutil
import sys
import time

from pipeline.streams import QUIET

_LOG_EVERY_S = 10
_ERASED = "\r\x1b[K"


class Terminal:
    """The output of rank 0. Of other ranks, the command line alone prints errors."""

    def __init__(self, *, is_shown: bool = True) -> None:
        self._is_shown = is_shown
        self._is_live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._has_live_line = False
        self._last_progress = time.monotonic()

    def log(self, text: str) -> None:
        """Print a line that stays, with the time if this is not a terminal."""
        self.show(text if self._is_live else f"{time.strftime('%F %T')} {text}")

    def show(self, text: str) -> None:
        """Print lines without the time. All output but the live line goes through here."""
        if not self._is_shown:
            return
        print(f"{_ERASED if self._has_live_line else ''}{text}", file=sys.stderr, flush=True)
        self._has_live_line = False

    def progress(self, *parts: str) -> None:
        """Replace the live line on a terminal; otherwise print a line at most every ten seconds.

        parts: the most important first. A narrow terminal cuts the last ones off.
        """
        text = "  ".join(parts)
        if self._is_live and self._is_shown:
            text = text[: _columns() - 1]  # a line that wraps cannot be erased
            print(f"{_ERASED}{text}", end="", file=sys.stderr, flush=True)
            self._has_live_line = True
        elif time.monotonic() - self._last_progress >= _LOG_EVERY_S:
            self._last_progress = time.monotonic()
            self.log(text)


def _columns() -> int:
    """Return the width of the terminal that shows standard error; standard output may be a file."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return shutil.get_terminal_size().columns


SILENT = Terminal(is_shown=False)


def make_terminal(*, is_main: bool) -> Terminal:
    """Return the terminal of a rank: --quiet and ranks other than 0 show nothing."""
    return Terminal() if is_main and not os.environ.get(QUIET) else SILENT
