"""The contents of a checkpoint, decoded from verified bytes, only ever with `weights_only=True`."""

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import StorageError, one_line
from pipeline.lazy import addon
from pipeline.record.checkpoint_files import FORMAT, read_verified

_MODEL_PARTS = {"model": dict, "average": dict | None, "config": str, "classes": list}
_STATE_PARTS = _MODEL_PARTS | {
    "step": int, "optimizer": dict, "scaler": dict, "totals": Tensor, "evaluation": dict | None,
    "best": dict | None, "bad_images": dict, "data": str, "world": int,
}  # fmt: skip


def decode(data: bytes, origin: Path | str, parts: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the contents of verified bytes.

    Raises StorageError for any other format, or if one of `parts` (kind by name) is missing.
    """
    try:
        addon("models.archive").check_archive(data)
        contents = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen kinds for what is not its own
        raise StorageError(f"{origin} is not a checkpoint: {one_line(error)}") from None
    stated = contents.get("format") if isinstance(contents, dict) else None
    if stated != FORMAT:
        raise StorageError(f"{origin} has format {stated}; this version reads format {FORMAT}")
    for name, kinds in (parts or {}).items():
        found = contents.get(name, ...)
        if not isinstance(found, kinds) or (
            name == "classes" and not all(isinstance(label, str) for label in found)
        ):
            raise StorageError(
                f"{origin} is not a checkpoint of this pipeline: its part '{name}' is missing or damaged"
            )
    return dict(contents)


def read_model(path: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint. Raises StorageError if it is damaged or has no model."""
    return decode(read_verified(path), path, _MODEL_PARTS)


def decode_state(data: bytes, path: Path) -> dict[str, Any]:
    """Return the contents of verified bytes. Raises StorageError if a part to resume is missing."""
    return decode(data, path, _STATE_PARTS)
