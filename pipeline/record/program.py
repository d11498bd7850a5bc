"""The weights of an exported program (torch's `.pt2` archive), read as plain bytes.

Promise: nothing in the archive runs. `torch.export.load` unpickles parts of it without any restriction, so it is not used
here: the archive is a zip file with the raw bytes of each tensor and a JSON table that says which bytes are which tensor.
Names, shapes and types must be those of a model that this program builds by itself.
"""

import json
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import StorageError

MAX_BYTES = 4 << 30
"""Larger than any model of torchvision: 645 million weights of 4 bytes, and the program."""
_TABLE = "data/weights/model_weights_config.json"
_MAX_TABLE_BYTES = 16 << 20
# torch._export.serde.schema.ScalarType, for the types that a model's state has
_CODES = {torch.float32: 7, torch.int64: 5}


def read_weights(path: Path, prefix: str, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors named `prefix` + name in the archive, for each name in `expected` (shapes and types alone count).

    StorageError if the archive is not one, or holds anything else than the expected tensors.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (table,) = (entry for entry in archive.infolist() if entry.filename.endswith("/" + _TABLE))
            folder = table.filename.rpartition("/")[0]
            rows = json.loads(_member(archive, table.filename, _MAX_TABLE_BYTES))["config"]
            mine = {name.removeprefix(prefix): row for name, row in rows.items() if name.startswith(prefix)}
            if mine.keys() != expected.keys():
                raise ValueError(f"{len(mine.keys() ^ expected.keys())} tensors are missing or too many")
            return {name: _tensor(archive, folder, mine[name], like) for name, like in expected.items()}
    except Exception as error:  # zipfile, json and torch raise a dozen kinds for what is not an archive of a program
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise StorageError(
            f"{path.name} does not hold the weights of the model that its description names ({why})"
        ) from None


def _tensor(archive: zipfile.ZipFile, folder: str, row: dict[str, Any], like: Tensor) -> Tensor:
    meta, name = row["tensor_meta"], str(row["path_name"])
    shape, strides = ([int(one["as_int"]) for one in meta[key]] for key in ("sizes", "strides"))
    if row["use_pickle"] is not False:
        raise ValueError(f"{name} is pickled")
    if tuple(shape) != like.shape or meta["dtype"] != _CODES.get(like.dtype):
        raise ValueError(f"{name} is of another shape or type")
    if not like.numel():
        return torch.empty(shape, dtype=like.dtype)
    data = bytearray(_member(archive, f"{folder}/{name}", like.numel() * like.itemsize))
    flat = torch.frombuffer(data, dtype=like.dtype)
    return flat.as_strided(shape, strides, int(meta["storage_offset"]["as_int"]))  # torch checks the bounds


def _member(archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    """Return the bytes of a member. ValueError if it is compressed, since it could then unpack to more than it states."""
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > limit:
        raise ValueError(f"{name} is compressed or too large")
    return archive.read(entry)
