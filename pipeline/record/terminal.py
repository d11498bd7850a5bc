"""What a person sees: one live line on a terminal, plain lines with the time in a log, a summary at the end.

On standard error; standard output is for results. Colour is for terminals, and NO_COLOR (no-color.org) turns it off.
"""

import os
import shutil
import sys
import time

from pipeline.data.sources import Images

_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"
QUIET = "PIPELINE_QUIET"
"""Set in the environment, which reaches every process of a run, by --quiet."""


class Terminal:
    """Rank 0's voice."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._has_colour = self._live and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._live_width = 0
        self._last_progress = float("-inf")

    def log(self, text: str) -> None:
        """A line that stays."""
        self._wipe()
        stamp = "" if self._live else time.strftime("%F %T ")
        print(f"{stamp}{text}", file=sys.stderr, flush=True)

    def show(self, text: str) -> None:
        """Lines as they are."""
        print(text, file=sys.stderr, flush=True)

    def summarise(self, rows: dict[str, str]) -> None:
        """What there is at the end, and where."""
        width = max(map(len, rows))
        for name, text in rows.items():
            padded = f"{name:<{width}}"
            self.log(f"  {f'{_BOLD}{padded}{_PLAIN}' if self._has_colour else padded}  {text}")

    def log_defects(self, images: Images, defects: list[tuple[int, str]]) -> None:
        """Name each validation image that could not be decoded."""
        for sample, defect in defects:
            self.log(f"bad image {images.name(sample)}: {defect}; it counts as a wrong answer")

    def progress(self, text: str) -> None:
        """Where things stand now: overwritten on a terminal, a line every ten seconds in a log."""
        if self._live:
            self._wipe()
            text = text[: shutil.get_terminal_size().columns - 1]  # a line that wraps cannot be taken back
            print(text, end="", file=sys.stderr, flush=True)
            self._live_width = len(text)
        elif time.monotonic() - self._last_progress >= 10:
            self._last_progress = time.monotonic()
            self.log(text)

    def _wipe(self) -> None:
        if self._live_width:
            print("\r" + " " * self._live_width + "\r", end="", file=sys.stderr)
            self._live_width = 0


class NullTerminal(Terminal):
    """The other ranks; and all of them with --quiet, where an error is still said by the command line."""

    def log(self, text: str) -> None:
        pass

    def show(self, text: str) -> None:
        pass

    def progress(self, text: str) -> None:
        pass


def make_terminal(*, is_main: bool) -> Terminal:
    """A rank's terminal."""
    return Terminal() if is_main and not os.environ.get(QUIET) else NullTerminal()


def duration(seconds: float) -> str:
    """`1 h 02 min`, `3 min 20 s`, `12 s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"
