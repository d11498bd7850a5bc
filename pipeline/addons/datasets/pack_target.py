"""Places that `pipeline data pack` writes to: a folder, or s3://bucket/prefix.

Promise: in both, a file of the pack has its name only once it is complete. A folder has a lock: one
process packs into it. A bucket has none, because it would outlive a killed process: one start at a
time is to pack into a prefix. Different requests cannot share a prefix: the first to write its
request there keeps it.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedRandom
from pathlib import Path

from pipeline.addons.datasets.pack import REQUEST
from pipeline.addons.deploy.takeover import has_name, lock
from pipeline.addons.store.bucket import ConflictError, MissingError, Store
from pipeline.errors import RequestError, StorageError, TemporaryError
from pipeline.files import atomic_write, replacing, temporary_sibling

_LOCK = ".lock"
_LOCK_TIMEOUT_S = 5


class Folder:
    """The folder of one pack. Names are those of its files."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def is_empty(self) -> bool:
        """Return True if nothing is there that keeps a first start from packing into it."""
        ignored = (_LOCK, temporary_sibling(self._path / REQUEST).name)
        return all(path.name in ignored for path in self._path.iterdir())

    def read(self, name: str) -> bytes | None:
        """Return a file, or None if there is none."""
        with suppress(FileNotFoundError):
            return (self._path / name).read_bytes()
        return None

    def write(self, name: str, data: bytes) -> None:
        atomic_write(self._path / name, data)

    write_first = write  # this process holds the lock

    @contextmanager
    def create(self, name: str) -> Iterator[BufferedRandom]:
        """Yield a new file on a local disk. It gets its name if the block succeeds."""
        with replacing(self._path / name) as temporary, open(temporary, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def hidden(self) -> list[str]:
        """Return the hidden JSON files that an incomplete pack has: its request and metadata."""
        return [path.name for path in self._path.glob(".*.json")]

    def clean(self) -> None:
        """Remove the hidden files, which a complete pack does not need."""
        for name in self.hidden():
            (self._path / name).unlink()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep other processes out if the place has a lock. Raise errors of the disk as ours."""
        path = self._path / _LOCK
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            with ExitStack() as stack:
                while True:
                    file = stack.enter_context(open(path, "w", encoding="utf-8"))
                    # the workers of a killed command hold its lock for another instant
                    if not lock(file.fileno(), _LOCK_TIMEOUT_S, inherited=True):
                        raise TemporaryError(f"{self._path} is being packed by another process: wait for it")
                    if has_name(file.fileno(), path):  # else its last holder has removed it meanwhile
                        break
                try:
                    yield
                except RequestError:  # after another error, workers may still write and hold the lock
                    path.unlink()
                    raise
                path.unlink()
        except (FileExistsError, NotADirectoryError):
            raise RequestError(f"{self._path} is not a folder: name one, or a new one") from None
        except OSError as error:
            raise StorageError(f"{self._path} cannot be written: {error.strerror}") from None


class Bucket:
    """The same for a place in a bucket."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def is_empty(self) -> bool:
        return next(self._store.list(), None) is None

    def read(self, name: str) -> bytes | None:
        with suppress(MissingError):
            return self._store.read(name)
        return None

    def write(self, name: str, data: bytes) -> None:
        self._store.write(name, data)

    def write_first(self, name: str, data: bytes) -> None:
        """Write a file unless another start has."""
        with suppress(ConflictError):
            self._store.write(name, data, if_absent=True)

    @contextmanager
    def create(self, name: str) -> Iterator[BufferedRandom]:
        # a file without a name: the kernel frees it however this process ends
        with tempfile.TemporaryFile() as file:
            yield file
            file.flush()
            self._store.upload(Path(f"/proc/self/fd/{file.fileno()}"), name)

    def hidden(self) -> list[str]:
        return [stored.name for stored in self._store.list(".") if stored.name.endswith(".json")]

    def clean(self) -> None:
        for name in self.hidden():
            self._store.delete(name)

    @contextmanager
    def hold(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            problem = f"the shards on their way to {self._store} cannot be written ({error})"
            raise StorageError(f"{problem}: make room, or set TMPDIR to a folder on a larger disk") from None


Target = Folder | Bucket


def open_target(place: Path | Store) -> Target:
    """Return the target of this place. A forked process opens its own: a Store survives no fork."""
    return Folder(place) if isinstance(place, Path) else Bucket(Store(place.place))
