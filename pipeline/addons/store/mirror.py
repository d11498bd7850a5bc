"""A copy of a run in a bucket (`checkpoint.mirror`), from which a start on an empty disk resumes.

Promise: the mirror costs no step, and what it holds is true. A thread of rank 0 uploads: first the
records, so that the journal is never behind a checkpoint, then the checkpoints that are complete on
the disk. An object is there completely or not at all, and a checkpoint's digest is in its name, so
an upload that was cut off is never resumed from. Only the holder of the lease writes. A store that
is slow, refuses or is gone costs a warning for each save, and the next save tries again.

A rollback (run.resume=PATH) lists in `abandoned.json` the checkpoints that no longer count, before
its first step: deleting them may take long, or be refused. No torch here.
"""

import hashlib
import json
import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

from pipeline.addons.store.bucket import Store
from pipeline.addons.store.lease import Lease
from pipeline.addons.store.restore import (
    ABANDONED,
    CHECKPOINTS,
    compare,
    names_here,
    names_there,
    newest_step,
    records,
    step,
)
from pipeline.errors import RequestError, RunError, StorageError, TemporaryError
from pipeline.record.checkpoint_files import step_of
from pipeline.record.failure import FAILURE
from pipeline.record.folder import RunFolder

FINISH_S = 120
"""Seconds that the end of a run waits for a store that takes nothing."""
_RETRY_S = 5.0


class Mirror:
    """The mirror of one run, held by the process that trains it."""

    def __init__(self, store: Store, folder: RunFolder, log: Callable[[str], None]) -> None:
        self._store, self._folder, self._log = store, folder, log
        self._lease = Lease(store, _owner(folder))
        self._sent: dict[str, tuple[int, int, str]] = {}
        """Size, time of change and etag of each record when it was last uploaded."""
        self._there: set[str] = set()
        """Checkpoints that are known to be in the mirror."""
        self._abandoned: set[str] = set()
        """Checkpoints in the mirror that a rollback has discarded."""
        self._is_wanted = threading.Event()
        self._has_given_up = self._is_closed = False
        self._progress = 0.0
        """When the store last took something new, on the monotonic clock."""
        self._furthest: dict[str, int] = {}
        """Most bytes of each object that were sent since `close`: a repetition is no progress."""
        self._thread: threading.Thread | None = None
        self.error: Exception | None = None
        """Why the last upload failed, or None."""
        self.failures: list[str] = []
        """Why saves were not uploaded at once, for the journal."""
        self.uploaded: list[str] = []
        """Checkpoints that were uploaded, for the journal."""

    def open(self, resume: str, is_restart: Callable[[Path], bool]) -> None:
        """Take the lease, and bring this folder to the newer state of the two.

        resume: `run.resume`. is_restart: returns True if the last start in a journal applied it, so
        that this start continues the run. Raises TemporaryError if another process writes to the
        mirror, RequestError if what it holds would be lost: another run, or a run that is not
        resumed.
        """
        self._lease.take()
        try:
            with tempfile.TemporaryDirectory() as scratch:
                found = compare(self._store, self._folder, resume, is_restart, Path(scratch), self._log)
                self._there, self._abandoned = {*found.names, *found.abandoned}, found.abandoned
                if found.is_resumed:
                    found.restore()
            if self._lease.is_from_another_folder:  # it may have sent metrics that this journal lacks
                self._folder.delivered.unlink(missing_ok=True)
            with suppress(RunError):  # a right that a training can do without
                self._store.abort_uploads(CHECKPOINTS)  # not of other users of the bucket
        except BaseException:
            self._lease.drop(is_released=True)
            raise

    def start(self) -> None:
        """Upload what is new whenever `upload` is called, in a thread. No-op after `close`."""
        if not self._is_closed:
            self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
            self._thread.start()
            self.upload()

    def abandon_after(self, used: Path | None) -> None:
        """Record that checkpoints in the mirror count no more, unless they are older than `used`.

        used: the checkpoint that this start resumes from. Called before `start`. Raises OutageError
        if the store does not answer: without the record a restart would undo a rollback.
        """
        later = {name for name in self._there if not used or step(name) >= step_of(used)}
        self._set_abandoned((self._abandoned | later) - {used.name if used else ""})

    def upload(self) -> None:
        """Have the thread upload what is new. Returns at once."""
        self._is_wanted.set()

    def close(self, seconds_left: Callable[[], float | None] = lambda: None) -> None:
        """Upload what is new and give the lease back. Log what is missing after the timeout.

        seconds_left: the time until this process must end, or None. Without one, a store that takes
        nothing for `FINISH_S` is given up. May be called again.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._progress = time.monotonic()
        self._furthest.clear()
        self._is_wanted.set()
        while self._thread and self._thread.is_alive():
            left = seconds_left()
            if (self._progress + FINISH_S - time.monotonic() if left is None else left) <= 0:
                break
            self._thread.join(0.2)
        self._has_given_up = True
        self._is_wanted.set()
        if self._thread:
            self._thread.join(0.5)
        is_writing = self._thread is not None and self._thread.is_alive()
        if is_writing or self.error:
            newest = next(iter(names_here(self._folder)), None)
            missing = newest if newest and newest not in self._there else "the newest records"
            reason = f" ({_reason(self.error)})" if self.error else ""
            where = f"it is in {self._folder.path}: a start on this disk with run.resume=auto sends it"
            self._log(f"{self._store} lacks {missing}{reason}; {where}")
        self._lease.drop(is_released=not is_writing)

    def _run(self) -> None:
        while not self._has_given_up:
            self._is_wanted.wait(_RETRY_S if self.error else None)
            is_asked, is_last = self._is_wanted.is_set(), self._is_closed
            self._is_wanted.clear()
            try:
                self._upload()
                self.error = None
                if is_last:
                    return
            except Exception as error:  # whatever it is, training goes on without the mirror
                self.error = error
                if is_asked and not is_last:  # once a save, not at each attempt
                    why = _reason(error)
                    self.failures.append(why)
                    self._log(f"{self._store} was not updated: {why}; training continues, it is tried again")

    def _upload(self) -> None:
        with ExitStack() as stack:
            # opened first: a checkpoint that is saved meanwhile may be ahead of the records, and
            # one that a newer save replaces meanwhile can still be read
            here: dict[str, BinaryIO] = {}
            for name in names_here(self._folder):
                with suppress(FileNotFoundError, IsADirectoryError):
                    here[name] = stack.enter_context(open(self._folder.checkpoints / name, "rb"))
            for record in records(self._folder):
                with suppress(FileNotFoundError):
                    self._upload_record(record)
            if not (self._folder.path / FAILURE).exists():  # that of an earlier start
                self._delete(FAILURE)
            self._upload_checkpoints(here)

    def _upload_record(self, path: Path) -> None:
        status = path.stat()
        state = (status.st_size, status.st_mtime_ns)
        # a holder that was frozen in a write may have finished it after this process took over
        if self._sent.get(path.name) != (*state, self._etag(path.name)):
            self._send(path, path.name)
            self._sent[path.name] = (*state, self._etag(path.name))

    def _upload_checkpoints(self, here: dict[str, BinaryIO]) -> None:
        """Bring the checkpoints of the mirror to those of the folder, newest first."""
        there = names_there(self._store)
        self._there.update(there)
        # before one of them is sent: a run that repeats the same steps saves the same names again
        self._set_abandoned(self._abandoned.intersection(there).difference(here))
        for name, file in here.items():
            if name not in there:
                self._send(Path(f"/proc/self/fd/{file.fileno()}"), CHECKPOINTS + name)
                self._there.add(name)
                self.uploaded.append(name)
        replaced = [name for name in there if name not in here and step(name) <= newest_step(here)]
        for name in {*replaced, *self._abandoned}:
            self._delete(CHECKPOINTS + name)
        if there and not here and not self._abandoned.issuperset(there):  # the copy may be the only one
            raise StorageError(f"{self._folder.path} has lost its checkpoints: those in the mirror are kept")

    def _etag(self, name: str) -> str:
        found = self._store.head(name)
        return found.etag if found else ""

    def _set_abandoned(self, names: set[str]) -> None:
        if names != self._abandoned:
            self._check_may_write()
            self._store.write(ABANDONED, json.dumps(sorted(names)).encode())
            self._abandoned = names

    def _send(self, path: Path, name: str) -> None:
        sent = 0

        def note_progress(num_bytes: int) -> None:
            nonlocal sent
            sent += num_bytes
            if sent > self._furthest.get(name, 0):
                self._furthest[name], self._progress = sent, time.monotonic()

        self._check_may_write()
        self._store.upload(path, name, note_progress)
        self._progress = time.monotonic()

    def _delete(self, name: str) -> None:
        """Delete an object. Without the right to do that, the mirror grows."""
        self._check_may_write()
        with suppress(RequestError):
            self._store.delete(name)

    def _check_may_write(self) -> None:
        if self._has_given_up:
            raise StorageError("the time for it is over")
        self._lease.confirm()


def _reason(error: Exception) -> str:
    """Return the line of an error, without advice if training itself tries again."""
    return error.problem if isinstance(error, TemporaryError) else str(error)


def _owner(folder: RunFolder) -> str:
    """Return what identifies this folder as the owner of a lease, and no copy of it."""
    if not folder.mirror.exists():
        folder.write(folder.mirror, json.dumps({"owner": secrets.token_hex(8)}).encode())
    status = folder.mirror.stat()
    return hashlib.sha256(
        folder.mirror.read_bytes() + f"{status.st_dev} {status.st_ino}".encode()
    ).hexdigest()
