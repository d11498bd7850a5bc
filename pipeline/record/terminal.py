"""Output for people, on standard error: a live line on a terminal, lines with the time in a log.

Standard output is for results. Only a terminal gets colour, unless NO_COLOR (no-color.org) is set.
"""

import os
import shutil
import sys
import time

from pipeline.data.access import BadImage
from pipeline.streams import QUIET

_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"
_LOG_EVERY_S = 10
_SEPARATOR = "  "
_DEFAULT_COLUMNS = 80


class Terminal:
    """The output of rank 0."""

    def __init__(self) -> None:
        self._is_live = sys.stderr.isatty()
        self._has_colour = self._is_live and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._live_width = 0
        self._last_progress = time.monotonic()

    def log(self, text: str) -> None:
        """Print a line that stays, with the time if this is not a terminal."""
        self._erase_live_line()
        stamp = "" if self._is_live else time.strftime("%F %T ")
        self.show(f"{stamp}{text}")

    def show(self, text: str) -> None:
        """Print lines without the time. All output but the live line goes through here."""
        print(text, file=sys.stderr, flush=True)

    def log_summary(self, rows: dict[str, str]) -> None:
        """Print a table of names and values."""
        width = max(map(len, rows))
        for name, text in rows.items():
            padded = f"{name:<{width}}"
            self.log(f"  {f'{_BOLD}{padded}{_PLAIN}' if self._has_colour else padded}  {text}")

    def log_bad_images(self, bad_images: list[BadImage]) -> None:
        """Name each validation image that could not be decoded."""
        for bad in bad_images:
            self.log(f"bad image {bad.name}: {bad.reason}; it counts as a wrong prediction")

    def progress(self, *parts: str) -> None:
        """Replace the live line on a terminal; otherwise print a line at most every ten seconds.

        parts: the most important first. A narrow terminal shows those that fit.
        """
        if self._is_live:
            self._erase_live_line()
            room = _columns() - 1  # a line that wraps cannot be erased
            text = _SEPARATOR.join(parts)
            while len(text) > room and len(parts) > 1:
                parts = parts[:-1]
                text = _SEPARATOR.join(parts)
            print(text[:room], end="", file=sys.stderr, flush=True)
            self._live_width = len(text[:room])
        elif time.monotonic() - self._last_progress >= _LOG_EVERY_S:
            self._last_progress = time.monotonic()
            self.log(_SEPARATOR.join(parts))

    def _erase_live_line(self) -> None:
        if self._live_width:
            print("\r" + " " * self._live_width + "\r", end="", file=sys.stderr)
            self._live_width = 0


class NullTerminal(Terminal):
    """No output: on other ranks, and with --quiet. The command line still prints errors."""

    def show(self, text: str) -> None:
        pass

    def progress(self, *parts: str) -> None:
        pass


def _columns() -> int:
    """Return the width of the terminal that shows standard error; standard output may be a file."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _DEFAULT_COLUMNS
    except (OSError, ValueError):
        return shutil.get_terminal_size((_DEFAULT_COLUMNS, 24)).columns


def make_terminal(*, is_main: bool) -> Terminal:
    return Terminal() if is_main and not os.environ.get(QUIET) else NullTerminal()


def format_duration(seconds: float) -> str:
    """Return a duration such as `1 h 02 min`, `3 min 20 s` or `12 s`."""
    total = round(seconds)
    if total >= 3600:
        return f"{total // 3600} h {total % 3600 // 60:02d} min"
    if total >= 60:
        return f"{total // 60} min {total % 60:02d} s"
    return f"{total} s"
