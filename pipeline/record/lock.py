"""A lock file that shows if its holder is alive, and can be taken over from one that is not.

The lock is a POSIX record lock: the kernel drops it when its holder dies, however that happens, and
forked loader workers do not inherit it. But a frozen process (SIGSTOP, a cgroup's freezer) keeps
it, and so does the NFS client of a machine without power until the server's lease ends. So the
holder refreshes the file's time every `REFRESH_S`. A start that finds the file locked, but not
refreshed for `STALE_S`, takes the lock over: a new file, already locked, replaces the old one. The
age of a refresh is measured by the file server's clock, against a file that was touched just now.

Promise: a process whose lock was taken over writes nothing more. It calls `check` before each
write, and a thread calls it after each refresh; `check` ends the process with exit code 75.
"""

import contextlib
import errno
import os
import socket
import sys
import threading
import time
from pathlib import Path

from pipeline.errors import RequestError, TemporaryError
from pipeline.files import lock
from pipeline.streams import log

REFRESH_S = 5
STALE_S = 60
"""Seconds without a refresh after which a lock may be taken over."""


class HeldLock:
    """A lock file, held by this process or by the one on whose behalf it writes."""

    def __init__(self, path: Path, subject: str, remedy: str) -> None:
        """subject: what the holder holds. remedy: what to do while it does. Both for messages."""
        self._path, self._subject, self._remedy = path, subject, remedy
        self._descriptor: int | None = None
        self._content: bytes | None = None
        """The file's contents as long as nobody else takes the lock."""
        self._refreshed_at = (0.0, 0.0)
        self._dropped = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, patience_s: float) -> bool:
        """Take the lock; return True if it was taken over from a holder that does not refresh it.

        Makes the folder. Raises TemporaryError if another process holds the lock for `patience_s`
        seconds and refreshes it, RequestError if the file system has no locks, OSError if the file
        cannot be written.
        """
        holder = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}"
        content = f"{holder}\nrefreshed every {REFRESH_S} s\n".encode()
        descriptor = self._acquire(content, patience_s)
        is_taken_over = descriptor is None
        self._descriptor = self._take_over(content) if descriptor is None else descriptor
        self._content, self._refreshed_at = content, _read_clocks()
        self._dropped.clear()
        self._thread = threading.Thread(target=self._refresh, name="lock", daemon=True)
        self._thread.start()
        return is_taken_over

    def drop(self) -> None:
        """Drop the lock if this process holds it."""
        if self._descriptor is None:
            return
        self._dropped.set()
        if self._thread:
            self._thread.join()
        os.close(self._descriptor)
        self._descriptor = self._content = self._thread = None

    def join_holder(self) -> None:
        """Remember the process that holds the lock now: this process writes on its behalf."""
        self._content = self._read() or None

    def is_held(self) -> bool:
        """Return True if another process holds the lock, False also if there are no locks here."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return not _lock_file(self._path, descriptor, 0)
        except RequestError:
            return False
        finally:
            os.close(descriptor)

    def is_ours(self) -> bool:
        """Return False if another process has taken the lock since `take` or `join_holder`.

        True if there is no file of that name: nobody can hold it without making one. False if the
        file cannot be read for another reason: it may belong to another process.
        """
        if self._content is None:
            return True
        if self._descriptor is None:
            try:
                return self._path.read_bytes() == self._content
            except FileNotFoundError:
                return True
            except OSError:
                return False
        # a process that was frozen asks the server: an NFS client may have old attributes
        is_replaced = self._seconds_since_refresh() > 2 * REFRESH_S and not self._touch()
        try:
            named = os.stat(self._path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        try:  # not by opening the file: closing that descriptor would drop the lock
            held = os.fstat(self._descriptor)
            has_content = os.pread(self._descriptor, len(self._content) + 1, 0) == self._content
        except OSError:  # the NFS server has given the lock away (EIO) or has no such file any more (ESTALE)
            return False
        return not is_replaced and has_content and held.st_nlink > 0 and os.path.samestat(named, held)

    def check(self) -> None:
        """End this process with exit code 75 if another one has taken the lock over."""
        if not self.is_ours():
            # the holder may open the file here: it exits, so it need not keep the lock
            is_other = self._read() not in (b"", self._content)
            problem = f" was taken over by {self._holder()}" if is_other else ": its lock was lost or cannot be read"
            line = f"{self._subject}{problem}: this process writes nothing more and exits"
            print(f"pipeline: {line}", file=sys.stderr, flush=True)
            os._exit(TemporaryError.code)

    def _acquire(self, content: bytes, patience_s: float) -> int | None:
        """Return a locked descriptor of the file, or None if another process holds the lock."""
        while True:
            self._path.parent.mkdir(parents=True, exist_ok=True)  # a start that fails removes the folder that it made
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                is_locked = _lock_file(self._path, descriptor, patience_s)
                if is_locked and _has_name(descriptor, self._path):  # it may have been removed or replaced meanwhile
                    _write(descriptor, content)
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            if not is_locked:
                return None

    def _take_over(self, content: bytes) -> int:
        """Replace the file of a lock that is not refreshed, and return a locked descriptor.

        The new file is locked before it gets the name. Of several processes that try, one gets the
        lock of the new file, and the others give up. Raises TemporaryError if this one does, or if
        the lock is refreshed.
        """
        problem = f"{self._subject} is held by {self._holder()}"
        candidate = self._path.with_name(f".{self._path.name}.new")
        try:
            descriptor = os.open(candidate, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:  # a full disk, for example
            raise TemporaryError(problem, f"{self._remedy} ({error.strerror})") from None
        if not (_lock_file(candidate, descriptor, 0) and _has_name(descriptor, candidate)):
            os.close(descriptor)
            raise TemporaryError(problem, self._remedy)
        try:
            holder = self._holder()
            os.utime(descriptor)
            age_s = max(0, round(os.fstat(descriptor).st_mtime - os.stat(self._path).st_mtime))
            if age_s < STALE_S:
                raise TemporaryError(f"{problem}, last refreshed {age_s} s ago", self._remedy)
            _write(descriptor, content)
            os.rename(candidate, self._path)
        except BaseException as error:
            candidate.unlink(missing_ok=True)
            os.close(descriptor)
            if isinstance(error, OSError):
                raise TemporaryError(problem, f"{self._remedy} ({error.strerror})") from None
            raise
        line = f"took over {self._subject} from {holder}, last refreshed {age_s} s ago"
        log(line)
        return descriptor

    def _refresh(self) -> None:
        while not self._dropped.wait(REFRESH_S):
            self._touch()
            self.check()

    def _touch(self) -> bool:
        """Refresh the lock; return False if an NFS server says that its file has been replaced."""
        assert self._descriptor is not None
        now = _read_clocks()
        try:
            os.utime(self._descriptor)  # not by name: that may be another process's file by now
        except OSError as error:
            return error.errno != errno.ESTALE
        self._refreshed_at = now
        return True

    def _seconds_since_refresh(self) -> float:
        return max(now - then for now, then in zip(_read_clocks(), self._refreshed_at, strict=True))

    def _read(self) -> bytes:
        """Return the file's contents, or b"". The holder must not: closing it drops the lock."""
        with contextlib.suppress(OSError):
            return self._path.read_bytes()
        return b""

    def _holder(self) -> str:
        return self._read().decode(errors="replace").partition("\n")[0].strip() or "another process"


def _lock_file(path: Path, descriptor: int, patience_s: float) -> bool:
    """Lock an open file; return False if another process holds it for `patience_s` seconds.

    Raises RequestError if its file system has no locks.
    """
    try:
        return lock(descriptor, patience_s)
    except OSError as error:
        raise RequestError(
            f"run.dir={path.parent} cannot be locked: {error.strerror}",
            "give a folder on a file system with working locks (NFS 4, CephFS, Lustre, a local disk)",
        ) from None


def _has_name(descriptor: int, path: Path) -> bool:
    """Return True if `path` is the name of the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _write(descriptor: int, content: bytes) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, content, 0)
    os.utime(descriptor)


def _read_clocks() -> tuple[float, float]:
    """Return the seconds of a clock that advances while the machine sleeps, and of the wall clock.

    Both stand still while a hypervisor pauses a virtual machine. The wall clock shows the pause
    once it is corrected, for example by NTP.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME), time.time()
