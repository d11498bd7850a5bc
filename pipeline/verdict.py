"""How a run ends: the exit codes, and one line for each ending that is not a crash.

Whoever finds out that a run cannot go on raises a `Verdict`; the command line prints its one line and exits with its
code. Nothing else in this package decides an exit code, so a script, a launcher or Kubernetes can rely on them:

    0 done · 2 the request is wrong, do not retry · 3 the loss is not finite · 4 data or storage · 75 temporary, retry

torchrun exits 1 whatever its ranks say. So a rank that ends with 2, 3 or 4 also saves its failure in the run's folder
(`leave`): the next start of the same request repeats the line and exits with the code (`recall`) instead of failing the
same way again. What the checks of a start find (`operate.checks`), or a folder or tracker that is out of reach, is not
saved: the next start checks again.
"""

import json
import os
import socket
from pathlib import Path
from typing import Self

OK = 0
CRASH = 1


class Verdict(Exception):
    """An ending with a line for people and a code for scripts."""

    code = CRASH
    is_common = False

    def common(self) -> Self:
        """The same one, which every process of the group raises: it is said once."""
        self.is_common = True
        return self

    def __str__(self) -> str:
        return " ".join(super().__str__().split())  # one line, whatever a library's message brought along


class DivergedError(Verdict):
    """Processes hold different weights: something is broken, as in a crash, and the checkpoints before are good."""


class RequestError(Verdict):
    """What was asked cannot be done: says what was given, what is allowed and what to do."""

    code = 2


class NotFiniteError(Verdict):
    """The loss became NaN or infinite; no state after the last good step exists."""

    code = 3


class StorageError(Verdict):
    """Data or storage failed: bad images, a full disk, no checkpoint that verifies."""

    code = 4


class TemporaryError(Verdict):
    """Interrupted, or something is not there yet: the same command again goes on."""

    code = 75


FINAL = (RequestError.code, NotFiniteError.code, StorageError.code)
"""What no start of the same request will mend."""

_FILE = "verdict.json"


def of(code: int) -> type[Verdict]:
    """The kind of ending that an exit code stands for."""
    kinds = {kind.code: kind for kind in (RequestError, NotFiniteError, StorageError, TemporaryError)}
    return kinds.get(code, Verdict)


def leave(folder: Path, verdict: Verdict, request: str) -> None:
    """Save why `request` (its digest) ended, for the next start. Never raises: the disk may be what failed."""
    if verdict.code not in FINAL:
        return
    try:
        aside = folder / f".{_FILE}.{socket.gethostname()}.{os.getpid()}"  # several ranks may fail at once
        aside.write_text(json.dumps({"code": verdict.code, "line": str(verdict), "request": request}))
        os.replace(aside, folder / _FILE)
    except OSError:
        pass


def recall(folder: Path, request: str) -> Verdict | None:
    """Return the verdict that the last start of this same request ended with, or None."""
    try:
        left = json.loads((folder / _FILE).read_text())
        return of(left["code"])(left["line"]) if left["request"] == request else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def clear(folder: Path) -> None:
    """Forget it: the request has changed, or `run.resume` says to go on."""
    (folder / _FILE).unlink(missing_ok=True)
