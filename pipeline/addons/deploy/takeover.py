"""The lock of a run's folder, which can be taken over from a holder that is frozen.

It is a POSIX record lock (`fcntl.lockf`): the kernel drops it when its holder dies, however that
happens, and forked loader workers do not inherit it. A start that finds it held exits with code 75.
(A pack, which workers write, is locked by `lock` alone, and they inherit that.)

A frozen process (SIGSTOP, a cgroup's freezer) keeps its lock, and so does the NFS client of a
machine without power until the server's lease ends. So the holder refreshes the file's time every
`REFRESH_S`. A start that finds the file locked, but not refreshed for `STALE_S`, takes the lock
over: a new file, already locked, replaces the old one. The age of a refresh is measured by the file
server's clock, against a file that was touched just now.

Promise: a process whose lock was taken over writes nothing more. It calls `check` before each
write, and a thread calls it after each refresh; `check` ends the process with exit code 75.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

from pipeline.errors import RequestError, TemporaryError
from pipeline.record.folder import RunFolder
from pipeline.streams import log

REFRESH_S = 5
STALE_S = 60
"""Seconds without a refresh after which a lock may be taken over."""


class Lock:
    """A lock file, held by this process, or by the one on whose behalf it writes."""

    def __init__(self, path: Path, subject: str, remedy: str) -> None:
        """subject: what the holder holds. remedy: what to do while it does. Both for messages."""
        self.path, self.subject, self.remedy = path, subject, remedy
        self._descriptor: int | None = None
        self._content: bytes | None = None  # the file's contents as long as nobody else takes the lock
        self._dropped = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, patience_s: float) -> bool:
        """Take the lock; return True if it was taken over from a holder that is frozen.

        Makes the folder. Raises TemporaryError if another process holds the lock for `patience_s`
        seconds, RequestError if there are no locks, OSError if the file cannot be written.
        """
        is_taken_over = False
        try:
            self._descriptor = self._open_locked(patience_s)
        except TemporaryError as held:
            self._descriptor, is_taken_over = self._take_over(held), True
        self._content = os.pread(self._descriptor, 1 << 16, 0)
        self._dropped.clear()
        self._thread = threading.Thread(target=self._refresh, name="lock", daemon=True)
        self._thread.start()
        return is_taken_over

    def drop(self) -> None:
        """Drop the lock if this process holds it."""
        if self._thread:
            self._dropped.set()
            self._thread.join()
            self._content = self._thread = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def is_held(self) -> bool:
        """Return True if another process holds the lock, False also if there are no locks here."""
        try:
            with open(self.path, "r+b", buffering=0) as file:
                return not lock(file.fileno(), 0)
        except OSError:
            return False

    def is_fresh(self) -> bool:
        """Return True if the holder has refreshed the lock lately, by the file server's clock."""
        with (
            contextlib.suppress(OSError),
            tempfile.TemporaryFile(dir=self.path.parent, prefix=".doctor-") as now,
        ):
            os.utime(now.fileno())
            return os.fstat(now.fileno()).st_mtime - os.stat(self.path).st_mtime < 3 * REFRESH_S
        return False

    def join_holder(self) -> None:
        """Remember the process that holds the lock now: this process writes on its behalf."""
        self._content = self._read() or None

    def is_ours(self) -> bool:
        """Return False if another process has taken the lock since `take` or `join_holder`.

        True if there is no file of that name: nobody can hold it without making one. False if the
        file cannot be read for another reason: it may belong to another process.
        """
        if self._content is None:
            return True
        try:
            if self._descriptor is None:
                return self.path.read_bytes() == self._content
            if not self._touch():  # asks the server: an NFS client may have old attributes
                return False
            named, held = os.stat(self.path), os.fstat(self._descriptor)
            # not by opening the file: closing that descriptor would drop the lock
            has_content = os.pread(self._descriptor, len(self._content) + 1, 0) == self._content
        except FileNotFoundError:
            return True
        except OSError:  # such as EIO: the NFS server has given the lock away; ESTALE: it has no such file
            return False
        return has_content and held.st_nlink > 0 and os.path.samestat(named, held)

    def check(self) -> None:
        """End this process with exit code 75 if another one has taken the lock from its holder."""
        if not self.is_ours():
            # the holder may open the file here: it exits, so it need not keep the lock
            is_other = self._read() not in (b"", self._content)
            lost = ": its lock was lost or cannot be read"
            problem = f" was taken over by {self.holder()}" if is_other else lost
            line = f"{self.subject}{problem}: this process writes nothing more and exits"
            print(f"pipeline: {line}", file=sys.stderr, flush=True)
            os._exit(TemporaryError.code)

    def _open_locked(self, patience_s: float) -> int:
        """Return a descriptor of the file, locked and with this process's name."""
        while True:
            self.path.parent.mkdir(parents=True, exist_ok=True)  # a start that fails may remove it meanwhile
            with contextlib.ExitStack() as undo:
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                undo.callback(os.close, descriptor)
                try:
                    is_locked = lock(descriptor, patience_s)
                except OSError as error:
                    problem = f"run.dir={self.path.parent} cannot be locked: {error.strerror}"
                    remedy = "give a folder on a file system with locks (NFS 4, CephFS, Lustre, a local disk)"
                    raise RequestError(problem, remedy) from None
                if not is_locked:
                    raise TemporaryError(f"{self.subject} is held by {self.holder()}", self.remedy)
                if has_name(descriptor, self.path):  # else it was removed or replaced meanwhile
                    _write_holder(descriptor)
                    undo.pop_all()
                    return descriptor

    def _take_over(self, held: TemporaryError) -> int:
        """Replace the file of a lock that is not refreshed, and return a locked descriptor.

        The new file is locked before it gets the name. Of several processes that try, one gets the
        lock of the new file, and the others give up. Raises `held`, or TemporaryError, if this one
        does, or if the lock is refreshed.
        """
        candidate = self.path.with_name(f".{self.path.name}.new")
        with contextlib.ExitStack() as undo:
            try:
                descriptor = os.open(candidate, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                undo.callback(os.close, descriptor)
                if not (lock(descriptor, 0) and has_name(descriptor, candidate)):
                    raise held
                undo.callback(candidate.unlink, missing_ok=True)
                holder = self.holder()
                os.utime(descriptor)
                age_s = max(0, round(os.fstat(descriptor).st_mtime - os.stat(self.path).st_mtime))
                if age_s < STALE_S:
                    raise TemporaryError(f"{held.problem}, last refreshed {age_s} s ago", self.remedy)
                _write_holder(descriptor)
                os.rename(candidate, self.path)
            except OSError as error:  # a full disk, for example
                raise TemporaryError(held.problem, f"{self.remedy} ({error.strerror})") from None
            undo.pop_all()
        log(f"took over {self.subject} from {holder}, last refreshed {age_s} s ago")
        return descriptor

    def _refresh(self) -> None:
        while not self._dropped.wait(REFRESH_S):
            self._touch()
            self.check()

    def _touch(self) -> bool:
        """Refresh the lock; return False if an NFS server says that its file has been replaced."""
        assert self._descriptor is not None
        try:
            os.utime(self._descriptor)  # not by name: that may be another process's file by now
        except OSError as error:
            return error.errno != errno.ESTALE
        return True

    def holder(self) -> str:
        """Return the holder's name, for messages. The holder itself must not call it."""
        # closing a descriptor of the file drops a lock of this process (POSIX)
        return self._read().partition(b"\n")[0].decode(errors="replace").strip() or "another process"

    def _read(self) -> bytes:
        with contextlib.suppress(OSError):
            return self.path.read_bytes()
        return b""


def _write_holder(descriptor: int) -> None:
    name = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{name}\n".encode(), 0)
    os.utime(descriptor)


def part_from_former_holder(folder: RunFolder) -> None:
    """Leave a frozen process, which may run again, no file of the folder that it has open."""
    for place in (folder.path, folder.report, folder.report / "data"):
        for path in place.glob(".*"):  # its temporary files; another machine measures the disk with .doctor-
            if not path.name.startswith((".doctor-", ".lock.", ".mlflow.lock.")) and not path.is_dir():
                with contextlib.suppress(OSError):  # of another process that writes at this moment
                    path.unlink()
    for path in (folder.journal, folder.trace, folder.sync_log):
        if path.exists():  # what it, or its NFS client, still appends goes to the old file
            with folder.replacing(path) as temporary:
                shutil.copyfile(path, temporary)
                with open(temporary, "rb") as copy:
                    os.fsync(copy.fileno())


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
