"""The permanent failure of a run, kept in its folder for the next start of the same request.

torchrun exits 1 whatever its ranks return, and starts them again. So the next start prints the line
and exits with the code of the failure, instead of failing the same way again. Errors found by the
checks before a start (`operate.request`) are not saved: the next start checks again.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.config.schema import Config
from pipeline.errors import PERMANENT, RunError
from pipeline.files import atomic_write
from pipeline.record.folder import RunFolder

FAILURE = "failure.json"


def save_failure(folder: RunFolder, error: RunError, request: str) -> bool:
    """Save a permanent failure of `request` (its digest) for the next start; return True if saved.

    Does not raise OSError, because the failure may be that of the disk.
    """
    folder.check_ours()
    if error.code not in PERMANENT:
        return False
    parts = {"line": str(error), "problem": error.problem, "remedy": error.remedy}
    data = json.dumps({"code": error.code, **parts, "request": request}).encode()
    with suppress(OSError):  # shared: several ranks may fail at once
        atomic_write(folder.path / FAILURE, data, durable=False, shared=True)
        return True
    return False


@contextmanager
def saving_failure(
    config: Config, folder: RunFolder, request: str, log: Callable[[str], None]
) -> Iterator[None]:
    """Save a permanent failure in this context, and log what the user can do then."""
    try:
        yield
    except RunError as error:
        if save_failure(folder, error, request):
            log(f"with run.resume=auto this request now fails at once: {folder.advice_after_failure(config)}")
        raise


def clear_failure(folder: Path) -> None:
    """Remove the saved failure: the request has changed, or `run.resume` says to resume."""
    (folder / FAILURE).unlink(missing_ok=True)
