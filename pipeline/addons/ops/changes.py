"""The differences between a start and the run that it resumes, in words."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.addons.datasets.folders import changes
from pipeline.addons.datasets.manifest import find_cached_index
from pipeline.addons.ops.provenance import model_provenance
from pipeline.config.schema import Config
from pipeline.data.sources import Source, data_root
from pipeline.errors import RequestError
from pipeline.model.architectures import meta_model
from pipeline.record.checkpoint_files import step_of
from pipeline.record.folder import RunFolder
from pipeline.record.journal import events


def describe_data_change(config: Config, source: Source, before: str, fallback_cache: Path) -> str:
    """Return how the data differs from that with digest `before`, if its index is cached."""
    if source.index is None:
        return "the synthetic source has another size"
    index = find_cached_index(data_root(config), fallback_cache, before)
    if index is None:
        return f"its digest is {source.digest[:16]}, not {before[:16]}"
    # version 0.2 sorted names as the system spells them
    lines = list(changes(index, source.index)) or [
        "its names are sorted in another way, in Unicode's form NFC"
    ]
    return "; ".join(lines[:3]) + (f" and {len(lines) - 3} more" if len(lines) > 3 else "")


def refuse_another_model(contents: dict[str, Any], config: Config, path: Path) -> None:
    """Raise RequestError if the weights do not fit the model that this start builds."""
    before = _shapes(contents["model"])
    now = _shapes(meta_model(config.model, len(contents["classes"])).state_dict())
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if changed:
        name = changed[0]
        others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise RequestError(
            f"model.arch={config.model.arch} is not the model in {path}: {name} {before.get(name, 'missing')} ->"
            f" {now.get(name, 'missing')}{others}",
            f"restore the code that made it, or {config.start_again}",
        )


def _shapes(weights: dict[str, Any]) -> dict[str, list[int]]:
    """Return the shape of each tensor of a state dict, by name."""
    return {name: list(value.shape) for name, value in weights.items() if isinstance(value, Tensor)}


def log_changed_code(config: Config, path: Path, log: Callable[[str], None]) -> None:
    """Log a line if the file of the model's function has changed since a start saved `path`."""
    digest = model_provenance(config.model.arch).get("model_sha256")
    starts = events(RunFolder(path.absolute().parent.parent).journal, "started") if digest else []
    starts = [start for start in starts if start["step"] < step_of(path)]
    before = starts[-1]["tags"].get("model_sha256") if starts else None
    if before and before != digest:
        log(
            f"the file of model.arch={config.model.arch} has changed since {path.name} was saved: its SHA-256 began"
            f" {before[:16]}; training continues with the new code"
        )
