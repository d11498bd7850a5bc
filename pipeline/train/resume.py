"""Resuming from what `operate.resume` has chosen: prepare the folder, and load the state."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.config.schema import Config
from pipeline.errors import StorageError, count_of
from pipeline.record.checkpoint_files import list_checkpoints, read_verified, step_of
from pipeline.record.folder import RunFolder
from pipeline.train.state import TrainState


def prepare_folder(
    used: Path | None, best_step: int | None, folder: RunFolder, log: Callable[[str], None]
) -> None:
    """Prepare the folder to continue from `used`: set newer checkpoints aside.

    If `used` is in another folder, copy it and the best, so that this folder can be resumed at
    once. Raises OSError if the folder cannot be written.
    """
    folder.remove_temporary_files()
    if used is None:
        return
    # newer checkpoints are damaged, or no longer true once training resumes from here
    newer = [path for path in list_checkpoints(folder.checkpoints) if _is_newer(path, used)]
    if newer:
        log(f"{len(newer)} newer checkpoint(s) set aside in {folder.set_aside_files(newer)}")
    log(f"resuming from {used}")
    if folder.contains(used):
        return
    best = [path for path in (used, *list_checkpoints(used.parent)) if step_of(path) == best_step]
    try:
        for path in dict.fromkeys((used, *best[:1])):  # the best alone would be taken for the newest
            folder.write(folder.checkpoints / path.name, read_verified(path))
    except StorageError as defect:
        log(f"a checkpoint is not copied: {defect}")


def _is_newer(path: Path, other: Path) -> bool:
    if path.name == other.name:  # a copy
        return False
    return (step_of(path), path.stat().st_mtime_ns) > (step_of(other), other.stat().st_mtime_ns)


def load_checkpoint(
    state: TrainState,
    contents: dict[str, Any],
    used: Path | None,
    config: Config,
    log: Callable[[str], None],
) -> None:
    """Load the contents of a checkpoint into `state`. All processes call this together.

    used: its file, on rank 0.
    """
    group = state.strategy.group
    if contents["world"] != group.size:
        weights = "stay those" if config.run.exact else "will differ from those (without run.exact)"
        log(
            f"resuming with {count_of(group.size, 'process', 'es')} instead of {contents['world']}: the"
            f" samples and their order stay the same, and the weights {weights} of an unchanged run"
        )
    state.load_dict(contents, is_main=group.is_main)
    steps = [step_of(path) for path in list_checkpoints(used.parent)] if used else []
    if any(group.any_rank(used is not None and state.best is not None and state.best.step not in steps)):
        log("the checkpoint of the best model is not there: the best is chosen again from here")
        state.forget_best()
