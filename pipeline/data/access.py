"""Access to image files: tells the defect of one file from an outage of its storage."""

import errno
import os
import re
import stat
import unicodedata
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import RequestError, TemporaryError

EXTENSIONS = (
    b".jpg", b".jpeg", b".png", b".webp", b".bmp", b".gif", b".tif", b".tiff", b".jfif", b".jpe", b".jif", b".jfi",
    b".mpo", b".apng", b".dib", b".pnm", b".ppm", b".pgm", b".pbm",
)  # fmt: skip
"""Extensions of the formats that `data.images` decodes."""
_SYSTEM_NAMES = {
    b"__macosx", b"icon\r", b"network trash folder", b"temporary items", b"lost+found", b"__pycache__",
    b"thumbs.db", b"ehthumbs.db", b"desktop.ini", b"$recycle.bin", b"system volume information", b"found.000",
    b"@eadir", b"#recycle", b"#snapshot", b"@recycle", b"@recently-snapshot", b"@__thumb", b"~snapshot",
}  # fmt: skip
"""Names in lower case that macOS, Linux, Windows and file servers add to a folder."""
_FILE_ERRORS = (
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ENXIO,
)  # fmt: skip
"""Errors that a single file can cause. Any other is the storage's: EIO, ESTALE, ETIMEDOUT, …"""

_OUTAGE_ERRORS = (
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH,
    errno.ENOTCONN, errno.ESHUTDOWN, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EREMOTEIO,
    errno.ENODEV,
)  # fmt: skip
"""Errors of a storage that is out of reach, in a read or a write."""

READ_FAILURES = (
    "denied", "missing", "slow_down", "server_error", "truncated", "wrong_bytes", "stalled", "unreachable", "ignored",
)  # fmt: skip
"""The kinds of failed attempts to read an image from a bucket, each of which is made again."""

PACK_FILE = "pack.json"
"""The file in the folder of a pack that lists its shards."""
_SPLIT_NAME = re.compile(
    r"(?:(?P<train>train|training|trn)|(?P<val>val|valid|validation|validate|eval|evaluation|dev|hold[\W_]*out)|"
    r"(?P<test>tests?|testing|tst)|(?P<other>images?|imgs?|jpegimages|labels?|annotations?|masks?|unlabell?ed))"
    r"(?:[\W_]*(?:sets?|data|datasets?|split|images?|imgs?|\d+))*",
    re.IGNORECASE,
)  # fmt: skip
HIDDEN = "hidden or system"
"""The reason for leaving out a file or folder for which `is_hidden` is true."""


def is_bucket(place: object) -> bool:
    """Return True for s3://…, False for a path of this machine."""
    return str(place).startswith("s3://")


class UnreadableError(Exception):
    """An image file that cannot be read, or that changed since it was indexed."""


class BadImage(NamedTuple):
    """An image that cannot be decoded, for people."""

    id: int
    name: str
    reason: str


class Images(Protocol):
    """The images of one split."""

    @property
    def labels(self) -> NDArray[np.int32]:
        """The class of each image, [N]."""

    @property
    def upright(self) -> bool:
        """Images are turned as their EXIF orientation says."""

    def __len__(self) -> int: ...
    def name(self, i: int) -> str: ...
    def label(self, i: int) -> int: ...
    def read(self, i: int) -> bytes | NDArray[np.uint8]:
        """Return the bytes of the file, or decoded pixels [3, H, W] uint8.

        Raises UnreadableError if this image cannot be read, OutageError if its storage cannot.
        """

    def expect(self, samples: Iterable[int]) -> None:
        """Prepare to read these images next, in this order. Only a bucket looks at them."""

    def pop_failed_reads(self) -> list[int]:
        """Return the failed attempts since the last call by `READ_FAILURES`; [] if not a bucket."""


class OutageError(TemporaryError):
    """The storage that holds the images cannot be read. It says nothing about any single image."""


PLACE_OF_DATA = "make it readable, or give its new place with data.root=FOLDER"
"""The remedy for data that cannot be read, or has moved."""


def open_regular(path: str | bytes, flags: int) -> int:
    """Return a descriptor of a regular file: the `opener` of `open` for files that may be hostile.

    A named pipe or a device would never end. Raises OSError.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ENXIO, "not a regular file", path)
    return descriptor


def is_hidden(name: bytes) -> bool:
    """Return True if a file or folder of this name is hidden, or if a system added it."""
    return name.lower() in _SYSTEM_NAMES or (name.startswith(b".") and name not in (b".", b".."))


def is_image(path: bytes) -> bool:
    """Return True if a file has the name of an image, and no part of its path is hidden."""
    return path.lower().endswith(EXTENSIONS) and not any(map(is_hidden, path.split(b"/")))


def why_ignored(name: bytes) -> str:
    """Return the reason for leaving out a file that has not the name of an image."""
    if is_hidden(name):
        return HIDDEN
    extension = re.fullmatch(rb".+(\.\w{1,10})", name, re.DOTALL)
    return f"extension {extension[1].lower().decode()}" if extension else "without an extension"


def split_of(folder: bytes) -> str | None:
    """Return "train", "val", "test" or "other" for a name of a split or of its parts, else None."""
    match = _SPLIT_NAME.fullmatch(folder.decode(errors="replace").strip())
    return match and match.lastgroup


def normal_path(path: bytes) -> bytes:
    """Return a path in Unicode's form NFC: macOS may spell an accent as a character of its own."""
    with suppress(UnicodeDecodeError):
        return path if path.isascii() else unicodedata.normalize("NFC", path.decode()).encode()
    return path


def class_of(folder: bytes | str) -> str:
    """Return the name of the class in a folder: printable, in NFC and without outer blanks.

    Folders on two systems, or in train/ and val/, that look alike hold one class.
    """
    name = folder.encode(errors="backslashreplace") if isinstance(folder, str) else folder
    with suppress(UnicodeDecodeError):
        name = normal_path(name).decode().strip().encode() or name
    return printable_name(name)


def escaped_name(name: bytes) -> str:
    """Return a name for a message, with Python's spelling if another name could look like it."""
    text = name.decode(errors="backslashreplace")
    is_plain = text.isascii() and text.isprintable() and text == text.strip()
    return text if is_plain else f"{printable_name(name).strip()} ({text!a})"


def printable_name(name: bytes | str) -> str:
    """Return a file name as one printable line: other bytes are escaped."""
    text = name if isinstance(name, str) else name.decode("utf-8", "backslashreplace")
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def is_outage(error: OSError) -> bool:
    """Return True if the storage caused the error, whatever the file."""
    return error.errno not in _FILE_ERRORS


def outage_error(path: bytes | Path, error: OSError) -> OutageError:
    """Return the OutageError that names the file and the system's error."""
    return OutageError(
        f"the data is out of reach ({printable_name(os.fsencode(path))}: {error.strerror})",
        "give the same command again once it is back",
    )


def storage_outage(what: str | Path, error: OSError) -> TemporaryError | None:
    """Return the error of `what`, which is no image, if its storage is out of reach, else None."""
    if error.errno not in _OUTAGE_ERRORS:
        return None
    return TemporaryError(
        f"{what} is out of reach ({error.strerror})", "give the same command again once its storage is back"
    )


def raise_if_outage(path: bytes | Path, error: OSError) -> None:
    """Raise OutageError if the storage caused the error."""
    if is_outage(error):
        raise outage_error(path, error) from None


def read_error(path: bytes, error: OSError) -> UnreadableError | OutageError:
    """Return what a failed read of an indexed file means: a defect of this file, or an outage.

    It is the file's own defect if its folder can be listed and the file still cannot be opened. An
    unmounted volume leaves no folder, or an empty one.
    """
    if not is_outage(error) and is_non_empty_folder(os.path.dirname(os.path.realpath(path))):
        try:
            open(path, "rb", buffering=0, opener=open_regular).close()  # the storage may be back by now
        except OSError as again:
            if not is_outage(again):
                return UnreadableError(again.strerror)
    return outage_error(path, error)


def is_non_empty_folder(folder: bytes | Path) -> bool:
    """Return True if the folder exists, can be listed and is not empty."""
    with suppress(OSError), os.scandir(folder) as entries:
        return any(True for _ in entries)
    return False


def check_folder(root: Path, given: str, remedy: str) -> None:
    """Raise RequestError if `root` is not a folder that can be listed.

    given: what the user wrote. remedy: what to do if it is not a folder. Raises OutageError if the
    storage fails.
    """
    try:
        os.scandir(root).close()
    except (FileNotFoundError, NotADirectoryError):
        raise RequestError(f"{given} is not a folder", remedy) from None
    except OSError as error:
        raise_if_outage(root, error)
        raise RequestError(f"{given} cannot be read: {error.strerror}") from None
