"""A state dict from a file that another program wrote."""

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.addons.models.archive import check_archive
from pipeline.errors import RequestError, StorageError, one_line


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file that safetensors or torch.save wrote, by name.

    A training program's dict around them (`state_dict`, `model`, `model_state_dict`) and DDP's
    prefix are removed. Raises StorageError if the file holds no state dict.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            found: Any = load_file(path)
        else:
            data = path.read_bytes()
            if data.startswith(b"PK"):  # torch's format before 1.6 is no archive
                check_archive(data)
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        for name in ("state_dict", "model", "model_state_dict"):
            if isinstance(found.get(name), dict):
                found = found[name]
        tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        weights = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
        if not weights:
            raise ValueError("it holds no tensors")
    except ImportError:
        raise RequestError(f"{path} needs safetensors", "pip install safetensors") from None
    except Exception as error:  # torch and safetensors raise half a dozen kinds for what is not their own
        raise StorageError(f"{path} is not a state dict: {one_line(error)}") from None
    return weights
