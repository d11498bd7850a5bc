"""A copy of a run in a bucket (`checkpoint.mirror`), from which a start on an empty disk resumes.

Promise: the mirror costs no step, and what it holds is true. A thread of rank 0 uploads: first the
records, so that the journal is never behind a checkpoint, then the checkpoints that are complete on
the disk. An object is there completely or not at all, and a checkpoint's digest is in its name, so
an upload that was cut off is never resumed from. Only the holder of the lease writes. A store that
is slow, refuses or is gone costs a warning for each save, and the next save tries again.

A start takes the newest checkpoint that verifies, here or in the mirror, and the journal that goes
with it: so the run continues under its id, as one MLflow run. No torch here.
"""

import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from pipeline.data.store import ConflictError, MissingError, Store
from pipeline.errors import FAILURE, RequestError, RunError, StorageError
from pipeline.files import atomic_write, replacing
from pipeline.record.checkpoint_files import NAME, list_checkpoints, read_verified, step_of
from pipeline.record.folder import RunFolder
from pipeline.record.journal import read
from pipeline.record.lease import Lease

FINISH_S = 120
"""Seconds that the end of a run waits for a store that takes nothing."""
_RETRY_S = 5.0
_CHECKPOINTS = "checkpoints/"


class Mirror:
    """The mirror of one run, held by the process that trains it."""

    def __init__(self, store: Store, folder: RunFolder, log: Callable[[str], None]) -> None:
        self._store, self._folder, self._log = store, folder, log
        self._lease = Lease(store, _owner(folder))
        self._sent: dict[str, tuple[int, int]] = {}
        """Size and time of change of each record when it was last uploaded."""
        self._there: set[str] = set()
        """Checkpoints that are known to be in the mirror."""
        self._is_wanted = threading.Event()
        self._is_over = self._has_given_up = self._is_closed = False
        self._may_hold_failure = True
        """The mirror may hold the failure of an earlier start."""
        self._progress = 0.0
        """When the store last took something, on the monotonic clock."""
        self._thread: threading.Thread | None = None
        self.error: Exception | None = None
        """Why the last upload failed, or None."""
        self.failures: list[str] = []
        """Why saves were not uploaded at once, for the journal."""

    def __str__(self) -> str:
        return f"checkpoint.mirror={self._store}"

    def open(self, resume: str) -> None:
        """Take the lease, and bring this folder to the newer state of the two.

        resume: `run.resume`. Raises TemporaryError if another process writes to the mirror,
        RequestError if what it holds would be lost: another run, or a run that is not resumed.
        """
        self._lease.take()
        try:
            resumes = resume == "auto" or Path(resume).absolute() == self._folder.path.absolute()
            self._refuse_loss(resume, resumes=resumes)
            if resumes:
                self._restore()
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
        self._is_closed = self._is_over = True
        self._progress = time.monotonic()
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
            where = f"it is in {self._folder.path}: the same command on this disk sends it"
            self._log(f"{self._store} lacks {self._missing()}{reason}; {where}")
        self._lease.drop(is_released=not is_writing)

    # restoring

    def _refuse_loss(self, resume: str, *, resumes: bool) -> None:
        """Raise RequestError if this start would replace a run, or later steps, in the mirror."""
        try:
            there = _run_id(next(self._store.stream("journal.jsonl"), b""))
        except MissingError:
            return
        except ConflictError as error:
            raise RequestError(f"{self} is written by a process without the lease: stop it ({error})") from None
        here = next((row["run"] for row, _ in read(self._folder.journal) if "run" in row), None)
        if here != there and (here or not resumes):
            problem = f"{self} holds another run" if here else f"{self} holds a run, and run.resume={resume}"
        elif resume == "never":
            problem = f"{self} holds a run, and run.resume={resume}"
        elif not resumes and _is_newer(_checkpoint_names(self._store), _names(self._folder)):
            problem = f"{self} holds a later step than {self._folder.path}, and run.resume={resume}"
        else:
            return
        raise RequestError(f"{problem}: give another prefix, or remove what it holds")

    def _restore(self) -> None:
        """Download the records and checkpoints of the mirror if it is ahead.

        The records come first, and the newest checkpoint last: a restore that was killed is done
        again, for the same run and with its best model.
        """
        here, there = _names(self._folder), _checkpoint_names(self._store)
        is_newer = _is_newer(there, here)
        if is_newer or not self._folder.journal.exists():
            self._folder.delivered.unlink(missing_ok=True)  # it counts bytes of the journal that is replaced
            for record in _records(self._folder):
                with suppress(MissingError), replacing(record, check=self._folder.check_ours) as temporary:
                    self._store.read_to(record.name, temporary)
        if is_newer:
            for name in reversed(there):
                if name not in here:
                    self._download(name)
        for name in _newest_first({*here, *there}):
            if self._verifies(name) or (name in there and self._download(name)):
                if is_newer:
                    self._log(f"restored step {step_of(Path(name)):,} from {self}")
                return
        if there:
            raise StorageError(f"no checkpoint in {self} verifies: restore one from a copy, or give another prefix")

    def _verifies(self, name: str) -> bool:
        path = self._folder.checkpoints / name
        try:
            return path.exists() and bool(read_verified(path))
        except StorageError as error:
            self._log(f"{error}; looking for another")
            return False

    def _download(self, name: str) -> bool:
        """Download a checkpoint; return False if it is damaged or gone."""
        try:
            with replacing(self._folder.checkpoints / name, check=self._folder.check_ours) as temporary:
                self._store.read_to(_CHECKPOINTS + name, temporary)
                with open(temporary, "rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                if not digest.startswith(name.split(".")[1]):
                    place = f"{self._store}/{_CHECKPOINTS}{name}"
                    raise StorageError(f"{place} is damaged: its SHA-256 begins {digest[:16]}")
        except (StorageError, MissingError) as error:
            self._log(f"{error}; looking for another")
            return False
        return True

    # uploading

    def _run(self) -> None:
        while not self._has_given_up:
            self._is_wanted.wait(_RETRY_S if self.error else None)
            is_asked, is_last = self._is_wanted.is_set(), self._is_over
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
        # listed first: a checkpoint that is saved meanwhile may be ahead of the records
        here = [path.name for path in list_checkpoints(self._folder.checkpoints) if path.is_file()]
        for record in _records(self._folder):
            self._upload_record(record)
        there = _checkpoint_names(self._store)
        self._there.update(there)
        for name in here:
            if name not in there:
                with suppress(FileNotFoundError):  # a newer save has replaced it meanwhile
                    self._send(self._folder.checkpoints / name, _CHECKPOINTS + name)
                    self._there.add(name)
        for name in there:
            if name not in here:
                self._delete(_CHECKPOINTS + name)
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
        if self._sent.get(path.name) != state:
            self._send(path, path.name)
            self._sent[path.name] = state

    def _send(self, path: Path, name: str) -> None:
        self._check_may_write()
        self._store.upload(path, name, self._note_progress)
        self._note_progress()

    def _delete(self, name: str) -> None:
        """Delete an object. Without the right to do that, the mirror grows."""
        self._check_may_write()
        with suppress(RequestError):
            self._store.delete(name)

    def _check_may_write(self) -> None:
        if self._has_given_up:
            raise StorageError("the time for it is over")
        self._lease.confirm()

    def _note_progress(self, sent_bytes: int = 0) -> None:
        self._progress = time.monotonic()

    def _missing(self) -> str:
        """Return what the mirror lacks: the newest checkpoint, or only records."""
        newest = next(iter(_names(self._folder)), None)
        return newest if newest and newest not in self._there else "the newest records"


def view(store: Store, folder: RunFolder, temporary: Path) -> RunFolder:
    """Return the folder that a start here would resume, with its records.

    It is `folder`, unless the mirror is ahead. Then `temporary` gets the records of the mirror, and
    empty files with the names of its checkpoints. Changes neither `folder` nor the mirror.
    """
    there, here = _checkpoint_names(store), _names(folder)
    if folder.journal.exists() and not _is_newer(there, here):
        return folder
    copy = RunFolder(temporary)
    copy.checkpoints.mkdir(parents=True)
    for name in there:
        (copy.checkpoints / name).touch()
    for record in _records(copy):
        with suppress(MissingError):
            store.read_to(record.name, record)
    return copy


def _records(folder: RunFolder) -> list[Path]:
    """Return the files that go with the checkpoints. The journal is the last to be restored."""
    return [folder.config, folder.plan, folder.receipt, folder.trace, folder.path / FAILURE, folder.journal]


def _checkpoint_names(store: Store) -> list[str]:
    """Return the names of the checkpoints in the mirror, newest first."""
    entries = sorted(store.list(_CHECKPOINTS), key=lambda entry: entry.modified, reverse=True)
    return _newest_first(entry.name.removeprefix(_CHECKPOINTS) for entry in entries)


def _reason(error: Exception) -> str:
    """Return the line of an error without the advice to give the command again."""
    return str(error).partition(": give the same command")[0]


def _is_newer(there: list[str], here: list[str]) -> bool:
    """Return True if the first of `there` is of a later step than the first of `here`."""
    return bool(there) and (not here or step_of(Path(there[0])) > step_of(Path(here[0])))


def _names(folder: RunFolder) -> list[str]:
    """Return the names of the checkpoints in a folder, newest first."""
    return [path.name for path in list_checkpoints(folder.checkpoints)]


def _newest_first(names: Iterable[str]) -> list[str]:
    return sorted(filter(NAME.fullmatch, names), key=lambda name: step_of(Path(name)), reverse=True)


def _run_id(journal: bytes) -> str | None:
    """Return the id of the run in the first row of a journal."""
    with suppress(ValueError, TypeError, AttributeError):
        return str(json.loads(journal.partition(b"\n")[0]).get("run"))
    return None


def _owner(folder: RunFolder) -> str:
    """Return what identifies this folder as the owner of a lease, and no copy of it."""
    if not folder.mirror.exists():
        data = json.dumps({"owner": secrets.token_hex(8)}).encode()
        atomic_write(folder.mirror, data, check=folder.check_ours)
    status = folder.mirror.stat()
    return hashlib.sha256(folder.mirror.read_bytes() + f"{status.st_dev} {status.st_ino}".encode()).hexdigest()
