"""The code that `pipeline k8s render --code FOLDER` sends to the pods, without building an image.

Promise: the same files give the same bytes, so applying them twice changes nothing. A pod unpacks
what it finds only if its SHA-256 is that in the Job, whose template is immutable, and no name in an
archive leads outside the folder.

    python3 -m pipeline.addons.deploy.code ARCHIVES SHA256 FOLDER
"""

import compileall
import hashlib
import io
import lzma
import os
import sys
import tarfile
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.errors import RequestError, RunError

_PART = 180 << 10  # bytes of a ConfigMap: `kubectl apply` repeats it in an annotation of 256 KiB at most
_MOST = 1 << 20


def pack(folder: Path) -> dict[str, Any]:
    """Return the modules and packages of a folder: digest, ConfigMaps' name and parts in base64.

    Raises RequestError if there are none, or if they are too large.
    """
    files, tar = list(_files_in(folder)), io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for path in files:
            entry, data = tarfile.TarInfo(path.relative_to(folder).as_posix()), path.read_bytes()
            entry.size = len(data)  # no times and owners
            archive.addfile(entry, io.BytesIO(data))
    data = lzma.compress(tar.getvalue())
    if not files:
        problem = f"--code {folder} has no Python module, and no package with an __init__.py"
        raise RequestError(problem, "give the folder above pipeline/, or that of your module")
    if len(data) > _MOST:
        problem = f"--code {folder} has {len(data) >> 10:,} KiB of modules, compressed; 1,024 are allowed"
        raise RequestError(problem, "build an image")
    digest = hashlib.sha256(data).hexdigest()
    parts = [b64encode(data[at : at + _PART]).decode() for at in range(0, len(data), _PART)]
    return {"digest": digest, "name": f"trainer-code-{digest[:12]}", "parts": parts}


def _files_in(folder: Path) -> Iterator[Path]:
    """Yield modules, and the files of packages, but no links and no caches."""
    for top in sorted(folder.iterdir()) if os.path.isdir(folder) else ():
        is_package = (top / "__init__.py").is_file()
        for path in sorted(top.rglob("*")) if is_package else [top]:
            names = path.relative_to(folder).parts
            is_left_out = path.is_symlink() or any(name.startswith((".", "__pycache__")) for name in names)
            if path.is_file() and not is_left_out and (is_package or path.suffix == ".py"):
                yield path


def unpack(archives: Path, digest: str, folder: Path) -> None:
    """Write the files in the parts of an archive, and compile them. Raises RequestError."""
    data = b"".join(path.read_bytes() for path in sorted(archives.glob("part-*")))
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        problem = f"the code in {archives} has the SHA-256 {found}, and the Job asks for {digest}"
        raise RequestError(problem, "apply all files of 'pipeline k8s render --code' again")
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:xz") as archive:
        for entry in archive:
            name, file = PurePosixPath(entry.name), archive.extractfile(entry) if entry.isreg() else None
            if file is None or name.is_absolute() or ".." in name.parts:
                raise RequestError(f"{entry.name!r} in the code is no file below its folder")
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(file.read())
    compileall.compile_dir(folder, quiet=2)  # the pods write nothing there


if __name__ == "__main__":
    try:
        unpack(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
    except RunError as error:
        print(f"pipeline: {error}", file=sys.stderr)
        sys.exit(error.code)
