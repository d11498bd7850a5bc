"""A copy of a run in a bucket (`checkpoint.mirror`), from which a start on an empty disk resumes.

Promise: the mirror costs no step, and what it holds is true. A thread of rank 0 uploads: first the
records, so that the journal is never behind a checkpoint, then the checkpoints that are complete on
the disk. An object is there completely or not at all, and a checkpoint's digest is in its name, so
an upload that was cut off is never resumed from. Only the holder of the lease writes. A store that
is slow, refuses or is gone costs a warning for each save, and the next save tries again.

A start takes the newest checkpoint that verifies, here or in the mirror, and the journal that goes
with it: so the run continues under its id, as one MLflow run. A rollback (run.resume=PATH) lists in
`abandoned.json` the checkpoints that no longer count, before its first step: deleting them may take
long, or be refused. No torch here.
"""

import hashlib
import json
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pipeline.addons.store.bucket import MissingError, Store
from pipeline.addons.store.lease import Lease
from pipeline.errors import FAILURE, RequestError, RunError, StorageError, TemporaryError
from pipeline.files import parse_json
from pipeline.record.checkpoint_files import NAME, list_checkpoints, read_verified, step_of
from pipeline.record.folder import RunFolder
from pipeline.record.journal import Journal, last_event, run_id

FINISH_S = 120
"""Seconds that the end of a run waits for a store that takes nothing."""
_RETRY_S = 5.0
_CHECKPOINTS = "checkpoints/"
_ABANDONED = "abandoned.json"
_JOURNAL = "journal.jsonl"
_MAX_ABANDONED_BYTES = 1 << 20


class Mirror:
    """The mirror of one run, held by the process that trains it."""

    def __init__(
        self, store: Store, folder: RunFolder, log: Callable[[str], None], same_command: str = "the same command"
    ) -> None:
        """same_command: see `Config.same_command`."""
        self._store, self._folder, self._log, self._same_command = store, folder, log, same_command
        self._lease = Lease(store, _owner(folder))
        self._sent: dict[str, tuple[int, int, str]] = {}
        """Size, time of change and etag of each record when it was last uploaded."""
        self._there: set[str] = set()
        """Checkpoints that are known to be in the mirror."""
        self._abandoned: set[str] = set()
        """Checkpoints in the mirror that a rollback has discarded."""
        self._is_wanted = threading.Event()
        self._has_given_up = self._is_closed = False
        self._may_hold_failure = True
        """The mirror may hold the failure of an earlier start."""
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

    def __str__(self) -> str:
        return f"checkpoint.mirror={self._store}"

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
                found = _compare(self._store, self._folder, resume, is_restart, Path(scratch))
                self._there, self._abandoned = {*found.names, *found.abandoned}, found.abandoned
                if found.is_resumed:
                    self._restore(found)
            if self._lease.is_from_another_folder:  # it may have sent metrics that this journal lacks
                self._folder.delivered.unlink(missing_ok=True)
            with suppress(RunError):  # a right that a training can do without
                self._store.abort_uploads(_CHECKPOINTS)  # not of other users of the bucket
        except BaseException:
            self._lease.drop(is_released=True)
            raise

    def start(self) -> None:
        """Upload what is new whenever `upload` is called, in a thread. No-op after `close`."""
        if self._is_closed:
            return
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()
        self.upload()

    def abandon_after(self, used: Path | None) -> None:
        """Record that checkpoints in the mirror count no more, unless they are older than `used`.

        used: the checkpoint that this start resumes from. Called before `start`. Raises OutageError
        if the store does not answer: without the record a restart would undo a rollback.
        """
        later = {name for name in self._there if not used or step_of(Path(name)) >= step_of(used)}
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
            reason = f" ({_reason(self.error)})" if self.error else ""
            where = f"it is in {self._folder.path}: {self._same_command}, on this disk, sends it"
            self._log(f"{self._store} lacks {self._missing()}{reason}; {where}")
        self._lease.drop(is_released=not is_writing)

    # restoring

    def _restore(self, found: "_Found") -> None:
        """Download the records and checkpoints of the mirror if it is ahead.

        Nothing changes here before a checkpoint has verified. Then the records come first, and the
        newest checkpoint last: a restore that was killed is done again, for the same run and with
        its best model.
        """
        folder = self._folder
        with tempfile.TemporaryDirectory(dir=folder.checkpoints, prefix=".") as place:
            newest = _newest_verified(self._store, folder, found, Path(place), self._log)
            discarded = [path for path in list_checkpoints(folder.checkpoints) if not found.counts(path.name)]
            if discarded:
                self._log(f"set aside in {folder.set_aside_files(discarded)}: {self} was rolled back")
            if found.has_newer_records:
                folder.delivered.unlink(missing_ok=True)  # it counts bytes of the journal that is replaced
                for record in _records(folder):
                    with suppress(MissingError), folder.replacing(record) as temporary:
                        _download_record(self._store, record.name, temporary, newest)
                if newest is None and found.journal.exists():
                    self._log(f"{self} holds no complete checkpoint of its run: training begins at step 0")
            if newest is None or newest.parent == folder.checkpoints:
                return
            here = _names(folder)
            for name in reversed(found.names):
                is_older = name not in here and step_of(Path(name)) < step_of(newest)
                if is_older and _is_downloaded(self._store, name, Path(place), self._log):
                    self._place(Path(place) / name)
            self._place(newest)
        self._log(f"restored step {step_of(newest):,} from {self}")

    def _place(self, checkpoint: Path) -> None:
        self._folder.check_ours()
        os.replace(checkpoint, self._folder.checkpoints / checkpoint.name)

    # uploading

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
                    self.failures.append(_reason(error))
                    self._log(f"{self._store} was not updated: {_reason(error)}; training continues, it is tried again")

    def _upload(self) -> None:
        with ExitStack() as stack:
            # opened first: a checkpoint that is saved meanwhile may be ahead of the records, and
            # one that a newer save replaces meanwhile can still be read
            here = _open_checkpoints(self._folder, stack)
            for record in _records(self._folder):
                self._upload_record(record)
            self._upload_checkpoints(here)

    def _upload_checkpoints(self, here: dict[str, BinaryIO]) -> None:
        """Bring the checkpoints of the mirror to those of the folder, newest first."""
        there = _checkpoint_names(self._store)
        self._there.update(there)
        # before one of them is sent: a run that repeats the same steps saves the same names again
        self._set_abandoned(self._abandoned.intersection(there).difference(here))
        for name, file in here.items():
            if name not in there:
                self._send(Path(f"/proc/self/fd/{file.fileno()}"), _CHECKPOINTS + name)
                self._there.add(name)
                self.uploaded.append(name)
        newest = _newest_step(here)
        replaced = [name for name in there if name not in here and step_of(Path(name)) <= newest]
        for name in {*replaced, *self._abandoned}:
            self._delete(_CHECKPOINTS + name)
        if there and not here and not self._abandoned.issuperset(there):  # the copy may be the only one
            raise StorageError(f"{self._folder.path} has lost its checkpoints: those in the mirror are kept")
        has_failure = (self._folder.path / FAILURE).exists()
        if self._may_hold_failure and not has_failure:
            self._delete(FAILURE)
        self._may_hold_failure = has_failure

    def _upload_record(self, path: Path) -> None:
        try:
            status = path.stat()
        except FileNotFoundError:
            return
        state = (status.st_size, status.st_mtime_ns)
        # a holder that was frozen in a write may have finished it after this process took over
        if self._sent.get(path.name) != (*state, self._etag(path.name)):
            self._send(path, path.name)
            self._sent[path.name] = (*state, self._etag(path.name))

    def _etag(self, name: str) -> str:
        found = self._store.head(name)
        return found.etag if found else ""

    def _set_abandoned(self, names: set[str]) -> None:
        if names != self._abandoned:
            self._check_may_write()
            self._store.write(_ABANDONED, json.dumps(sorted(names)).encode())
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

    def _missing(self) -> str:
        """Return what the mirror lacks: the newest checkpoint, or only records."""
        newest = next(iter(_names(self._folder)), None)
        return newest if newest and newest not in self._there else "the newest records"


@dataclass(frozen=True)
class _Found:
    """Contents of a mirror, compared with a run's folder."""

    names: list[str]
    """Its checkpoints that count, newest first."""
    abandoned: set[str]
    """Its checkpoints that a rollback has discarded."""
    journal: Path
    """A copy of its journal, or the path of no file."""
    is_resumed: bool
    """This start continues the run, here or in the mirror."""
    has_newer_records: bool
    """The mirror's records replace those of the folder."""
    is_rolled_back: bool
    """The run was rolled back on another disk: what only this one has no longer counts."""

    def counts(self, name: str) -> bool:
        """Return True if a checkpoint of the folder may be resumed from."""
        return not self.is_rolled_back or name in self.names


def view(store: Store, folder: RunFolder, resume: str, scratch: Path, log: Callable[[str], None]) -> RunFolder:
    """Return the folder that a start here would resume.

    It is `folder`, unless it gets its newest checkpoint or its records from the mirror: then
    `scratch` gets these. Changes neither `folder` nor the mirror. Raises what `Mirror.open` does.
    """
    copy = RunFolder(scratch)
    try:
        copy.checkpoints.mkdir(parents=True)
        found = _compare(store, folder, resume, lambda _: False, scratch)
        newest = _newest_verified(store, folder, found, copy.checkpoints, log) if found.is_resumed else None
        if newest.parent == folder.checkpoints if newest else not found.has_newer_records:
            return folder
        for record in _records(copy):
            with suppress(MissingError):
                _download_record(store, record.name, record, newest)
        return copy if newest or any(record.exists() for record in _records(copy)) else folder
    except OSError as error:
        problem = f"{scratch} cannot be written: {error.strerror}"
        raise RequestError(problem, "set TMPDIR to a folder with room for a checkpoint") from None


def _compare(store: Store, folder: RunFolder, resume: str, is_restart: Callable[[Path], bool], scratch: Path) -> _Found:
    """Compare the mirror with a run's folder. `scratch` gets its journal.

    Raises RequestError if this start would replace a run, or later steps, in the mirror.
    """
    abandoned, journal = _abandoned_names(store), scratch / folder.journal.name
    names = [name for name in _checkpoint_names(store) if name not in abandoned]
    with suppress(MissingError):
        store.read_to(journal.name, journal)
    is_restarted_here = is_restart(folder.journal)
    is_restarted_elsewhere = not is_restarted_here and is_restart(journal)
    is_resumed = is_restarted_here or is_restarted_elsewhere
    is_resumed = is_resumed or resume == "auto" or Path(resume).absolute() == folder.path.absolute()
    is_newer = _newest_step(names) > _newest_step(_names(folder))
    here, there = run_id(folder.journal), run_id(journal)
    if journal.exists() and not (here == there or (is_resumed and not here)):
        problem = "holds another run" if here else f"holds a run, and run.resume={resume}"
    elif journal.exists() and not is_resumed and (resume == "never" or is_newer):
        step = "a run" if resume == "never" else f"a later step than {folder.path}"
        problem = f"holds {step}, and run.resume={resume}"
    else:
        has_newer = is_newer or is_restarted_elsewhere or not folder.journal.exists()
        return _Found(names, abandoned, journal, is_resumed, is_resumed and has_newer, is_restarted_elsewhere)
    raise RequestError(f"checkpoint.mirror={store} {problem}", "give another prefix, or remove what it holds")


def _newest_verified(
    store: Store, folder: RunFolder, found: _Found, target: Path, log: Callable[[str], None]
) -> Path | None:
    """Return the newest checkpoint that verifies, in `folder` or downloaded to `target`, or None.

    Raises StorageError if the mirror has checkpoints, or had one by its journal, and none verifies.
    """
    here, there = list(filter(found.counts, _names(folder))), found.names
    for name in _newest_first({*here, *there}):
        path = folder.checkpoints / name
        try:
            if name in here and read_verified(path):
                return path
        except StorageError as error:
            log(f"{error}; looking for another")
        if name in there and _is_downloaded(store, name, target, log):
            return target / name
    if set(there) - set(_checkpoint_names(store)):
        raise TemporaryError(f"checkpoint.mirror={store} has changed meanwhile", "give the same command again")
    known = None if here else last_event(found.journal, "mirrored").get("checkpoint")
    if there:
        problem = f"no checkpoint in checkpoint.mirror={store} verifies"
    elif known:
        problem = f"checkpoint.mirror={store} holds no checkpoint, and its journal names {known}"
    else:
        return None
    raise StorageError(
        problem, "restore one from a copy, or start again with run.resume=never and another checkpoint.mirror"
    )


def _is_downloaded(store: Store, name: str, target: Path, log: Callable[[str], None]) -> bool:
    """Download a checkpoint to the folder `target`; return False if it is damaged or gone."""
    path = target / name
    try:
        store.read_to(_CHECKPOINTS + name, path)
    except MissingError as error:
        log(f"{error}; looking for another")
        return False
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest.startswith(name.split(".")[1]):
        return True
    log(f"{store}/{_CHECKPOINTS}{name} is damaged: its SHA-256 begins {digest[:16]}; looking for another")
    path.unlink()
    return False


def _download_record(store: Store, name: str, path: Path, newest: Path | None) -> None:
    """Download a record. Raises MissingError.

    newest: the checkpoint that goes with it. Without one, the journal gets the event `restored`:
    the checkpoints that it names before were never uploaded completely.
    """
    store.read_to(name, path)
    if name == _JOURNAL and newest is None:
        Journal(path, lambda _: None).log_event("restored")


def _open_checkpoints(folder: RunFolder, stack: ExitStack) -> dict[str, BinaryIO]:
    """Return the checkpoints in a folder by name, newest first. `stack` closes them."""
    files: dict[str, BinaryIO] = {}
    with suppress(FileNotFoundError):  # the folder
        for name in _newest_first(path.name for path in folder.checkpoints.iterdir()):
            with suppress(FileNotFoundError, IsADirectoryError):  # a newer save has replaced it
                files[name] = stack.enter_context(open(folder.checkpoints / name, "rb"))  # noqa: SIM115
    return files


def _records(folder: RunFolder) -> list[Path]:
    """Return the files that go with the checkpoints. The journal is the last to be restored."""
    return [folder.config, folder.plan, folder.receipt, folder.trace, folder.path / FAILURE, folder.journal]


def _checkpoint_names(store: Store) -> list[str]:
    """Return the names of the checkpoints in the mirror, newest first."""
    entries = sorted(store.list(_CHECKPOINTS), key=lambda entry: entry.modified, reverse=True)
    return _newest_first(entry.name.removeprefix(_CHECKPOINTS) for entry in entries)


def _reason(error: Exception) -> str:
    """Return the line of an error, without advice if training itself tries again."""
    return error.problem if isinstance(error, TemporaryError) else str(error)


def _newest_step(names: Iterable[str]) -> int:
    """Return the latest step of these checkpoints, or -1 if there are none."""
    return max((step_of(Path(name)) for name in names), default=-1)


def _names(folder: RunFolder) -> list[str]:
    """Return the names of the checkpoints in a folder, newest first."""
    return [path.name for path in list_checkpoints(folder.checkpoints)]


def _newest_first(names: Iterable[str]) -> list[str]:
    return sorted(filter(NAME.fullmatch, names), key=lambda name: step_of(Path(name)), reverse=True)


def _abandoned_names(store: Store) -> set[str]:
    """Return the names of the checkpoints in the mirror that a rollback has discarded."""
    try:
        names = parse_json(store.read(_ABANDONED, _MAX_ABANDONED_BYTES))
        return {name for name in names if NAME.fullmatch(name)}
    except MissingError:
        return set()
    except (ValueError, TypeError):
        raise StorageError(f"{store}/{_ABANDONED} is not a list of checkpoints", "restore it from a copy") from None


def _owner(folder: RunFolder) -> str:
    """Return what identifies this folder as the owner of a lease, and no copy of it."""
    if not folder.mirror.exists():
        data = json.dumps({"owner": secrets.token_hex(8)}).encode()
        folder.write(folder.mirror, data)
    status = folder.mirror.stat()
    return hashlib.sha256(folder.mirror.read_bytes() + f"{status.st_dev} {status.st_ino}".encode()).hexdigest()
