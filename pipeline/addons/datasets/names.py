"""Names of files and folders: which are images, which class a folder is, how a name is printed."""

import re
import unicodedata
from contextlib import suppress

EXTENSIONS = (b".jpg", b".jpeg", b".png", b".webp", b".bmp", b".gif", b".tif", b".tiff", b".jfif", b".jpe",
              b".jif", b".jfi", b".mpo", b".apng", b".dib", b".pnm", b".ppm", b".pgm", b".pbm")  # fmt: skip
"""Extensions of the formats that `addons.datasets.images` decodes."""
_SYSTEM_NAMES = {
    b"__macosx", b"icon\r", b"network trash folder", b"temporary items", b"lost+found", b"__pycache__",
    b"thumbs.db", b"ehthumbs.db", b"desktop.ini", b"$recycle.bin", b"system volume information", b"found.000",
    b"@eadir", b"#recycle", b"#snapshot", b"@recycle", b"@recently-snapshot", b"@__thumb", b"~snapshot",
}  # fmt: skip
"""Names in lower case that macOS, Linux, Windows and file servers add to a folder."""
HIDDEN = "hidden or system"
"""The reason for leaving out a file or folder for which `is_hidden` is true."""


def is_hidden(name: bytes) -> bool:
    """Return True if a file or folder of this name is hidden, or if a system added it."""
    return name.lower() in _SYSTEM_NAMES or (name.startswith(b".") and name not in (b".", b".."))


def is_image(path: bytes) -> bool:
    """Return True if a file has the name of an image, and no part of its path is hidden."""
    return path.lower().endswith(EXTENSIONS) and not any(map(is_hidden, path.split(b"/")))


def why_ignored(name: bytes) -> str:
    extension = re.fullmatch(rb".+(\.\w{1,10})", name, re.DOTALL)
    return f"extension {extension[1].lower().decode()}" if extension else "without an extension"


def normal_path(path: bytes) -> bytes:
    """Return a path in Unicode's form NFC: macOS may spell an accent as a character of its own."""
    if not path.isascii():
        with suppress(UnicodeDecodeError):
            return unicodedata.normalize("NFC", path.decode()).encode()
    return path


def class_of(folder: bytes | str) -> str:
    """Return the name of the class in a folder: printable, in NFC and without outer blanks.

    Folders on two systems, or in train/ and val/, that look alike hold one class.
    """
    name = folder.encode(errors="backslashreplace") if isinstance(folder, str) else folder
    with suppress(UnicodeDecodeError):
        name = normal_path(name).decode().strip().encode() or name
    return printable_name(name)


def printable_name(name: bytes | str) -> str:
    """Return a file name as one printable line: other bytes are escaped."""
    text = name if isinstance(name, str) else name.decode("utf-8", "backslashreplace")
    return text if text.isprintable() else text.encode("unicode_escape").decode()
