"""The weights of an exported program (torch's `.pt2` archive), read as plain bytes.

Promise: nothing in the archive runs. `torch.export.load` unpickles parts of it without any
restriction, so it is not used here: the archive is a zip file with the raw bytes of each tensor and
a JSON table that says which bytes are which tensor. Names, shapes and types must be those of a
model that this program builds itself.
"""

import json
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import StorageError, one_line

_TABLE = "data/weights/model_weights_config.json"
_MAX_TABLE_BYTES = 16 << 20
# torch._export.serde.schema.ScalarType, for the types that a model's state has
_DTYPE_CODES = {torch.float32: 7, torch.int64: 5}


def read_weights(path: Path, prefix: str, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that the archive holds as `prefix` + name, for each name in `expected`.

    expected: only shapes and types are compared. Raises StorageError if the file is not such an
    archive, or if a tensor is missing, unexpected, or of another shape or type.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (table,) = (name for name in archive.namelist() if name.endswith("/" + _TABLE))
            folder = table.rpartition("/")[0]
            rows = json.loads(_read_member(archive, table, _MAX_TABLE_BYTES))["config"]
            if {name for name in rows if name.startswith(prefix)} != {prefix + name for name in expected}:
                raise ValueError("tensors are missing or unexpected")
            return {
                name: _read_tensor(archive, folder, rows[prefix + name], like)
                for name, like in expected.items()
            }
    # zipfile, json and torch raise a dozen kinds for what is not an archive of a program
    except Exception as error:
        why = one_line(error) or type(error).__name__
        problem = f"{path.name} does not hold the weights of the model that its MLmodel describes"
        raise StorageError(f"{problem} ({why})") from None


def _read_tensor(archive: zipfile.ZipFile, folder: str, row: dict[str, Any], like: Tensor) -> Tensor:
    meta, name = row["tensor_meta"], str(row["path_name"])
    shape, strides = ([int(length["as_int"]) for length in meta[key]] for key in ("sizes", "strides"))
    is_expected = tuple(shape) == like.shape and meta["dtype"] == _DTYPE_CODES.get(like.dtype)
    if row["use_pickle"] is not False or not is_expected:
        raise ValueError(f"{name} is pickled, or has another shape or type")
    if not like.numel():
        return torch.empty(shape, dtype=like.dtype)
    data = _read_member(archive, f"{folder}/{name}", like.numel() * like.itemsize)
    flat = torch.frombuffer(bytearray(data), dtype=like.dtype)
    return flat.as_strided(shape, strides, int(meta["storage_offset"]["as_int"]))  # torch checks the bounds


def _read_member(archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    entry = archive.getinfo(name)
    # a compressed one could unpack to more bytes than it states
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > limit:
        raise ValueError(f"{name} is compressed or too large")
    return archive.read(entry)
