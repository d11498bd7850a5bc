"""Files that are complete or absent, and JSON of unknown origin."""

import errno
import json
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PROCESS_TOKEN = secrets.token_hex(4)  # containers may have equal host names and process ids
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk without room."""
_MAX_JSON_DEPTH = 100  # several times that of any file of ours


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
        nodes = (node for node in level if isinstance(node, dict | list))
        level = [child for node in nodes for child in (node.values() if isinstance(node, dict) else node)]
        if not level:
            return value
    raise ValueError("it is nested too deeply")
