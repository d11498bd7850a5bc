"""The files of checkpoints: their names, which hold a digest, and reading them with a check.

A file's name is step-<step>.<first 16 hex digits of its SHA-256>.pt. No torch here: `checkpoint`
decodes what these functions read. A storage that is out of reach is a TemporaryError.
"""

import hashlib
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pipeline.errors import RunError, StorageError, storage_outage

FORMAT = 1
NAME = re.compile(r"step-(\d{8,})\.([0-9a-f]{16})\.pt")


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name. Raises StorageError for any other name."""
    match = NAME.fullmatch(path.name)
    if not match:
        raise StorageError(
            f"{path}: the name is not step-<step>.<16 hex of its SHA-256>.pt, so the file cannot be verified",
            "rename it to its original name",
        )
    return int(match[1])


def list_checkpoints(folder: Path) -> list[Path]:
    """Return all paths in `folder` that are named like a checkpoint, newest first, unverified."""
    found = []
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in folder.iterdir():
            if NAME.fullmatch(path.name):
                with suppress(FileNotFoundError):  # a run that trains here deletes its old ones
                    found.append((step_of(path), path.stat().st_mtime_ns, path))
    return [path for _, _, path in sorted(found, reverse=True)]


def read_verified(path: Path) -> bytes:
    """Return the file's bytes. Raises StorageError if they do not have the digest in its name."""
    step_of(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None
    digest, stated = hashlib.sha256(data).hexdigest(), path.name.split(".")[1]
    if not digest.startswith(stated):
        raise StorageError(
            f"{path} is damaged: its SHA-256 begins {digest[:16]}, not {stated} ({len(data):,} bytes)"
        )
    return data


def newest_verified(
    folder: Path, log: Callable[[str], None], start_again: str = "start again with run.resume=never"
) -> tuple[Path, bytes] | None:
    """Return the newest checkpoint that verifies and its bytes, or None if there is no checkpoint.

    Damaged checkpoints are logged. Raises StorageError if there are checkpoints and none verifies:
    a silent fresh start could discard a month of training.
    """
    paths = list_checkpoints(folder)
    for path in paths:
        try:
            return path, read_verified(path)
        except StorageError as error:
            log(f"{error}; the checkpoint before it is used")
    if paths:
        raise StorageError(
            f"none of the {len(paths)} checkpoints in {folder} verifies",
            f"restore one from a copy, or {start_again} (which sets aside what is there)",
        )
    return None


def find(path: Path) -> Path:
    """Return the path of a checkpoint: `path` itself, or the newest in a run's folder."""
    try:
        path.stat()
        if not path.is_dir():
            return path
        paths = list_checkpoints(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    except OSError as error:
        raise _unreadable(path, error) from None
    if not paths:
        raise StorageError(f"{path} holds no checkpoint", "give a run's folder or a file step-….pt")
    return paths[0]


def _unreadable(path: Path, error: OSError) -> RunError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return StorageError(f"{path} does not exist", "give a run's folder or a file step-….pt")
    return storage_outage(path, error) or StorageError(f"{path} cannot be read: {error.strerror}")
