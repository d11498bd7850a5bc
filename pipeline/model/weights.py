"""State dicts are loaded with the format versions of the modules in them.

torch keeps these versions in `_metadata`, an attribute of what `state_dict` returns. A dict of the
same tensors lacks it. A module then may take its own weights for those of an older version:
torchvision's MNASNet refuses them.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def load_weights(model: nn.Module, weights: dict[str, Tensor], *, strict: bool = True) -> None:
    """Load a state dict. Raises RuntimeError or ValueError if it does not fit the model.

    A module whose version it does not state wrote it in its own version: copies, safetensors and
    checkpoints of version 0.2 state none.
    """
    versions = getattr(model.state_dict(), "_metadata", {})
    stated = getattr(weights, "_metadata", None)
    for name, entry in stated.items() if isinstance(stated, dict) else ():  # a file may state anything
        if name in versions and isinstance(entry, dict) and isinstance(entry.get("version"), int):
            versions[name]["version"] = entry["version"]
    model.load_state_dict(_with_versions(weights, versions), strict=strict)


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a nested state with `change` applied to each tensor, and with its versions."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return replace_tensors(value, {key: map_tensors(inner, change) for key, inner in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(inner, change) for inner in value)
    return value


def replace_tensors(state: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """Return `tensors` with the versions of `state`, if it has any."""
    versions = getattr(state, "_metadata", None)
    return tensors if versions is None else _with_versions(tensors, versions)


def _with_versions(tensors: dict[str, Any], versions: Any) -> dict[str, Any]:
    state = OrderedDict(tensors)
    state._metadata = versions  # type: ignore[attr-defined]
    return state
