"""The lock of a run's folder: one process writes there, and the kernel knows if it is alive.

It is a POSIX record lock: the kernel drops it when its holder dies, however that happens, and
forked loader workers do not inherit it. A holder that is frozen keeps it;
`addons.deploy.takeover` has the lock that another start can take from such a holder.
"""

import os
import socket
import time
from pathlib import Path

from pipeline.errors import RequestError, TemporaryError
from pipeline.files import lock


class Lock:
    """A lock file, held by this process, or by the one on whose behalf it writes."""

    def __init__(self, path: Path, subject: str, remedy: str) -> None:
        """subject: what the holder holds. remedy: what to do while it does. Both for messages."""
        self.path, self.subject, self.remedy = path, subject, remedy
        self.descriptor: int | None = None

    def take(self, patience_s: float) -> bool:
        """Take the lock; return True if it was taken from a holder that still lives.

        Makes the folder. Raises TemporaryError if another process holds the lock for `patience_s`
        seconds, RequestError if there are no locks, OSError if the file cannot be written.
        """
        while True:
            self.path.parent.mkdir(parents=True, exist_ok=True)  # a start that fails may remove it meanwhile
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                if not try_lock(self.path, descriptor, patience_s):
                    raise TemporaryError(f"{self.subject} is held by {self.holder()}", self.remedy)
                if has_name(descriptor, self.path):  # else it was removed or replaced meanwhile
                    write_holder(descriptor)
                    self.descriptor = descriptor
                    return False
            finally:
                if self.descriptor != descriptor:
                    os.close(descriptor)

    def drop(self) -> None:
        """Drop the lock if this process holds it."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def is_held(self) -> bool:
        """Return True if another process holds the lock, False also if there are no locks here."""
        try:
            with open(self.path, "r+b", buffering=0) as file:
                return not try_lock(self.path, file.fileno(), 0)
        except (OSError, RequestError):
            return False

    def join_holder(self) -> None:
        """Remember the process that holds the lock now: this process writes on its behalf."""

    def check(self) -> None:
        """End this process with exit code 75 if another one has taken the lock from its holder."""

    def holder(self) -> str:
        """Return the holder's name, for messages. The holder itself must not call it."""
        try:  # closing a descriptor of the file drops a lock of this process (POSIX)
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        return text.partition("\n")[0].strip() or "another process"


def try_lock(path: Path, descriptor: int, patience_s: float) -> bool:
    """Do what `files.lock` does. Raises RequestError if the file system has no locks."""
    try:
        return lock(descriptor, patience_s)
    except OSError as error:
        raise RequestError(
            f"run.dir={path.parent} cannot be locked: {error.strerror}",
            "give a folder on a file system with working locks (NFS 4, CephFS, Lustre, a local disk)",
        ) from None


def has_name(descriptor: int, path: Path) -> bool:
    """Return True if `path` is the name of the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def write_holder(descriptor: int) -> None:
    """Write who holds the lock into its file."""
    name = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{name}\n".encode(), 0)
    os.utime(descriptor)
