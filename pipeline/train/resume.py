"""Where a run goes on: the decision, and the one way in which a checkpoint reaches every process.

Rank 0 alone looks at the folder and reads the file; the bytes that verified are then sent to all. So no two processes can
choose differently, whatever their file systems list, and a damaged file is found once.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.config import Config, from_yaml, refuse_changes
from pipeline.data.manifest import remembered
from pipeline.data.sources import Source, data_root
from pipeline.group import Group
from pipeline.record import checkpoint
from pipeline.record.folder import RunFolder
from pipeline.train.state import TrainState
from pipeline.verdict import RequestError, StorageError, Verdict


def resume(
    state: TrainState, config: Config, folder: RunFolder, source: Source, group: Group, say: Callable[[str], None]
) -> bool:
    """Load the state that `run.resume` means into `state` at every process; whether there was one."""
    data, contents, verdict = b"", {}, None
    if group.is_main:
        try:
            data = _choose(config, folder, say)
            if data:
                contents = checkpoint.decode(data, folder.checkpoints)
                _refuse_others(contents, config, source)
        except Verdict as found:
            verdict = found
        except OSError as error:
            verdict = folder.unwritable(error)
    group.raise_together(verdict)
    data = group.broadcast_bytes(data)
    if not data:
        return False
    contents = contents or checkpoint.decode(data, folder.checkpoints)
    if contents["world"] != group.size and not config.run.exact:
        say(
            f"going on with {group.size} process{'es' * (group.size > 1)} in place of {contents['world']}: each sample is"
            " used once as before, but weights will differ from those of an unchanged run (run.exact=true makes them equal)"
        )
    state.load_dict(contents, is_main=group.is_main)
    return True


def _choose(config: Config, folder: RunFolder, say: Callable[[str], None]) -> bytes:
    """The bytes to go on from; none for a fresh start.

    1. run.resume=never: a fresh start (what was there has been set aside).
    2. run.resume=PATH: that checkpoint, or the newest of that folder, and nothing else.
    3. run.resume=auto: the newest checkpoint here that verifies; if there are some and none does, exit 4.
    4. No checkpoint at all: a fresh start.
    """
    folder.remove_temporary()
    if config.run.resume == "never":
        return b""
    if config.run.resume != "auto":
        path = _named(config.run.resume)
        data = checkpoint.read_verified(path)
    else:
        found = checkpoint.newest_good(folder.checkpoints, say)
        if found is None:
            return b""
        path, data = found
    # what is newer is damaged, or untrue once training goes on from here
    newer = [other for other in checkpoint.listed(folder.checkpoints) if _order(other) > _order(path)]
    if newer:
        say(f"{len(newer)} newer checkpoint{'s' * (len(newer) > 1)} set aside in {folder.set_aside_checkpoints(newer)}")
    say(f"going on from {path}")
    return data


def _refuse_others(contents: dict[str, Any], config: Config, source: Source) -> None:
    """RequestError if a checkpoint is of another configuration or of other data."""
    refuse_changes(from_yaml(contents["config"], "the checkpoint's configuration"), config)
    if contents["data"] != source.digest:
        changed = what_changed(config, source, contents["data"], config.run_dir / "index")
        raise RequestError(
            f"the data is not that of the checkpoint at step {contents['step']}: {changed}; put it"
            " back, or start anew with run.resume=never"
        )


def _named(text: str) -> Path:
    try:
        return checkpoint.find(Path(text))
    except StorageError as error:
        raise RequestError(f"run.resume={text} is not allowed: auto | never | a checkpoint ({error})") from None


def _order(path: Path) -> tuple[int, int]:
    return checkpoint.step_of(path), path.stat().st_mtime_ns


def what_changed(config: Config, source: Source, before: str, spare: Path) -> str:
    """How the data differs from what had the digest `before`, if an index of that is left beside the data or in `spare`."""
    if source.index is None:
        return "the synthetic source has another size"
    index = remembered(data_root(config), spare, before)
    if index is None:
        return f"its digest is {source.digest[:16]}, not {before[:16]}"
    lines = list(index.differences(source.index))
    return "; ".join(lines[:3]) + (f" and {len(lines) - 3} more" if len(lines) > 3 else "")
