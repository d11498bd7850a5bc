"""A lock that shows if its holder is alive, and can be taken over from one that is not.

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
import os
import shutil
import sys
import threading
import time
from pathlib import Path

from pipeline.errors import TemporaryError
from pipeline.record.folder import RunFolder
from pipeline.record.lock import Lock, has_name, try_lock, write_holder
from pipeline.streams import log

REFRESH_S = 5
STALE_S = 60
"""Seconds without a refresh after which a lock may be taken over."""


class RefreshedLock(Lock):
    """A lock whose holder refreshes it, and exits once another process has it."""

    def __init__(self, path: Path, subject: str, remedy: str) -> None:
        super().__init__(path, subject, remedy)
        self._content: bytes | None = None
        """The file's contents as long as nobody else takes the lock."""
        self._refreshed_at = (0.0, 0.0)
        self._dropped = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, patience_s: float) -> bool:
        """Take the lock; return True if it was taken over from a holder that is frozen."""
        is_taken_over = False
        try:
            super().take(patience_s)
        except TemporaryError as held:
            self.descriptor, is_taken_over = self._take_over(held), True
        assert self.descriptor is not None
        self._content, self._refreshed_at = os.pread(self.descriptor, 1 << 16, 0), _read_clocks()
        self._dropped.clear()
        self._thread = threading.Thread(target=self._refresh, name="lock", daemon=True)
        self._thread.start()
        return is_taken_over

    def drop(self) -> None:
        if self._thread:
            self._dropped.set()
            self._thread.join()
            self._content = self._thread = None
        super().drop()

    def join_holder(self) -> None:
        self._content = self._read() or None

    def is_ours(self) -> bool:
        """Return False if another process has taken the lock since `take` or `join_holder`.

        True if there is no file of that name: nobody can hold it without making one. False if the
        file cannot be read for another reason: it may belong to another process.
        """
        if self._content is None:
            return True
        try:
            if self.descriptor is None:
                return self.path.read_bytes() == self._content
            # a process that was frozen asks the server: an NFS client may have old attributes
            age_s = max(now - then for now, then in zip(_read_clocks(), self._refreshed_at, strict=True))
            if age_s > 2 * REFRESH_S and not self._touch():
                return False
            named, held = os.stat(self.path), os.fstat(self.descriptor)
            # not by opening the file: closing that descriptor would drop the lock
            has_content = os.pread(self.descriptor, len(self._content) + 1, 0) == self._content
        except FileNotFoundError:
            return True
        except OSError:  # such as EIO: the NFS server has given the lock away; ESTALE: it has no such file
            return False
        return has_content and held.st_nlink > 0 and os.path.samestat(named, held)

    def check(self) -> None:
        if not self.is_ours():
            # the holder may open the file here: it exits, so it need not keep the lock
            is_other = self._read() not in (b"", self._content)
            problem = (
                f" was taken over by {self.holder()}" if is_other else ": its lock was lost or cannot be read"
            )
            line = f"{self.subject}{problem}: this process writes nothing more and exits"
            print(f"pipeline: {line}", file=sys.stderr, flush=True)
            os._exit(TemporaryError.code)

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
                if not (try_lock(candidate, descriptor, 0) and has_name(descriptor, candidate)):
                    raise held
                undo.callback(candidate.unlink, missing_ok=True)
                holder = self.holder()
                os.utime(descriptor)
                age_s = max(0, round(os.fstat(descriptor).st_mtime - os.stat(self.path).st_mtime))
                if age_s < STALE_S:
                    raise TemporaryError(f"{held.problem}, last refreshed {age_s} s ago", self.remedy)
                write_holder(descriptor)
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
        assert self.descriptor is not None
        now = _read_clocks()
        try:
            os.utime(self.descriptor)  # not by name: that may be another process's file by now
        except OSError as error:
            return error.errno != errno.ESTALE
        self._refreshed_at = now
        return True

    def _read(self) -> bytes:
        with contextlib.suppress(OSError):
            return self.path.read_bytes()
        return b""


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


def _read_clocks() -> tuple[float, float]:
    """Return the seconds of a clock that advances while the machine sleeps, and of the wall clock.

    Both stand still while a hypervisor pauses a virtual machine. The wall clock shows the pause
    once it is corrected, for example by NTP.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME), time.time()
