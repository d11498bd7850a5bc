"""Reads of image files: tells the defect of one file from an outage of its storage."""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from pipeline.addons.datasets.names import printable_name
from pipeline.data.interface import OutageError, UnreadableError

_FILE_ERRORS = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR, errno.EISDIR,
                errno.ENAMETOOLONG, errno.ENXIO)  # fmt: skip
"""Errors of a read that a single file can cause. Any other is the storage's: EIO, ESTALE, …"""
PLACE_OF_DATA = "make it readable, or give its new place with data.root=FOLDER"
"""The remedy for data that cannot be read, or has moved."""


def open_regular(path: str | bytes, flags: int) -> int:
    """Open a file as the `opener` of `open`; no pipe or device: they never end. Raises OSError."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ENXIO, "not a regular file", path)
    return descriptor


def outage_error(path: bytes | Path, error: OSError) -> OutageError:
    problem = f"the data is out of reach ({printable_name(os.fsencode(path))}: {error.strerror})"
    return OutageError(problem, "give the same command again once it is back")


def raise_if_outage(path: bytes | Path, error: OSError) -> None:
    """Raise OutageError if the storage of the data caused the error, whatever the file."""
    if error.errno not in _FILE_ERRORS:
        raise outage_error(path, error) from None


def read_error(path: bytes, error: OSError) -> UnreadableError | OutageError:
    """Return what a failed read of an indexed file means: a defect of this file, or an outage.

    It is the file's own defect if its folder can be listed and the file still cannot be opened. An
    unmounted volume leaves no folder, or an empty one.
    """
    if error.errno in _FILE_ERRORS and is_non_empty_folder(os.path.dirname(os.path.realpath(path))):
        try:
            open(path, "rb", buffering=0, opener=open_regular).close()  # the storage may be back by now
        except OSError as again:
            if again.errno in _FILE_ERRORS:
                return UnreadableError(again.strerror)
    return outage_error(path, error)


def is_non_empty_folder(folder: bytes | Path) -> bool:
    """Return True if the folder exists, can be listed and is not empty."""
    with suppress(OSError), os.scandir(folder) as entries:
        return next(entries, None) is not None
    return False
