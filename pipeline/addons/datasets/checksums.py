"""SHA256SUMS of an image folder: the SHA-256 of each image, as the tool `sha256sum` writes it."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.addons.datasets.file_errors import open_regular
from pipeline.addons.datasets.index import Index
from pipeline.addons.datasets.names import is_image, normal_path, printable_name
from pipeline.addons.models.inputs import target_of
from pipeline.errors import RequestError, StorageError
from pipeline.files import atomic_write

SUMS = "SHA256SUMS"


def write_sums(root: Path, index: Index, digests: NDArray[np.uint8]) -> None:
    """Write SHA256SUMS over all images of the index. digests: [N, 32], train before val."""
    lines = []
    for name, digest in zip(index.names(), digests, strict=True):
        escaped = name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n")
        prefix = b"\\" if escaped != name else b""
        lines.append(prefix + digest.tobytes().hex().encode() + b"  " + escaped + b"\n")
    try:
        atomic_write(target_of(root / SUMS), b"".join(lines))
    except OSError as error:
        raise StorageError(f"{root / SUMS} cannot be written: {error.strerror}") from None


def check_sums(root: Path, index: Index, digests: NDArray[np.uint8]) -> Iterator[tuple[str, str]]:
    """Yield (name, defect) of each image that differs from its sum or has none.

    digests: [N, 32], train before val; zeros for an image that cannot be decoded, which is not
    compared. Other names in SHA256SUMS are not opened: they may lead anywhere.
    """
    names, expected = list(index.names()), np.concatenate([index.train.sums, index.val.sums]).reshape(-1, 32)
    has_sum = expected.any(1)
    for i in np.flatnonzero(has_sum & digests.any(1) & (digests != expected).any(1)).tolist():
        yield printable_name(names[i]), f"has changed: its content is not that of {SUMS}"
    for i in np.flatnonzero(~has_sum).tolist():
        yield printable_name(names[i]), f"has no sum in {SUMS}"
    known = {normal_path(name) for name in names}
    for name in {normal_path(name): name for name in read_sums(root) or {}}.values():
        if normal_path(name) not in known and is_image(name):
            yield printable_name(name), f"has a sum in {SUMS}, but is not an image of this folder"


def read_sums(root: Path) -> dict[bytes, bytes] | None:
    """Return the SHA-256 of each file name, or None if there is no SHA256SUMS.

    It has each name as the file spells it and in NFC, because another system may have written it.
    Raises RequestError that names a line which `sha256sum` would not have written.
    """
    data = _read(root)
    if data is None:
        return None
    sums = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        match = re.fullmatch(rb"(\\?)([0-9a-f]{64}) [ *](?:\./)?(.+)", line, re.DOTALL)
        if match:
            name = re.sub(rb"\\(.)", lambda pair: {b"n": b"\n", b"r": b"\r"}.get(pair[1], pair[1]), match[3])
            sums[name if match[1] else match[3]] = bytes.fromhex(match[2].decode())
        elif line:
            place = f"{root / SUMS} line {number}"
            raise RequestError(f"{place} is not a sum and a file name", "write the file again, or remove it")
    return {normal_path(name): digest for name, digest in sums.items()} | sums


def digest_of_sums(root: Path) -> str | None:
    """Return the SHA-256 of the file SHA256SUMS, or None if there is none. Raises OSError."""
    data = _read(root)
    return None if data is None else hashlib.sha256(data).hexdigest()


def _read(root: Path) -> bytes | None:
    with suppress(FileNotFoundError), open(root / SUMS, "rb", opener=open_regular) as file:
        return file.read()
    return None
