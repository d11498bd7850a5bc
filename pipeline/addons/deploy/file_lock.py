"""Locks of open files, between processes."""

import errno
import fcntl
import os
import time
from pathlib import Path


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
