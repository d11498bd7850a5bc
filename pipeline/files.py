"""Files that are complete or absent, JSON of unknown origin, and locks between processes."""

import errno
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PROCESS_TOKEN = secrets.token_hex(4)  # containers may have equal host names and process ids
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk without room."""
_MAX_JSON_DEPTH = 100  # several times that of any file of ours


def is_bucket(place: object) -> bool:
    """Return True for s3://…, False for a path of this machine."""
    return str(place).startswith("s3://")


def temporary_sibling(path: Path, *, shared: bool = False) -> Path:
    """Return the path of a hidden temporary file in the folder of `path`, to be renamed to `path`.

    shared: several processes may write `path` at the same time, so each gets its own name.
    """
    owner = f".{socket.gethostname()}.{os.getpid()}.{_PROCESS_TOKEN}" if shared else ""
    return path.with_name(f".{path.name}{owner}")


@contextmanager
def replacing(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Yield a temporary sibling of `path`, and rename it to `path` if the block succeeds.

    If the block fails, the temporary file is removed and `path` does not change. Raises OSError.
    """
    temporary = temporary_sibling(path, shared=shared)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_synced(path: Path, data: bytes | memoryview) -> None:
    """Write a file, and sync its data to the disk. Raises OSError."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def atomic_write(path: Path, data: bytes, *, durable: bool = True, shared: bool = False) -> None:
    """Replace a file by `data`, completely or not at all. Raises OSError.

    durable: sync the data to the disk before the file gets its name.
    """
    with replacing(path, shared=shared) as temporary:
        write_synced(temporary, data) if durable else temporary.write_bytes(data)


def sync_folder(folder: Path) -> None:
    """Sync the entries of `folder` to the disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_limited(path: Path, max_bytes: int) -> bytes:
    """Return the contents of a file. Raises OSError, and ValueError if it has more bytes."""
    with open(path, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes >> 20} MiB")
    return data


def parse_json(text: bytes | str) -> Any:
    """Return the value of a JSON text that others may have written.

    Raises ValueError if it is not JSON, or so deeply nested that printing it could fail.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [value]
    for _ in range(_MAX_JSON_DEPTH):
        level = [child for parent in level if isinstance(parent, dict | list) for child in _children(parent)]
        if not level:
            return value
    raise ValueError("it is nested too deeply")


def _children(parent: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return parent.values() if isinstance(parent, dict) else parent


def has_name(descriptor: int, path: Path) -> bool:
    """Return True if `path` is the name of the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def lock(descriptor: int, timeout_s: float, *, inherited: bool = False) -> bool:
    """Lock an open file; return False if another process holds the lock until the timeout.

    inherited: forked processes hold the lock, too, until the last of them has died (flock).
    Otherwise the kernel releases it when this process dies (a POSIX record lock). Raises OSError if
    the file system does not support locks.
    """
    acquire = fcntl.flock if inherited else fcntl.lockf
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            acquire(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):  # POSIX: another process holds the lock
                raise
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
