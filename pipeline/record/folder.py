"""A run's folder: the paths in it, its lock, and writing to it.

Promise: one run at a time writes here. Rank 0 holds a lock (`addons.deploy.takeover`), and whatever
writes here uses `write`, or calls `check_ours` first. This module does not import torch.
"""

import itertools
import os
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.config.schema import Config
from pipeline.errors import RequestError, RunError, StorageError, storage_outage
from pipeline.files import FULL, replacing, write_synced
from pipeline.lazy import addon

_LOCK_PATIENCE_S = 2.0  # a holder that was just killed needs a moment to disappear


class RunFolder:
    """The paths of a run's folder, and its lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.plan = path / "plan.json"
        self.journal = path / "journal.jsonl"
        self.trace = path / "trace.jsonl"
        self.checkpoints = path / "checkpoints"
        self.receipt = path / "receipt.json"
        self.report = path / "report"
        self.delivered = path / "mlflow.json"
        self.sync_log = path / "sync.log"
        self.mirror = path / "mirror.json"
        """Identifies this folder to the lease of its mirror."""
        lock, sending = addon("deploy.takeover").Lock, path / "mlflow.lock"
        self.lock = lock(path / "lock", f"run.dir={path}", "wait for it, stop it, or give another run.dir")
        self.sender_lock = lock(sending, str(sending), "it sends the whole journal to MLflow, wait for it")
        self._is_new = False

    def has_checkpoints(self) -> bool:
        """Return True if there is a file named like a checkpoint, verified or not."""
        with suppress(OSError):
            return os.path.isdir(self.checkpoints) and any(self.checkpoints.glob("step-*.pt"))
        return False

    def contains(self, checkpoint: Path) -> bool:
        """Return True if the checkpoint is in this folder, by whatever path it is named."""
        return checkpoint.parent.resolve() == self.checkpoints.resolve()

    def advice_after_failure(self, config: Config) -> str:
        """Return what the user can do after a start of `config` that failed permanently."""
        remedy = config.start_again
        if self.has_checkpoints():
            remedy = f"resume with run.resume={shlex.quote(config.run.dir)}"
        return f"change the request or, once the cause is removed, {remedy}"

    def hold(self) -> None:
        """Take the lock, for as long as this process lives.

        Raises TemporaryError if another process holds it, or what `write_error` returns.
        """
        try:
            is_new = not self.path.exists()
            if self.lock.take(_LOCK_PATIENCE_S):
                addon("deploy.takeover").part_from_former_holder(self)
            self._is_new = is_new
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            self.release()
            raise self.write_error(error) from None

    def release(self) -> None:
        """Drop the lock. Remove the folder if `hold` made it and it is still empty."""
        made = [self.mirror, self.lock.path]
        with suppress(OSError):
            if self._is_new and {*self.path.iterdir()} <= {*made, self.checkpoints}:
                self.checkpoints.rmdir()
                for path in made:
                    path.unlink(missing_ok=True)
                self.path.rmdir()
        self.lock.drop()
        self._is_new = False

    def check_ours(self) -> None:
        """End this process with exit code 75 if another start has taken the folder over.

        Called before each write. Does nothing before `hold` or `lock.join_holder`.
        """
        self.lock.check()

    @contextmanager
    def replacing(self, path: Path) -> Iterator[Path]:
        """Do what `files.replacing` does, as long as the folder is ours."""
        self.check_ours()
        with replacing(path) as temporary:
            yield temporary
            self.check_ours()

    def write(self, path: Path, data: bytes | memoryview) -> None:
        """Replace a file of the folder by `data`, completely or not at all. Raises OSError."""
        with self.replacing(path) as temporary:
            write_synced(temporary, data)

    def set_aside_files(self, paths: list[Path]) -> Path:
        """Move files of this folder into a new subfolder, and return that. Raises OSError."""
        self.check_ours()
        stamp = time.strftime("before-%Y%m%d-%H%M%S")
        places = (self.path / (f"{stamp}-{number}" if number else stamp) for number in itertools.count())
        aside = next(place for place in places if not place.exists())
        aside.mkdir()
        for path in paths:
            os.rename(path, aside / path.name)
        return aside

    def remove_temporary_files(self) -> None:
        """Remove the temporary checkpoints of a writer that was killed or frozen."""
        self.check_ours()
        for path in self.checkpoints.glob(".*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def write_error(self, error: OSError) -> RunError:
        """Return the error of a failed read or write: a full disk, an outage or a wrong request."""
        if error.errno in FULL:
            problem = f"run.dir={self.path} cannot be written: {error.strerror}"
            return StorageError(problem, "make room, or give another folder with run.dir=FOLDER")
        return storage_outage(f"run.dir={self.path}", error) or self.not_writable(f"{error.strerror}")

    def not_writable(self, why: str) -> RequestError:
        """Return the error of a folder that cannot be written for a reason that stays."""
        problem = f"run.dir={self.path} cannot be written: {why}"
        return RequestError(problem, "give a folder that can be written, with run.dir=FOLDER")
