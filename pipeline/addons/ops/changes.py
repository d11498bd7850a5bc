"""The differences between a start and the run that it resumes, in words."""

from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.addons.datasets.folders import changes
from pipeline.addons.datasets.manifest import find_cached_index
from pipeline.addons.datasets.sources import data_root
from pipeline.addons.models.functions import meta_model
from pipeline.addons.ops.fixed_keys import differences
from pipeline.config.schema import Config
from pipeline.data.interface import Source
from pipeline.errors import RequestError, list_first


def describe_data_change(config: Config, source: Source, before: str, fallback_cache: Path) -> str:
    """Return how the data differs from that with digest `before`, if its index is cached."""
    index = source.index and find_cached_index(data_root(config), fallback_cache, before)
    if not index or not source.index:
        return f"its digest is {source.digest[:16]}, not {before[:16]}"
    return list_first(list(changes(index, source.index)) or ["its names are sorted in another way"], 3)


def refuse_another_model(contents: dict[str, Any], config: Config, path: Path) -> None:
    """Raise RequestError if the weights do not fit the model that this start builds."""
    now = meta_model(config.model, len(contents["classes"])).state_dict()
    if changed := differences(_shapes(contents["model"]), _shapes(now)):
        problem = f"model.arch={config.model.arch} is not the model in {path}: {list_first(changed, 1)}"
        raise RequestError(problem, f"restore the code that made it, or {config.start_again}")


def _shapes(weights: dict[str, Any]) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in weights.items() if isinstance(value, Tensor)}
