"""How a run ends: an exception for each exit code, and one line for each ending that is not a crash.

Code that finds out that a run cannot go on raises a `RunError`. The command line prints its line and exits with its code.
Nothing else in this package chooses an exit code, so a script, a launcher or Kubernetes can rely on them:

    0 done · 2 invalid request, do not retry · 3 the loss is not finite · 4 data or storage · 75 temporary, retry

torchrun exits 1 whatever its ranks return. So a rank that ends with 2, 3 or 4 also saves its failure in the run's folder
(`save_failure`): the next start of the same request prints the line again and exits with the code (`load_failure`)
instead of failing the same way again. What the checks of a start find (`preflight.request`) is not saved, nor is a folder
or tracker that is out of reach: the next start checks again.
"""

import contextlib
import json
from pathlib import Path
from typing import Self

from pipeline.files import atomic_write

OK = 0
CRASH = 1


class RunError(Exception):
    """An ending with a line for people and an exit code for scripts."""

    code = CRASH
    is_collective = False

    def collective(self) -> Self:
        """Return this error, marked as one that every process of the group raises: it is printed once."""
        self.is_collective = True
        return self

    def __str__(self) -> str:
        return " ".join(super().__str__().split())  # one line, whatever a library's message contains


class DivergedError(RunError):
    """Processes hold different weights. Something is broken, as in a crash; the earlier checkpoints are good."""


class RequestError(RunError):
    """The request is invalid. The line says what was given, what is allowed and what to do."""

    code = 2


class NotFiniteError(RunError):
    """The loss became NaN or infinite. No state after the last good step exists."""

    code = 3


class StorageError(RunError):
    """Data or storage failed: corrupt images, a full disk, no checkpoint that verifies."""

    code = 4


class TemporaryError(RunError):
    """The run was interrupted, or something is not there yet. The same command resumes it."""

    code = 75


PERMANENT = (RequestError.code, NotFiniteError.code, StorageError.code)
"""Codes that every start of the same request would end with."""

_FILE = "failure.json"
_FILE_OF_0_1 = "verdict.json"


def from_exit_code(code: int) -> type[RunError]:
    """Return the class of error that exits with `code`; RunError for any other code."""
    kinds = {kind.code: kind for kind in (RequestError, NotFiniteError, StorageError, TemporaryError)}
    return kinds.get(code, RunError)


def save_failure(folder: Path, error: RunError, request: str) -> None:
    """Save why `request` (its digest) ended, for the next start. Never raises: the disk may be what failed."""
    if error.code not in PERMANENT:
        return
    data = json.dumps({"code": error.code, "line": str(error), "request": request}).encode()
    with contextlib.suppress(OSError):
        atomic_write(folder / _FILE, data, durable=False, shared=True)  # several ranks may fail at once


def load_failure(folder: Path, request: str) -> RunError | None:
    """Return the permanent error that the last start of this same request ended with, or None."""
    for name in (_FILE, _FILE_OF_0_1):
        try:
            saved = json.loads((folder / name).read_text())
            if saved["request"] == request:
                return from_exit_code(saved["code"])(saved["line"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def clear_failure(folder: Path) -> None:
    """Remove the saved failure: the request has changed, or `run.resume` says to resume."""
    for name in (_FILE, _FILE_OF_0_1):
        (folder / name).unlink(missing_ok=True)
