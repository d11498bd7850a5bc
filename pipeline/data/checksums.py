"""SHA256SUMS of an image folder: the SHA-256 of each image, as the tool `sha256sum` writes it."""

import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from pipeline.data.access import OutageError, is_image, normal_path, open_regular, printable_name, read_error
from pipeline.data.index import MAX_FILE_BYTES, Index
from pipeline.errors import RequestError, StorageError
from pipeline.files import atomic_write, target_of

SUMS = "SHA256SUMS"
_TASKS_AT_ONCE = 10_000  # each task in the queue of a pool takes 1 KB


def write_sums(root: Path, index: Index) -> None:
    """Write SHA256SUMS over all images of the index. Raises RequestError if one cannot be read."""
    names = list(index.names())
    lines = []
    for name, digest in zip(names, _digests(root, names), strict=True):
        if digest is None:
            raise RequestError(f"{printable_name(name)} cannot be read: no sums written; fix or remove it first")
        escaped = name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n")
        prefix = b"\\" if escaped != name else b""
        lines.append(prefix + digest.hex().encode() + b"  " + escaped + b"\n")
    try:
        atomic_write(target_of(root / SUMS), b"".join(lines))
    except OSError as error:
        raise StorageError(f"{root / SUMS} cannot be written: {error.strerror}") from None


def check_sums(root: Path, index: Index) -> Iterator[tuple[str, str]]:
    """Yield (name, defect) of each image that is unreadable, differs from its sum or has none.

    Other names in SHA256SUMS are not opened: they may lead anywhere. Those of images are reported.
    """
    expected, names = read_sums(root) or {}, list(index.names())
    sums = {name: expected.get(name, expected.get(normal_path(name))) for name in names}
    listed = [name for name in names if sums[name]]
    for name, digest in zip(listed, _digests(root, listed), strict=True):
        if digest is None:
            yield printable_name(name), "cannot be read"
        elif digest != sums[name]:
            yield printable_name(name), f"has changed: its content is not that of {SUMS}"
    for name in names:
        if not sums[name]:
            yield printable_name(name), f"has no sum in {SUMS}"
    known = {normal_path(name) for name in names}
    for normal, name in {normal_path(name): name for name in expected}.items():
        if normal not in known and is_image(name):
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
    """Return the SHA-256 of the file SHA256SUMS, or None if there is none."""
    data = _read(root)
    return None if data is None else hashlib.sha256(data).hexdigest()


def _read(root: Path) -> bytes | None:
    """Return the file SHA256SUMS, or None if there is none. Raises OSError."""
    with suppress(FileNotFoundError), open(root / SUMS, "rb", opener=open_regular) as file:
        return file.read()
    return None


def _digests(root: Path, names: list[bytes]) -> Iterator[bytes | None]:
    """Yield the SHA-256 of each file, or None if it is unreadable. Raises OutageError."""

    def digest(name: bytes) -> bytes | None:
        path = os.path.join(os.fsencode(root), name)
        try:
            with open(path, "rb", opener=open_regular) as file:
                is_image = os.fstat(file.fileno()).st_size <= MAX_FILE_BYTES
                return hashlib.file_digest(file, "sha256").digest() if is_image else None
        except OSError as error:
            failure = read_error(path, error)
            if isinstance(failure, OutageError) and not os.path.islink(path):  # a dangling link is a defect here
                raise failure from None
            return None

    with ThreadPoolExecutor(8) as pool:  # hashing and reading release the interpreter's lock
        for start in range(0, len(names), _TASKS_AT_ONCE):
            yield from pool.map(digest, names[start : start + _TASKS_AT_ONCE])
