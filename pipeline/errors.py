"""The errors that end a run, one exception class for each exit code.

Code that cannot continue a run raises a `RunError`. The command line prints its one line and exits
with its code. Nothing else in this package chooses an exit code, so scripts, launchers and
Kubernetes can rely on them.
"""

import difflib
import errno
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

OK = 0
CRASH = 1
_OUTAGE_ERRORS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH,
                  errno.ENETDOWN, errno.ENETUNREACH, errno.ENOTCONN, errno.ESHUTDOWN, errno.ECONNRESET,
                  errno.ECONNREFUSED, errno.ECONNABORTED, errno.EREMOTEIO, errno.ENODEV)  # fmt: skip
"""Errors of a storage that is out of reach, in a read or a write."""


class BadImage(NamedTuple):
    """An image that cannot be decoded, for people."""

    id: int
    name: str
    reason: str


def one_line(text: object, length: int = 200) -> str:
    """Return a text, such as a library's error, as one line of at most `length` characters."""
    return " ".join(str(text).split())[:length]


def printable_line(text: object) -> str:
    """Return a text as one line. Control characters, which a file may bring, are escaped."""
    line = " ".join(str(text).split())
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)


def summary(text: str, length: int = 600) -> str:
    """Return an error, without the frames of tracebacks in it, as one line."""
    lines = [line for line in text.splitlines() if not line.startswith("  ") and "Traceback" not in line]
    line = one_line(" ".join(lines), len(text))
    # a long one is cut in the middle: its beginning or its end may name the cause
    return line if len(line) <= length else f"{line[: length // 2]} ... {line[-length // 2 :]}"


def count_of(number: int, noun: str, plural: str = "s") -> str:
    """Return `2 images`. plural: what the noun has at its end then."""
    return f"{number:,} {noun}" + ("" if number == 1 else plural)


def list_first(items: list[str], limit: int) -> str:
    """Return the first `limit` items, separated by commas, and the number of the others."""
    return ", ".join(items[:limit]) + (f" and {len(items) - limit} more" if len(items) > limit else "")


def nearest(word: str, words: Sequence[str], cutoff: float = 0.5) -> str:
    """Return "; did you mean X?" for the closest of `words`, or "". `word` may lack its section."""
    close = [key for key in words if key.endswith(f".{word}")]
    close = close or difflib.get_close_matches(word, words, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""


class RunError(Exception):
    """An error that ends the run: its line is the problem, then what to do about it if known."""

    code = CRASH
    is_collective = False

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem, remedy)
        self.problem, self.remedy = printable_line(problem), printable_line(remedy)

    def collective(self) -> Self:
        """Return this error, marked as raised by every process of the group: it is printed once."""
        self.is_collective = True
        return self

    def __str__(self) -> str:
        return f"{self.problem}: {self.remedy}" if self.remedy else self.problem


class RequestError(RunError):
    """The request is invalid. The line says what was given, what is allowed and what to do."""

    code = 2


class NotFiniteError(RunError):
    """The loss became NaN or infinite. The state after the last finite step is not saved."""

    code = 3


class StorageError(RunError):
    """Data or storage failed: corrupt images, a full disk, or no checkpoint that verifies."""

    code = 4


class TemporaryError(RunError):
    """The run was interrupted, or a resource is not available yet. The same command resumes it."""

    code = 75


PERMANENT = (RequestError.code, NotFiniteError.code, StorageError.code)
"""Exit codes that a retry of the same request would end with again."""


def from_exit_code(code: int) -> type[RunError]:
    """Return the error class of an exit code; RunError for a code without a class."""
    kinds = (RequestError, NotFiniteError, StorageError, TemporaryError)
    return next((kind for kind in kinds if kind.code == code), RunError)


def storage_outage(what: str | Path, error: OSError) -> TemporaryError | None:
    """Return the error of `what`, which is no image, if its storage is out of reach, else None."""
    if error.errno not in _OUTAGE_ERRORS:
        return None
    return TemporaryError(
        f"{what} is out of reach ({error.strerror})", "give the same command again once its storage is back"
    )
