"""Resuming a run: the decision, and how a checkpoint reaches every process.

Rank 0 alone looks at the folder and reads the file (`operate.start`, before the group forms), then
sends the verified bytes to all processes. So no two can choose differently, whatever their file
systems list, and a damaged file is found once. `train.resume` loads what is found.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.load import from_yaml
from pipeline.config.schema import Config
from pipeline.data.interface import Source
from pipeline.errors import RequestError, StorageError
from pipeline.group import Group
from pipeline.lazy import addon
from pipeline.record.checkpoint_contents import decode, decode_state
from pipeline.record.checkpoint_files import find as find_checkpoint
from pipeline.record.checkpoint_files import newest_verified, read_verified
from pipeline.record.folder import RunFolder
from pipeline.record.journal import events

_KEPT_AT_FRESH_START = ("lock", "mlflow.lock", "mirror.json", "index")  # held locks, the mirror's, the data's


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint that verified."""

    path: Path
    data: bytes
    contents: dict[str, Any]


def find(
    config: Config, folder: RunFolder, source: Source, log: Callable[[str], None]
) -> VerifiedCheckpoint | None:
    """Return the checkpoint to resume from, or None for a fresh start. Changes nothing.

    1. run.resume=never: a fresh start (an earlier run is set aside once all ranks agree).
    2. run.resume=PATH: that checkpoint, or the newest of that folder that verifies, and nothing
       else.
    3. run.resume=auto: the newest checkpoint here that verifies; if there are some and none does,
       exit 4.
    4. No checkpoint at all: a fresh start; if the journal names one, exit 4.

    Raises RequestError for a checkpoint of another configuration, of other data, of another model
    or of another run than that in the folder, or a PATH that holds none; TemporaryError if the
    storage is out of reach.
    """
    if config.run.resume == "never":
        return None
    try:
        known = _known_checkpoints(folder.journal)
        if config.run.resume == "auto":
            # a damaged file is named and passed over: the one before it is complete
            verified = newest_verified(folder.checkpoints, log, config.start_again)
            # files that the journal knows are gone: to start afresh would silently lose a run
            if verified is None and known:
                raise StorageError(
                    f"{config.run_dir} holds no checkpoint, and its journal names {known[-1]}",
                    f"restore one from a copy, or {config.start_again}",
                )
        else:
            verified = _read_path(config.run.resume, log)
            used = verified[0]
            # the journal here would be continued, and the best model here taken for that of `used`
            if known and used.name not in known and not folder.contains(used):
                raise RequestError(
                    f"run.resume={config.run.resume} is of another run than that in {config.run_dir}",
                    "give another run.dir with it, or leave run.resume out to continue the run there",
                )
    except OSError as error:
        raise folder.write_error(error) from None
    if verified is None:
        return None
    path, data = verified
    contents = decode_state(data, path)  # weights_only: a file never executes
    before = from_yaml(contents["config"], "the checkpoint's configuration")
    addon("ops.fixed_keys").refuse_changes(before, config)
    if contents["data"] != source.digest:
        cache = config.run_dir / "index"
        changed = addon("ops.changes").describe_data_change(config, source, contents["data"], cache)
        raise RequestError(
            f"the data is not that of the checkpoint at step {contents['step']}: {changed}",
            f"restore it, give the folder that holds it with data.root=FOLDER, or {config.start_again}",
        )
    addon("ops.changes").refuse_another_model(contents, config, path)
    return VerifiedCheckpoint(path, data, contents)


def _known_checkpoints(path: Path) -> list[str]:
    """Return the names of the checkpoints that a run has saved or resumed from, in that order.

    Those before the run was restored from its mirror without a checkpoint do not count.
    """
    names: list[str] = []
    for event in events(path):
        if event["event"] == "restored":
            names.clear()
        names += filter(None, [event.get("checkpoint"), (event.get("best") or {}).get("file")])
    return names


def _read_path(text: str, log: Callable[[str], None]) -> tuple[Path, bytes]:
    """Return the path and bytes of the checkpoint that run.resume=PATH names."""
    try:
        path = find_checkpoint(Path(text))
    except StorageError as error:
        raise RequestError(f"run.resume={text}: {error.problem}", "auto | never | a checkpoint") from None
    newest = newest_verified(path.parent, log) if Path(text).is_dir() else None
    return newest or (path, read_verified(path))


def broadcast_contents(found: VerifiedCheckpoint | None, group: Group) -> dict[str, Any] | None:
    """Return in every process the contents of the checkpoint that rank 0 found, or None."""
    data = group.broadcast_bytes((found.data if found else b"") if group.is_main else None)
    if not data:
        return None
    return found.contents if found else decode(data, "the checkpoint that rank 0 sent")


def set_aside(folder: RunFolder) -> Path | None:
    """Move an earlier run's files into a new subfolder; return that, or None without files."""
    try:
        old = [
            entry
            for entry in folder.path.iterdir()
            if entry.name not in _KEPT_AT_FRESH_START and not entry.name.startswith(("before-", "."))
        ]
        if old == [folder.checkpoints] and not any(folder.checkpoints.iterdir()):
            return None
        aside = folder.set_aside_files(old)
        folder.checkpoints.mkdir()
        return aside
    except OSError as error:
        raise folder.write_error(error) from None
