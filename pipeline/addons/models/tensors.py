"""The first tensor that differs between the checkpoints of two runs, for `pipeline verify`."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def first_different_tensor(files: list[tuple[int, Path, Path]]) -> str:
    """Return the first tensor that differs between checkpoints, as a phrase, or "".

    files: step, the run's checkpoint, and that of the repetition.
    """
    for step, old, new in files:
        if found := _first_difference(old, new):
            return f"at step {step} the first tensor to differ is {found}"
    return ""


def _first_difference(old_path: Path, new_path: Path) -> str | None:
    """Return the first tensor that differs between two checkpoints, with details, or None."""
    import torch

    old, new = _load_tensors(old_path), _load_tensors(new_path)
    different = [name for name in old | new if not _same_bits(old.get(name), new.get(name))]
    if not different:
        return None
    first = different[0]
    distance = ""
    if first in old and first in new and old[first].shape == new[first].shape:
        largest = float((old[first].to(torch.float64) - new[first].to(torch.float64)).abs().max())
        distance = f", this one by up to {largest:.3g}"
    return f"{first} ({len(different)} of {len(old | new)} differ{distance})"


def _load_tensors(path: Path) -> dict[str, "Tensor"]:
    from pipeline.record.checkpoint import decode
    from pipeline.record.checkpoint_files import read_verified

    contents = decode(read_verified(path), path)
    return dict(_tensors({part: contents[part] for part in ("model", "average", "optimizer")}))


def _tensors(tree: Any, name: str = "") -> Iterator[tuple[str, "Tensor"]]:
    """Yield every tensor of a nested state with its dotted name, in the model's order."""
    from torch import Tensor

    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, dict):
        for key, child in tree.items():
            yield from _tensors(child, f"{name}.{key}" if name else str(key))


def _same_bits(a: "Tensor | None", b: "Tensor | None") -> bool:
    import torch

    if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)))
