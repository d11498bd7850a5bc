"""A run's folder: the paths in it, its lock, and how earlier files are set aside for a fresh start.

Promise: one run at a time writes here. Rank 0 holds the lock (`record.lock`), and whatever writes
here uses `write`, or calls `check_ours` first. This module does not import torch.
"""

import contextlib
import itertools
import os
import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline.config.schema import Config
from pipeline.data.access import storage_outage
from pipeline.errors import RequestError, RunError, StorageError
from pipeline.files import FULL, replacing
from pipeline.record.checkpoint_files import list_checkpoints, step_of
from pipeline.record.lock import HeldLock

_LOCK, _SENDER_LOCK = "lock", "mlflow.lock"
_LOCKS = (_LOCK, _SENDER_LOCK, f".{_LOCK}.new", f".{_SENDER_LOCK}.new")
_MIRROR = "mirror.json"
_KEPT_AT_FRESH_START = (*_LOCKS, _MIRROR, "index")  # held locks, the data's index
SPEED_TEST_PREFIX = ".doctor-"
"""Start of the name of a temporary file with which a machine measures the disk."""
STARTED_BY_RUN = "PIPELINE_STARTED_BY_RUN"
"""Environment variable of `pipeline report` if a run starts it: it then writes for that run."""
_LOCK_PATIENCE_S = 2.0  # a holder that was just killed needs a moment to disappear


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
        self.mirror = path / _MIRROR
        """Identifies this folder to the lease of its mirror."""
        self._lock = HeldLock(path / _LOCK, f"run.dir={path}", "wait for it, stop it, or give another run.dir")
        self.sender_lock = HeldLock(
            path / _SENDER_LOCK, str(path / _SENDER_LOCK), "it sends the whole journal to MLflow, wait for it"
        )
        self._is_new = False

    def nearest_existing(self) -> Path:
        """Return the folder, or its nearest ancestor that exists."""
        return next(place for place in (self.path, *self.path.absolute().parents) if os.path.exists(place))

    def has_checkpoints(self) -> bool:
        """Return True if there is a file named like a checkpoint, verified or not."""
        return os.path.isdir(self.checkpoints) and any(self.checkpoints.glob("step-*.pt"))

    def contains(self, checkpoint: Path) -> bool:
        """Return True if the checkpoint is in this folder, by whatever path it is named."""
        return checkpoint.parent.resolve() == self.checkpoints.resolve()

    def checkpoint_of_step(self, step: int) -> Path | None:
        """Return the newest checkpoint of that step, or None."""
        return next((path for path in list_checkpoints(self.checkpoints) if step_of(path) == step), None)

    def advice_after_failure(self, error: RunError, config: Config) -> str:
        """Return what the user can do after a start of `config` that failed permanently."""
        remedy = config.start_again
        if self.has_checkpoints():
            remedy = f"resume with run.resume={shlex.quote(config.run.dir)}"
            if error.code == StorageError.code:  # a checkpoint is of images of the same sizes
                remedy += f"; if that changed the size of an image, {config.start_again}"
        return f"change the request or, once the cause is removed, {remedy}"

    def check_writable(self) -> None:
        """Raise RequestError if nothing can be written here. Creates nothing.

        Raises TemporaryError if the storage is out of reach.
        """
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
        """Take the lock, for as long as this process lives, also from a holder that is frozen.

        Raises TemporaryError, which names the holder, if another process holds it; what
        `write_error` returns if the folder cannot be written.
        """
        try:
            is_new = not self.path.exists()
            if self._lock.take(_LOCK_PATIENCE_S):
                self._remove_hidden_files()
                self._copy_open_files()
            self._is_new = is_new
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            self.release()
            raise self.write_error(error) from None
        except RunError:
            self.release()
            raise

    def release(self) -> None:
        """Drop the lock. Remove the folder if `hold` made it and it is still empty."""
        with contextlib.suppress(OSError):
            if self._is_new and {*os.listdir(self.path)} <= {_LOCK, _MIRROR, self.checkpoints.name}:
                self.checkpoints.rmdir()
                for name in (_MIRROR, _LOCK):
                    (self.path / name).unlink(missing_ok=True)
                self.path.rmdir()
        self._lock.drop()
        self._is_new = False

    def is_held(self) -> bool:
        """Return True if another process holds the lock, False also if there are no locks here."""
        return self._lock.is_held()

    def join_holder(self) -> None:
        """Remember the process that holds the lock now: this process writes on its behalf."""
        self._lock.join_holder()

    def check_ours(self) -> None:
        """End this process with exit code 75 if another start has taken the folder over.

        Called before each write. Does nothing before `hold` or `join_holder`.
        """
        self._lock.check()

    @contextlib.contextmanager
    def replacing(self, path: Path) -> Iterator[Path]:
        """Do what `files.replacing` does, as long as the folder is ours (see `check_ours`)."""
        self.check_ours()
        with replacing(path) as temporary:
            yield temporary
            self.check_ours()

    def write(self, path: Path, data: bytes) -> None:
        """Replace a file of the folder by `data`, completely or not at all, if the folder is ours.

        Raises OSError.
        """
        with self.replacing(path) as temporary, open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def set_aside(self) -> Path | None:
        """Move an earlier run's files into a new subfolder; return that, or None without files."""
        self.check_ours()
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
        self.check_ours()
        aside = self._new_aside()
        for path in paths:
            os.rename(path, aside / path.name)
        return aside

    def remove_temporary_files(self) -> None:
        """Remove the temporary checkpoints of a writer that was killed or frozen."""
        self.check_ours()
        for path in self.checkpoints.glob(".*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def write_error(self, error: OSError) -> RunError:
        """Return the error of a failed read or write.

        StorageError for a full disk, TemporaryError if the storage is out of reach, else
        RequestError.
        """
        if error.errno in FULL:
            return StorageError(
                f"run.dir={self.path} cannot be written: {error.strerror}",
                "make room, or give another folder with run.dir=FOLDER",
            )
        return storage_outage(f"run.dir={self.path}", error) or self._not_writable(error.strerror or "unknown error")

    def _not_writable(self, why: str) -> RequestError:
        return RequestError(
            f"run.dir={self.path} cannot be written: {why}", "give a folder that can be written, with run.dir=FOLDER"
        )

    def _remove_hidden_files(self) -> None:
        """Remove the temporary files of a frozen process, which may still write to them."""
        for folder in (self.path, self.report, self.report / "data"):
            for path in folder.glob(".*"):
                is_in_use = path.name in _LOCKS or path.name.startswith(SPEED_TEST_PREFIX)
                if not is_in_use and not path.is_dir():
                    with contextlib.suppress(OSError):  # of another process that writes at this moment
                        path.unlink()

    def _copy_open_files(self) -> None:
        """Replace the files that a frozen process appends to by copies.

        What it, or its NFS client, still writes goes to the old file.
        """
        for path in (self.journal, self.trace, self.sync_log):
            if path.exists():
                with self.replacing(path) as temporary:
                    shutil.copyfile(path, temporary)
                    with open(temporary, "rb") as copy:
                        os.fsync(copy.fileno())

    def _new_aside(self) -> Path:
        stamp = time.strftime("before-%Y%m%d-%H%M%S")
        numbered = (f"{stamp}-{number}" if number else stamp for number in itertools.count())
        aside = next(self.path / name for name in numbered if not (self.path / name).exists())
        aside.mkdir()
        return aside
