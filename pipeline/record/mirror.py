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

from pipeline.data.store import MissingError, Store
from pipeline.errors import FAILURE, RequestError, RunError, StorageError
from pipeline.files import atomic_write, replacing
from pipeline.record.checkpoint_files import NAME, list_checkpoints, read_verified, step_of
from pipeline.record.folder import RunFolder
from pipeline.record.journal import read
from pipeline.record.lease import Lease

FINISH_S = 120
"""Seconds that the end of a run waits for a store that does not take the last checkpoint."""
_RETRY_S = 5.0
_CHECKPOINTS = "checkpoints/"


class Mirror:
    """The mirror of one run, held by the process that trains it."""

    def __init__(self, store: Store, folder: RunFolder, log: Callable[[str], None]) -> None:
        self._store, self._folder, self._log = store, folder, log
        self._lease = Lease(store, _owner(folder))
        self._uploaded: dict[str, tuple[int, int]] = {}
        """Size and time of change of each record when it was last uploaded."""
        self._is_wanted, self._is_over = threading.Event(), threading.Event()
        self._has_given_up = False
        self._thread: threading.Thread | None = None
        self.error: Exception | None = None
        """Why the last upload failed, or None."""
        self.failures: list[str] = []
        """Why saves were not uploaded at once, for the journal."""

    def __str__(self) -> str:
        return f"checkpoint.mirror={self._store}"

    def open(self, *, resumes: bool) -> None:
        """Take the lease, and bring this folder to the newer state of the two.

        resumes: run.resume is auto. Raises TemporaryError if another process writes to the mirror,
        RequestError if it holds another run, or any run if a fresh start is asked for.
        """
        self._lease.take()
        try:
            self._refuse_another_run(resumes=resumes)
            if resumes:
                self._restore()
            with suppress(RunError):  # a right that a training can do without
                self._store.abort_uploads(_CHECKPOINTS)
        except BaseException:
            self._lease.drop()
            raise

    def start(self) -> None:
        """Upload what is new whenever `upload` is called, in a thread."""
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()
        self.upload()

    def upload(self) -> None:
        """Have the thread upload what is new. Returns at once."""
        self._is_wanted.set()

    def close(self, timeout_s: float) -> None:
        """Upload what is new and give the lease back. Log what is missing after the timeout.

        A store that takes the files may need longer than the timeout; one that does not is tried
        again until then.
        """
        deadline = time.monotonic() + timeout_s
        self._is_over.set()
        self._is_wanted.set()
        while self._thread and self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(0.2)
        self._has_given_up = True
        if self.error or (self._thread and self._thread.is_alive()):
            reason = f" ({_reason(self.error)})" if self.error else ""
            where = f"it is in {self._folder.path}: the same command sends it"
            self._log(f"{self._store} lacks {self._missing()}{reason}; {where}")
        self._lease.drop()

    # restoring

    def _refuse_another_run(self, *, resumes: bool) -> None:
        with suppress(MissingError):
            there = _run_id(next(self._store.stream("journal.jsonl"), b""))
            here = next((row["run"] for row, _ in read(self._folder.journal) if "run" in row), None)
            if here != there and (here or not resumes):
                problem = f"{self} holds another run" if here else f"{self} holds a run, and run.resume is not auto"
                raise RequestError(f"{problem}: give another prefix, or remove what it holds")

    def _restore(self) -> None:
        """Download the checkpoints and the records if the mirror has the newer good checkpoint.

        The records come first: a restore that is killed is then continued under the same run.
        """
        here = [path.name for path in list_checkpoints(self._folder.checkpoints)]
        there = self._checkpoint_names()
        if _is_newer(there, here) or not self._folder.journal.exists():
            self._folder.delivered.unlink(missing_ok=True)  # it counts bytes of the journal that is replaced
            for record in self._records():
                with suppress(MissingError), replacing(record, check=self._folder.check_ours) as temporary:
                    self._store.read_to(record.name, temporary)
        for name in _newest_first({*here, *there}):
            if name in here and self._verifies(name):
                return
            if name in there and self._download(name):
                break
        else:
            if there:
                raise StorageError(f"no checkpoint in {self} verifies: restore one from a copy, or give another prefix")
            return
        for other in reversed(there):  # the best model, for example
            if other not in here:
                self._download(other)
        self._log(f"restored step {step_of(Path(name)):,} from {self}")

    def _verifies(self, name: str) -> bool:
        try:
            read_verified(self._folder.checkpoints / name)
        except StorageError as error:
            self._log(f"{error}; looking for another")
            return False
        return True

    def _download(self, name: str) -> Path | None:
        """Return the path of a checkpoint of the mirror, now also here; None if it is damaged."""
        path = self._folder.checkpoints / name
        try:
            with replacing(path, check=self._folder.check_ours) as temporary:
                self._store.read_to(_CHECKPOINTS + name, temporary)
                with open(temporary, "rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                if not digest.startswith(name.split(".")[1]):
                    place = f"{self._store}/{_CHECKPOINTS}{name}"
                    raise StorageError(f"{place} is damaged: its SHA-256 begins {digest[:16]}")
        except (StorageError, MissingError) as error:
            self._log(f"{error}; looking for another")
            return None
        return path

    # uploading

    def _run(self) -> None:
        while True:
            self._is_wanted.wait(_RETRY_S if self.error else None)
            is_asked, is_last = self._is_wanted.is_set(), self._is_over.is_set()
            self._is_wanted.clear()
            try:
                self._upload()
                self.error = None
                if is_last:
                    return
            except Exception as error:  # whatever it is, training goes on without the mirror
                self.error = error
                if self._has_given_up:
                    return
                if is_asked and not is_last:  # once a save, not at each attempt
                    self.failures.append(_reason(error))
                    self._log(f"{self._store} was not updated: {_reason(error)}; training continues, it is tried again")

    def _upload(self) -> None:
        self._lease.check()
        # listed first: a checkpoint that is saved meanwhile may be ahead of the records
        here = [path.name for path in list_checkpoints(self._folder.checkpoints) if path.is_file()]
        for record in self._records():
            self._upload_record(record)
        there = self._checkpoint_names()
        for name in here:
            if name not in there:
                with suppress(FileNotFoundError):  # a newer save has replaced it meanwhile
                    self._store.upload(self._folder.checkpoints / name, _CHECKPOINTS + name)
        self._lease.check()
        for name in there:
            if name not in here:
                self._store.delete(_CHECKPOINTS + name)

    def _upload_record(self, path: Path) -> None:
        try:
            status = path.stat()
        except FileNotFoundError:
            if self._uploaded.pop(path.name, None) or path.name == FAILURE:  # a start has cleared the failure
                self._store.delete(path.name)
            return
        state = (status.st_size, status.st_mtime_ns)
        if self._uploaded.get(path.name) != state:
            self._store.upload(path, path.name)
            self._uploaded[path.name] = state

    def _missing(self) -> str:
        """Return the name of the newest checkpoint that is not in the mirror, or of the records."""
        with suppress(RunError, OSError):
            there = self._checkpoint_names()
            newest = next(iter(list_checkpoints(self._folder.checkpoints)), None)
            return newest.name if newest and newest.name not in there else "the newest records"
        return "what was saved since it failed"

    def _records(self) -> list[Path]:
        return _records(self._folder)

    def _checkpoint_names(self) -> list[str]:
        return _checkpoint_names(self._store)


def view(store: Store, folder: RunFolder, temporary: Path) -> RunFolder:
    """Return the folder that a start here would resume, with its records.

    It is `folder`, unless the mirror is ahead. Then `temporary` gets the records of the mirror, and
    empty files with the names of its checkpoints. Changes neither `folder` nor the mirror.
    """
    there, here = _checkpoint_names(store), [path.name for path in list_checkpoints(folder.checkpoints)]
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


def _newest_first(names: Iterable[str]) -> list[str]:
    return sorted(filter(NAME.fullmatch, names), key=lambda name: step_of(Path(name)), reverse=True)


def _run_id(journal: bytes) -> str | None:
    """Return the id of the run in the first row of a journal."""
    with suppress(ValueError, TypeError, AttributeError):
        return str(json.loads(journal.partition(b"\n")[0]).get("run"))
    return None


def _owner(folder: RunFolder) -> str:
    """Return what identifies this folder as the owner of a lease. Makes it at the first call."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(folder.mirror.read_text())["owner"])
    owner = secrets.token_hex(8)
    atomic_write(folder.mirror, json.dumps({"owner": owner}).encode(), check=folder.check_ours)
    return owner
