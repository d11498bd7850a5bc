"""Resuming a run: the decision, and how a checkpoint reaches every process.

Rank 0 alone looks at the folder and reads the file. It sends the verified bytes to all processes.
So no two processes can choose differently, whatever their file systems list, and a damaged file is
found once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.load import from_yaml, refuse_changes
from pipeline.config.schema import Config
from pipeline.data.manifest import find_cached_index
from pipeline.data.sources import Source, data_root
from pipeline.errors import RequestError, StorageError
from pipeline.files import atomic_write
from pipeline.group import Group
from pipeline.record.checkpoint import decode
from pipeline.record.checkpoint_files import find as find_checkpoint
from pipeline.record.checkpoint_files import list_checkpoints, newest_verified, read_verified, step_of
from pipeline.record.folder import RunFolder
from pipeline.train.state import TrainState


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint that verified."""

    path: Path
    data: bytes
    contents: dict[str, Any]


def find(config: Config, folder: RunFolder, source: Source, log: Callable[[str], None]) -> VerifiedCheckpoint | None:
    """Return the checkpoint to resume from, or None for a fresh start. Changes nothing.

    1. run.resume=never: a fresh start (the earlier run was set aside).
    2. run.resume=PATH: that checkpoint, or the newest of that folder that verifies, and nothing
       else.
    3. run.resume=auto: the newest checkpoint here that verifies; if there are some and none does,
       exit 4.
    4. No checkpoint at all: a fresh start.

    Raises RequestError for a checkpoint of another configuration or of other data, or a PATH that
    holds none.
    """
    if config.run.resume == "never":
        return None
    try:
        if config.run.resume == "auto":
            verified = newest_verified(folder.checkpoints, log)
        else:
            verified = _named(config.run.resume, log)
    except OSError as error:
        raise folder.write_error(error) from None
    if verified is None:
        return None
    path, data = verified
    contents = decode(data, path)
    _refuse_others(contents, config, source)
    return VerifiedCheckpoint(path, data, contents)


def resume_value_at_restart(named: str, used: str, folder: RunFolder) -> str:
    """Return run.resume for the restart of a run that resumed from file `used` of path `named`.

    That is auto once the run has saved a checkpoint itself, and the same file until then: a folder
    may have newer ones.
    """
    own = list_checkpoints(folder.checkpoints)
    if own and own[0].name != used and step_of(own[0]) >= step_of(Path(used)):
        return "auto"
    places = (Path(named) / used, Path(named) / "checkpoints" / used)
    return next((str(path) for path in places if path.exists()), named)


def prepare_folder(used: Path | None, best_step: int | None, folder: RunFolder, log: Callable[[str], None]) -> None:
    """Prepare the folder to continue from `used`: set newer checkpoints aside, copy the best.

    Raises OSError if the folder cannot be written.
    """
    folder.remove_temporary_files()
    if used is None:
        return
    # newer checkpoints are damaged, or no longer true once training resumes from here
    newer = [path for path in list_checkpoints(folder.checkpoints) if _is_newer(path, used)]
    if newer:
        plural = "s" if len(newer) > 1 else ""
        log(f"{len(newer)} newer checkpoint{plural} set aside in {folder.set_aside_checkpoints(newer)}")
    log(f"resuming from {used}")
    best = next(
        (path for path in (used, *list_checkpoints(used.parent)) if step_of(path) == best_step),
        None,
    )
    if best and not (folder.checkpoints / best.name).exists():
        try:
            atomic_write(folder.checkpoints / best.name, read_verified(best), check=folder.check_ours)
        except StorageError as defect:
            log(f"the best model is not copied: {defect}")


def broadcast_contents(found: VerifiedCheckpoint | None, group: Group) -> dict[str, Any] | None:
    """Return in every process the contents of the checkpoint that rank 0 found, or None."""
    data = group.broadcast_bytes((found.data if found else b"") if group.is_main else None)
    if not data:
        return None
    return found.contents if found else decode(data, "the checkpoint that rank 0 sent")


def resume(
    state: TrainState, contents: dict[str, Any], config: Config, group: Group, log: Callable[[str], None]
) -> None:
    """Load the contents of a checkpoint into `state`. All processes call this together."""
    if contents["world"] != group.size:
        processes = "processes" if group.size > 1 else "process"
        weights = "the weights stay those of an unchanged run (run.exact)"
        if not config.run.exact:
            weights = "the weights will differ from those of an unchanged run (run.exact=true makes them equal)"
        log(
            f"resuming with {group.size} {processes} instead of {contents['world']}: each sample is still used once an"
            f" epoch, and {weights}"
        )
    state.load_dict(contents, is_main=group.is_main)


def describe_data_change(config: Config, source: Source, before: str, fallback_cache: Path) -> str:
    """Return how the data differs from that with digest `before`, if its index is cached."""
    if source.index is None:
        return "the synthetic source has another size"
    index = find_cached_index(data_root(config), fallback_cache, before)
    if index is None:
        return f"its digest is {source.digest[:16]}, not {before[:16]}"
    lines = list(index.differences(source.index))
    return "; ".join(lines[:3]) + (f" and {len(lines) - 3} more" if len(lines) > 3 else "")


def _refuse_others(contents: dict[str, Any], config: Config, source: Source) -> None:
    """Raise RequestError if a checkpoint is of another configuration or of other data."""
    refuse_changes(from_yaml(contents["config"], "the checkpoint's configuration"), config)
    if contents["data"] != source.digest:
        changed = describe_data_change(config, source, contents["data"], config.run_dir / "index")
        raise RequestError(
            f"the data is not that of the checkpoint at step {contents['step']}: {changed}; restore it, or start again"
            " with run.resume=never"
        )


def _named(text: str, log: Callable[[str], None]) -> tuple[Path, bytes]:
    """Return the path and bytes of the checkpoint that run.resume=PATH names."""
    try:
        path = find_checkpoint(Path(text))
    except StorageError as error:
        raise RequestError(f"run.resume={text} is not allowed: auto | never | a checkpoint ({error})") from None
    if Path(text).is_dir():
        newest = newest_verified(path.parent, log)
        assert newest is not None
        return newest
    return path, read_verified(path)


def _is_newer(path: Path, other: Path) -> bool:
    if path.name == other.name:  # a copy
        return False
    return (step_of(path), path.stat().st_mtime_ns) > (
        step_of(other),
        other.stat().st_mtime_ns,
    )
