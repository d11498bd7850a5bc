"""A copy of a run in a bucket (`checkpoint.mirror`), from which a start on an empty disk resumes.

Promise: the mirror costs no step, and what it holds is true. A thread of rank 0 uploads: first the
records, so that the journal is never behind a checkpoint, then the checkpoints that are complete on
the disk. An object is there completely or not at all, and a checkpoint's digest is in its name, so
an upload that was cut off is never resumed from. Only the holder of the lease writes. A store that
is slow, refuses or is gone costs a warning for each save, and the next save tries again.

A rollback (run.resume=PATH) lists in `abandoned.json` the checkpoints that no longer count, before
its first step: deleting them may take long, or be refused. No torch here.
"""

import json
import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from pipeline.addons.deploy.restart import has_applied_resume
from pipeline.addons.store import restore
from pipeline.addons.store.bucket import Store
from pipeline.addons.store.lease import Lease, check_mirror
from pipeline.addons.store.restore import ABANDONED, CHECKPOINTS, Comparison
from pipeline.config.schema import Config
from pipeline.errors import RequestError, RunError, TemporaryError
from pipeline.operate.request import check_writable
from pipeline.record.checkpoint_files import step_of
from pipeline.record.failure import FAILURE
from pipeline.record.folder import RunFolder
from pipeline.record.terminal import make_terminal
from pipeline.train.listener import End, Listener, Start

FINISH_S = 120  # seconds that the end of a run waits for a store that takes nothing
_SLOWEST = 1 << 20  # bytes a second at which it takes an object, at least
_RETRY_S = 5.0


def open_mirror(config: Config, folder: RunFolder) -> "Mirror":
    """Take the run's folder and the lease of its mirror, and restore from the mirror what is newer.

    Comes before the checks, because they look at the run that is resumed. Raises TemporaryError if
    another process writes to the mirror, RequestError if what it holds would be lost: another run,
    or a run that is not resumed.
    """
    assert config.checkpoint.mirror
    check_writable(folder)
    store = Store(config.checkpoint.mirror)
    check_mirror(store)
    folder.hold()
    try:
        return Mirror(store, folder, config)
    except (OSError, RunError) as error:
        folder.release()
        raise (error if isinstance(error, RunError) else folder.write_error(error)) from None


class Mirror(Listener):
    """The mirror of one run, held by the process that trains it."""

    def __init__(self, store: Store, folder: RunFolder, config: Config) -> None:
        self._store, self._folder, self._log = store, folder, make_terminal(is_main=True).log
        # size and time of change of each record when it was last uploaded
        self._sent: dict[str, tuple[int, int]] = {}
        self._is_wanted = threading.Event()
        self._is_closed = False
        # when the store last took something, on the monotonic clock, and the time for the next
        self._progress = self._allowed_s = 0.0
        self._thread: threading.Thread | None = None
        self.error: Exception | None = None  # why the mirror is incomplete
        self.failures: list[str] = []  # why saves were not uploaded at once, since the journal's last look
        self.uploaded: list[str] = []  # names of the checkpoints that it has since then
        self._lease = Lease(store, _owner(folder))
        self._lease.take()
        try:
            with tempfile.TemporaryDirectory() as scratch:
                is_restart = partial(has_applied_resume, config)
                found = Comparison(store, folder, config.run.resume, is_restart, Path(scratch))
                self._abandoned = found.abandoned  # checkpoints in the mirror that do not count
                self._there = [*found.names, *found.abandoned]
                if found.is_resumed:
                    found.restore()
            if self._lease.is_from_another_folder:  # it may have sent metrics that this journal lacks
                folder.delivered.unlink(missing_ok=True)
        except BaseException:
            self._lease.drop(is_released=True)
            raise

    def announce(self) -> None:
        """Upload the journal, which has the run's id, before MLflow has a run with it."""
        with suppress(Exception):  # the thread tries again, and says why
            self._send(self._folder.journal, self._folder.journal.name)

    def start(self) -> None:
        """Upload what is new now and after each save, in a thread. No-op after `close`."""
        if not self._is_closed:
            self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
            self._thread.start()
            self._is_wanted.set()

    def started(self, start: Start) -> None:
        self.start()

    def saved(self, checkpoint: Path) -> None:
        self._is_wanted.set()

    def ended(self, end: End) -> None:
        if end.is_finished:  # before the others leave: if this node is lost later, nobody must start again
            self.close(end.seconds_left)
        self._is_wanted.set()  # otherwise while other listeners deliver

    def closed(self, end: End) -> None:
        self.close(end.seconds_left)

    def abandon_after(self, used: Path | None) -> None:
        """Record that checkpoints in the mirror count no more, unless they are older than `used`.

        used: the checkpoint that this start resumes from. Called before `start`. Raises RunError if
        the store does not take the record: a restart would undo a rollback.
        """
        later = {name for name in self._there if not used or restore.step(name) >= step_of(used)}
        self._set_abandoned((self._abandoned | later) - {used.name if used else ""})

    def close(self, seconds_left: Callable[[], float | None] = lambda: None) -> None:
        """Upload what is new and give the lease back. Log what is missing after the timeout.

        seconds_left: the time until this process must end, or None. Without one, a store that takes
        nothing for `FINISH_S` is given up. May be called again.
        """
        if self._is_closed:
            return
        self._progress = time.monotonic()
        self._is_closed = True
        self._is_wanted.set()
        is_writing = self._thread is not None
        while self._thread and is_writing:
            left = seconds_left()
            if left is None:
                left = self._progress + FINISH_S + self._allowed_s - time.monotonic()
            if left <= 0:
                break
            self._thread.join(0.2)
            is_writing = self._thread.is_alive()
        if is_writing and not self.error:
            self.error = TemporaryError("the time is over")
        if self.error:
            newest = restore.names_here(self._folder)[:1]
            missing = "the newest records" if set(newest) <= set(self._there) else newest[0]
            where = f"it is in {self._folder.path}: a start on this disk with run.resume=auto sends it"
            self._log(f"{self._store} lacks {missing} ({_reason(self.error)}); {where}")
        self._lease.drop(is_released=not is_writing)

    def _run(self) -> None:
        while not self._lease.dropped.is_set():
            self._is_wanted.wait(_RETRY_S if self.error else None)
            is_asked = self._is_wanted.is_set()
            self._is_wanted.clear()
            is_last = self._is_closed  # looked at last: `close` sets it before it wakes this thread
            if is_last and self._lease.is_from_another_folder:
                self._sent.clear()  # its holder may have been frozen in a write, and have finished it since
            try:
                self._upload()
                self.error = None
                if is_last:
                    return
            except Exception as error:  # whatever it is, training goes on without the mirror
                self.error = error
                if is_asked and not is_last:  # once a save, not at each attempt
                    self.failures.append(_reason(error))
                    tried = "training continues, it is tried again"
                    self._log(f"{self._store} was not updated: {_reason(error)}; {tried}")

    def _upload(self) -> None:
        with ExitStack() as stack:
            # opened first: a checkpoint that is saved meanwhile may be ahead of the records, and
            # one that a newer save replaces meanwhile can still be read
            here: dict[str, Path] = {}
            for name in restore.names_here(self._folder):
                with suppress(FileNotFoundError, IsADirectoryError):
                    file = stack.enter_context(open(self._folder.checkpoints / name, "rb"))
                    here[name] = Path(f"/proc/self/fd/{file.fileno()}")
            for record in restore.records(self._folder):
                with suppress(FileNotFoundError):
                    status = record.stat()
                    state = status.st_size, status.st_mtime_ns
                    if self._sent.get(record.name) != state:
                        self._send(record, record.name)
                        self._sent[record.name] = state
            if not (self._folder.path / FAILURE).exists():  # that of an earlier start
                self._delete(FAILURE)
            self._there = restore.names_there(self._store)
            # before one is sent: a run that repeats the same steps saves the same names again
            self._set_abandoned(self._abandoned.intersection(self._there).difference(here))
            for name, path in here.items():
                if name not in self._there:
                    self._send(path, CHECKPOINTS + name)
                    self._there.append(name)
                    self.uploaded.append(name)
            for name in self._there:  # a folder that lost its own keeps them: they may be the only ones
                is_replaced = name not in here and restore.step(name) <= restore.newest_step(here)
                if is_replaced or name in self._abandoned:  # last: others have taken their place by now
                    self._delete(CHECKPOINTS + name)

    def _send(self, path: Path, name: str) -> None:
        self._lease.confirm()
        self._allowed_s = path.stat().st_size / _SLOWEST
        try:
            self._store.upload(path, name)
            self._progress = time.monotonic()
        finally:
            self._allowed_s = 0.0

    def _delete(self, name: str) -> None:
        """Delete an object. Without the right to do that, the mirror grows."""
        self._lease.confirm()
        with suppress(RequestError):
            self._store.delete(name)

    def _set_abandoned(self, names: set[str]) -> None:
        if names != self._abandoned:
            self._lease.confirm()
            self._store.write(ABANDONED, json.dumps(sorted(names)).encode())
            self._abandoned = names


def _reason(error: Exception) -> str:
    """Return the line of an error, without advice if training itself tries again."""
    return error.problem if isinstance(error, TemporaryError) else str(error)


def _owner(folder: RunFolder) -> str:
    """Return what identifies this folder as the owner of a lease, and no copy of it."""
    if not folder.mirror.exists():
        folder.write(folder.mirror, json.dumps({"owner": secrets.token_hex(8)}).encode())
    status = folder.mirror.stat()
    return f"{folder.mirror.read_text(encoding='utf-8', errors='replace')} {status.st_dev} {status.st_ino}"
