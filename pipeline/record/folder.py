"""A run's folder: the paths in it, its lock, and how earlier files are set aside for a fresh start.

Promise: one run at a time writes here. The lock is a POSIX record lock: the kernel drops it when
its holder dies, however that happens, and forked loader workers do not inherit it. This module does
not import torch.
"""

import contextlib
import errno
import itertools
import os
import shutil
import socket
import time
from pathlib import Path

from pipeline.errors import RequestError, RunError, StorageError, TemporaryError
from pipeline.files import lock

_KEPT_AT_FRESH_START = ("lock", "mlflow.lock", "index", "gang-check")  # held locks, the data's index, checked nodes
_LOCK_PATIENCE_S = 2.0  # a holder that was just killed needs a moment to disappear


def lock_file(path: Path, descriptor: int, patience_s: float) -> bool:
    """Lock an open file; return False if another process holds it for `patience_s` seconds.

    Raises RequestError if its file system has no locks.
    """
    try:
        return lock(descriptor, patience_s)
    except OSError as error:
        raise RequestError(
            f"run.dir={path.parent} cannot be locked: {error.strerror}: give a folder on a file system with working"
            " locks (NFS 4, CephFS, Lustre, a local disk)"
        ) from None


class RunFolder:
    """The paths of a run's folder, and its lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.plan = path / "config.yaml", path / "plan.json"
        self.journal, self.trace = path / "journal.jsonl", path / "trace.jsonl"
        self.checkpoints = path / "checkpoints"
        self.receipt = path / "receipt.json"
        self.delivered = path / "mlflow.json"
        self.sync_log = path / "sync.log"
        self.report = path / "report"
        self._lock = path / "lock"
        self._held: int | None = None
        self._is_new = False

    def nearest_existing(self) -> Path:
        """Return the folder, or its nearest ancestor that exists."""
        return next(place for place in (self.path, *self.path.absolute().parents) if os.path.exists(place))

    def has_checkpoints(self) -> bool:
        """Return True if there is a file named like a checkpoint, verified or not."""
        return os.path.isdir(self.checkpoints) and any(self.checkpoints.glob("step-*.pt"))

    def advice_after_failure(self) -> str:
        """Return what the user can do after a start that failed permanently."""
        resume = f"resume with run.resume={self.path}"
        remedy = resume if self.has_checkpoints() else "start again with run.resume=never"
        return f"change the request or, once the cause is removed, {remedy}"

    def check_writable(self) -> None:
        """Raise RequestError if nothing can be written here. Creates nothing."""
        try:
            self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            pass  # what exists above it says whether it can be created
        except OSError as error:
            raise self.write_error(error) from None
        place = self.nearest_existing()
        if not place.is_dir():
            raise self._not_writable("a file is in its way")
        if not os.access(place, os.W_OK | os.X_OK):
            raise self._not_writable(f"{place} is read-only")

    def hold(self) -> None:
        """Take the lock, for as long as this process lives.

        Raises TemporaryError, which names the holder, if another process holds it; RequestError or
        StorageError if the folder cannot be written.
        """
        try:
            is_new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._held = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if not lock_file(self._lock, self._held, _LOCK_PATIENCE_S):
                holder = os.read(self._held, 200).decode(errors="replace").strip() or "another process"
                raise TemporaryError(
                    f"run.dir={self.path} is held by {holder}: wait for it, stop it, or give another run.dir"
                )
            if not os.fstat(self._held).st_nlink:  # while this process waited, `release` removed the folder
                self.release()
                return self.hold()
            self._is_new = is_new
            self.checkpoints.mkdir(exist_ok=True)
            own = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}\n"
            os.ftruncate(self._held, 0)
            os.write(self._held, own.encode())
        except OSError as error:
            self.release()
            raise self.write_error(error) from None
        except RunError:
            self.release()
            raise

    def release(self) -> None:
        """Drop the lock. Remove the folder if `hold` made it and it is still empty."""
        if self._held is None:
            return
        with contextlib.suppress(OSError):
            if self._is_new and {*os.listdir(self.path)} == {self._lock.name, self.checkpoints.name}:
                self.checkpoints.rmdir()
                self._lock.unlink()
                self.path.rmdir()
        os.close(self._held)
        self._held, self._is_new = None, False

    def is_held(self) -> bool:
        """Return True if another process holds the lock, False also if there are no locks here."""
        try:
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return not lock_file(self._lock, descriptor, 0)
        except RequestError:
            return False
        finally:
            os.close(descriptor)

    def set_aside(self) -> Path | None:
        """Move an earlier run's files into a new subfolder; return that, or None without files."""
        try:
            entries = (entry for entry in self.path.iterdir() if entry.name not in _KEPT_AT_FRESH_START)
            old = [entry for entry in entries if not entry.name.startswith("before-")]
            if not any(entry.name != "checkpoints" or any(entry.iterdir()) for entry in old):
                return None
            aside = self._new_aside()
            for entry in old:
                os.rename(entry, aside / entry.name)
            self.checkpoints.mkdir()
            return aside
        except OSError as error:
            raise self.write_error(error) from None

    def set_aside_checkpoints(self, paths: list[Path]) -> Path:
        """Move checkpoints into a new subfolder, and return that. Raises OSError."""
        aside = self._new_aside()
        for path in paths:
            os.rename(path, aside / path.name)
        return aside

    def remove_temporary_files(self) -> None:
        """Remove the temporary files of a writer that was killed."""
        for path in self.checkpoints.glob(".*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def write_error(self, error: OSError) -> RunError:
        """Return the error of a failed write: StorageError for a full disk, else RequestError."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StorageError(
                f"run.dir={self.path} cannot be written: {error.strerror}: make room, or give another folder with"
                " run.dir=FOLDER"
            )
        return self._not_writable(error.strerror or "unknown error")

    def _not_writable(self, why: str) -> RequestError:
        return RequestError(
            f"run.dir={self.path} cannot be written: {why}: give a folder that can be written, with run.dir=FOLDER"
        )

    def _new_aside(self) -> Path:
        stamp = time.strftime("before-%Y%m%d-%H%M%S")
        numbered = (f"{stamp}-{number}" if number else stamp for number in itertools.count())
        aside = next(self.path / name for name in numbered if not (self.path / name).exists())
        aside.mkdir()
        return aside
