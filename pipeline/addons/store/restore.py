"""The comparison of a run with its mirror: a start takes the newer state, here or there.

It takes the newest checkpoint that verifies and the journal that goes with it, so the run continues
under its id, as one MLflow run. No torch here.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.addons.store.bucket import MissingError, Store
from pipeline.errors import RequestError, StorageError, TemporaryError
from pipeline.files import parse_json
from pipeline.record.checkpoint_files import NAME, list_checkpoints, read_verified, step_of
from pipeline.record.failure import FAILURE
from pipeline.record.folder import RunFolder
from pipeline.record.journal import Journal, last_event, run_id

CHECKPOINTS = "checkpoints/"
ABANDONED = "abandoned.json"
"""The checkpoints in the mirror that a rollback has discarded, a JSON list of names."""
_MAX_ABANDONED_BYTES = 1 << 20


@dataclass(frozen=True)
class Comparison:
    """The contents of a mirror, compared with a run's folder."""

    store: Store
    folder: RunFolder
    log: Callable[[str], None]
    names: list[str]
    """The mirror's checkpoints that count, newest first."""
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

    def restore(self) -> None:
        """Download the records and checkpoints of the mirror if it is ahead.

        Nothing changes here before a checkpoint has verified. Then the records come first, and the
        newest checkpoint last: a restore that was killed is done again, for the same run and with
        its best model.
        """
        folder = self.folder
        with tempfile.TemporaryDirectory(dir=folder.checkpoints, prefix=".") as scratch:
            newest = self.newest_verified(Path(scratch))
            discarded = [path for path in list_checkpoints(folder.checkpoints) if not self.counts(path.name)]
            if discarded:
                aside = folder.set_aside_files(discarded)
                self.log(f"set aside in {aside}: checkpoint.mirror={self.store} was rolled back")
            if self.has_newer_records:
                folder.delivered.unlink(missing_ok=True)  # it counts bytes of the journal that is replaced
                for record in records(folder):
                    with suppress(MissingError), folder.replacing(record) as temporary:
                        self.download_record(record.name, temporary, newest)
                if newest is None and self.journal.exists():
                    complete = f"checkpoint.mirror={self.store} holds no complete checkpoint of its run"
                    self.log(f"{complete}: training begins at step 0")
            if newest is None or newest.parent == folder.checkpoints:
                return
            here = names_here(folder)
            older = [name for name in self.names if name not in here and step(name) < step(newest.name)]
            downloaded = [newest.parent / name for name in older if self._is_downloaded(name, newest.parent)]
            for path in (*reversed(downloaded), newest):
                folder.check_ours()
                os.replace(path, folder.checkpoints / path.name)
        self.log(f"restored step {step(newest.name):,} from checkpoint.mirror={self.store}")

    def newest_verified(self, target: Path) -> Path | None:
        """Return the newest checkpoint that verifies, here or downloaded to `target`, or None.

        Raises StorageError if the mirror has checkpoints, or had one by its journal, and none
        verifies.
        """
        here = [name for name in names_here(self.folder) if self.counts(name)]
        for name in _newest_first({*here, *self.names}):
            path = self.folder.checkpoints / name
            try:
                if name in here and read_verified(path):
                    return path
            except StorageError as error:
                self.log(f"{error}; looking for another")
            if name in self.names and self._is_downloaded(name, target):
                return target / name
        if set(self.names) - set(names_there(self.store)):
            problem = f"checkpoint.mirror={self.store} has changed meanwhile"
            raise TemporaryError(problem, "give the same command again")
        known = None if here else last_event(self.journal, "mirrored").get("checkpoint")
        if self.names:
            problem = f"no checkpoint in checkpoint.mirror={self.store} verifies"
        elif known:
            problem = f"checkpoint.mirror={self.store} holds no checkpoint, and its journal names {known}"
        else:
            return None
        again = "start again with run.resume=never and another checkpoint.mirror"
        raise StorageError(problem, f"restore one from a copy, or {again}")

    def _is_downloaded(self, name: str, target: Path) -> bool:
        """Download a checkpoint to the folder `target`; return False if it is damaged or gone."""
        path = target / name
        try:
            self.store.read_to(CHECKPOINTS + name, path)
        except MissingError as error:
            self.log(f"{error}; looking for another")
            return False
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest.startswith(name.split(".")[1]):
            return True
        damaged = f"{self.store}/{CHECKPOINTS}{name} is damaged: its SHA-256 begins {digest[:16]}"
        self.log(f"{damaged}; looking for another")
        path.unlink()
        return False

    def download_record(self, name: str, path: Path, newest: Path | None) -> None:
        """Download a record. Raises MissingError.

        newest: the checkpoint that goes with it. Without one, the journal gets the event
        `restored`: the checkpoints that it names before were never uploaded completely.
        """
        self.store.read_to(name, path)
        if name == self.folder.journal.name and newest is None:
            Journal(path, lambda _: None).log_event("restored")


def compare(
    store: Store, folder: RunFolder, resume: str, is_restart: Callable[[Path], bool], scratch: Path,
    log: Callable[[str], None],
) -> Comparison:  # fmt: skip
    """Compare the mirror with a run's folder. `scratch` gets its journal.

    resume, is_restart: see `Mirror.open`. Raises RequestError if this start would replace a run, or
    later steps, in the mirror.
    """
    abandoned, journal = _abandoned_names(store), scratch / folder.journal.name
    names = [name for name in names_there(store) if name not in abandoned]
    with suppress(MissingError):
        store.read_to(journal.name, journal)
    is_restarted_elsewhere = not is_restart(folder.journal) and is_restart(journal)
    is_resumed = is_restart(folder.journal) or is_restarted_elsewhere
    is_resumed = is_resumed or resume == "auto" or Path(resume).absolute() == folder.path.absolute()
    is_newer = newest_step(names) > newest_step(names_here(folder))
    refused = f"checkpoint.mirror={store} holds %s", "give another prefix, or remove what it holds"
    match journal.exists(), run_id(folder.journal), is_resumed:
        case False, _, _:
            pass  # an empty mirror, whatever is here
        case True, None, True:
            pass  # an empty disk: the run continues here
        case True, None, False:
            raise RequestError(refused[0] % f"a run, and run.resume={resume}", refused[1])
        case True, run, _ if run != run_id(journal):
            raise RequestError(refused[0] % "another run", refused[1])
        case True, _, True:
            pass  # the same run: it continues from the newer of the two
        case True, _, False:  # the same run, which begins again from step 0 or from a checkpoint
            if resume == "never":
                raise RequestError(refused[0] % "a run, and run.resume=never", refused[1])
            if is_newer:
                later = f"a later step than {folder.path}, and run.resume={resume}"
                raise RequestError(refused[0] % later, refused[1])
    has_newer = is_newer or is_restarted_elsewhere or not folder.journal.exists()
    return Comparison(
        store,
        folder,
        log,
        names,
        abandoned,
        journal,
        is_resumed,
        is_resumed and has_newer,
        is_restarted_elsewhere,
    )


def view(
    store: Store, folder: RunFolder, resume: str, scratch: Path, log: Callable[[str], None]
) -> RunFolder:
    """Return the folder that a start here would resume.

    It is `folder`, unless it gets its newest checkpoint or its records from the mirror: then
    `scratch` gets these. Changes neither `folder` nor the mirror. Raises what `Mirror.open` does.
    """
    copy = RunFolder(scratch)
    try:
        copy.checkpoints.mkdir(parents=True)
        found = compare(store, folder, resume, lambda _: False, scratch, log)
        newest = found.newest_verified(copy.checkpoints) if found.is_resumed else None
        if newest.parent == folder.checkpoints if newest else not found.has_newer_records:
            return folder
        for record in records(copy):
            with suppress(MissingError):
                found.download_record(record.name, record, newest)
        return copy if newest or any(record.exists() for record in records(copy)) else folder
    except OSError as error:
        problem = f"{scratch} cannot be written: {error.strerror}"
        raise RequestError(problem, "set TMPDIR to a folder with room for a checkpoint") from None


def records(folder: RunFolder) -> list[Path]:
    """Return the files that go with the checkpoints. The journal is the last to be restored."""
    return [folder.config, folder.plan, folder.receipt, folder.trace, folder.path / FAILURE, folder.journal]


def step(name: str) -> int:
    """Return the step in a checkpoint's name."""
    return step_of(Path(name))


def newest_step(names: Iterable[str]) -> int:
    """Return the latest step of these checkpoints, or -1 if there are none."""
    return max(map(step, names), default=-1)


def names_here(folder: RunFolder) -> list[str]:
    """Return the names of the checkpoints in a folder, newest first."""
    return [path.name for path in list_checkpoints(folder.checkpoints)]


def names_there(store: Store) -> list[str]:
    """Return the names of the checkpoints in the mirror, newest first."""
    entries = sorted(store.list(CHECKPOINTS), key=lambda entry: entry.modified, reverse=True)
    return _newest_first(entry.name.removeprefix(CHECKPOINTS) for entry in entries)


def _newest_first(names: Iterable[str]) -> list[str]:
    return sorted(filter(NAME.fullmatch, names), key=step, reverse=True)


def _abandoned_names(store: Store) -> set[str]:
    try:
        return set(filter(NAME.fullmatch, parse_json(store.read(ABANDONED, _MAX_ABANDONED_BYTES))))
    except MissingError:
        return set()
    except (ValueError, TypeError):
        raise StorageError(
            f"{store}/{ABANDONED} is not a list of checkpoints", "restore it from a copy"
        ) from None
