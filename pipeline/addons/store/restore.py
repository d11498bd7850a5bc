"""The comparison of a run with its mirror: a start takes the newer state, here or there.

It takes the newest checkpoint that verifies and the journal that goes with it, so the run continues
under its id, as one MLflow run. No torch here.
"""

import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from pipeline.addons.store.bucket import MissingError, Store
from pipeline.errors import RequestError, StorageError, TemporaryError
from pipeline.files import parse_json
from pipeline.record.checkpoint_files import NAME, list_checkpoints, read_verified, step_of
from pipeline.record.failure import FAILURE
from pipeline.record.folder import RunFolder
from pipeline.record.journal import Journal, last_event, run_id
from pipeline.record.terminal import make_terminal

CHECKPOINTS = "checkpoints/"
ABANDONED = "abandoned.json"
"""The checkpoints in the mirror that a rollback has discarded, a JSON list of names."""


class Comparison:
    def __init__(
        self, store: Store, folder: RunFolder, resume: str, is_restart: Callable[[Path], bool], scratch: Path
    ) -> None:
        """Compare. `scratch` gets the mirror's journal.

        resume: `run.resume`. is_restart: see `has_applied_resume`. Raises RequestError if this
        start would replace a run, or later steps, in the mirror.
        """
        self._store, self._folder, self._place = store, folder, f"checkpoint.mirror={store}"
        self._log = make_terminal(is_main=True).log
        self.abandoned = _abandoned_names(store)
        self.names = [name for name in names_there(store) if name not in self.abandoned]
        """The mirror's checkpoints that count, newest first."""
        self._journal = scratch / folder.journal.name
        with suppress(MissingError):
            store.read_to(self._journal.name, self._journal)
        here, there = run_id(folder.journal), run_id(self._journal)
        is_restart_here = is_restart(folder.journal)
        self._is_rolled_back = not is_restart_here and is_restart(self._journal)
        """The run was rolled back on another disk: what only this one has no longer counts."""
        is_newer = newest_step(self.names) > newest_step(names_here(folder))
        is_resumed = resume == "auto" or Path(resume).absolute() == folder.path.absolute()
        self.is_resumed = is_resumed or is_restart_here or self._is_rolled_back
        """This start continues the run, here or in the mirror."""
        lost = ""
        match there, here, self.is_resumed:
            case _ if not self._journal.exists():
                pass  # an empty mirror, whatever is here
            case _, None, True:
                pass  # an empty disk: the run continues here
            case _, None, False:
                lost = "a run"
            case _ if here != there:
                lost = "another run"
            case _, _, True:
                pass  # the same run: it continues from the newer of the two
            case _, _, False:  # the same run, which begins again from step 0 or from a checkpoint
                lost = "a run" if resume == "never" else "a later step" if is_newer else ""
        if lost:
            remedy = "give another prefix, or remove what it holds"
            raise RequestError(f"{self._place} holds {lost}, and run.resume={resume}", remedy)
        is_ahead = is_newer or self._is_rolled_back or here is None
        self.has_newer_records = self.is_resumed and is_ahead and self._journal.exists()
        """The mirror's records replace those of the folder."""

    def restore(self) -> None:
        """Download the records and checkpoints of the mirror if it is ahead.

        Nothing changes here before a checkpoint has verified. Then the records come first, and the
        newest checkpoint last: a restore that was killed is done again, for the same run and with
        its best model.
        """
        folder = self._folder
        with tempfile.TemporaryDirectory(dir=folder.checkpoints, prefix=".") as temporary:
            scratch = Path(temporary)
            newest = self.newest_verified(scratch)
            counted = self._counted_here()
            discarded = [path for path in list_checkpoints(folder.checkpoints) if path.name not in counted]
            if discarded:
                aside = folder.set_aside_files(discarded)
                self._log(f"set aside in {aside}: {self._place} was rolled back")
            if self.has_newer_records:
                self.restore_records(folder, has_checkpoint=newest is not None)
            if newest is None or newest.parent == folder.checkpoints:
                return
            older = [name for name in self.names if step(name) < step_of(newest)]
            missing = [name for name in older if name not in names_here(folder)]
            restored = [name for name in missing if self._verifies(scratch / name, is_there=True)]
            for name in (*reversed(restored), newest.name):
                folder.check_ours()
                os.replace(scratch / name, folder.checkpoints / name)
        self._log(f"restored step {step_of(newest):,} from {self._place}")

    def _counted_here(self) -> list[str]:
        return [name for name in names_here(self._folder) if name in self.names or not self._is_rolled_back]

    def restore_records(self, folder: RunFolder, *, has_checkpoint: bool) -> None:
        """Download the records of the mirror to `folder`."""
        folder.delivered.unlink(missing_ok=True)  # it counts bytes of the journal that is replaced
        for record in records(folder):
            with suppress(MissingError), folder.replacing(record) as temporary:
                self._store.read_to(record.name, temporary)
                if record == folder.journal and not has_checkpoint:
                    # those that it names were never uploaded completely
                    Journal(temporary, self._log).log_event("restored")
                    self._log(f"{self._place} holds no complete checkpoint: training begins at step 0")

    def newest_verified(self, scratch: Path) -> Path | None:
        """Return the newest checkpoint that verifies, here or downloaded to `scratch`, or None.

        Raises StorageError if the mirror has checkpoints, or had one by its journal, and none
        verifies.
        """
        here = self._counted_here()
        for name in sorted({*here, *self.names}, key=step, reverse=True):
            if name in here and self._verifies(self._folder.checkpoints / name):
                return self._folder.checkpoints / name
            if name in self.names and self._verifies(scratch / name, is_there=True):
                return scratch / name
        if set(self.names) - set(names_there(self._store)):  # its run has replaced some
            raise TemporaryError(f"{self._place} has changed meanwhile", "give the same command again")
        known = None if here else last_event(self._journal, "mirrored").get("checkpoint")
        if not self.names and not known:
            return None
        named = f", and its journal names {known}" if known else ""
        again = "start again with run.resume=never and another checkpoint.mirror"
        remedy = f"restore one from a copy, or {again}"
        raise StorageError(f"no checkpoint in {self._place} verifies{named}", remedy)

    def _verifies(self, path: Path, *, is_there: bool = False) -> bool:
        """Return True if a checkpoint verifies. is_there: download it first."""
        try:
            if is_there:
                self._store.read_to(CHECKPOINTS + path.name, path)
            return bool(read_verified(path))
        except (MissingError, StorageError) as error:
            self._log(f"{error}; looking for another")
            if is_there:
                path.unlink(missing_ok=True)
            return False


def view(store: Store, folder: RunFolder, resume: str, scratch: Path) -> RunFolder:
    """Return the folder that a start here would resume: `folder`, or a copy of the mirror.

    The copy is in `scratch` and has the newest checkpoint only. Changes neither `folder` nor the
    mirror. Raises what `open_mirror` does.
    """
    copy = RunFolder(scratch)
    try:
        copy.checkpoints.mkdir(parents=True)
        found = Comparison(store, folder, resume, lambda _: False, scratch)
        newest = found.newest_verified(copy.checkpoints) if found.is_resumed else None
        if newest.parent == folder.checkpoints if newest else not found.has_newer_records:
            return folder
        found.restore_records(copy, has_checkpoint=newest is not None)
        return copy
    except OSError as error:
        problem = f"{scratch} cannot be written: {error.strerror}"
        raise RequestError(problem, "set TMPDIR to a folder with room for a checkpoint") from None


def records(folder: RunFolder) -> list[Path]:
    """Return the files that go with the checkpoints. The journal is the last to be restored."""
    return [folder.config, folder.plan, folder.receipt, folder.trace, folder.path / FAILURE, folder.journal]


def step(name: str) -> int:
    return step_of(Path(name))


def newest_step(names: Iterable[str]) -> int:
    """Return the latest step of these checkpoints, or -1 if there are none."""
    return max(map(step, names), default=-1)


def names_here(folder: RunFolder) -> list[str]:
    """Return the names of the checkpoints in a folder, newest first."""
    return [path.name for path in list_checkpoints(folder.checkpoints)]


def names_there(store: Store) -> list[str]:
    """Return the names of the checkpoints in the mirror, newest first."""
    names = (entry.name.removeprefix(CHECKPOINTS) for entry in store.list(CHECKPOINTS))
    return sorted(filter(NAME.fullmatch, names), key=step, reverse=True)


def _abandoned_names(store: Store) -> set[str]:
    try:
        return set(filter(NAME.fullmatch, parse_json(store.read(ABANDONED))))
    except MissingError:
        return set()
    except (ValueError, TypeError):
        problem = f"{store}/{ABANDONED} is not a list of checkpoints"
        raise StorageError(problem, "restore it from a copy") from None
