"""The header of a JPEG file, read without a decoder: size, metadata and orientation."""

import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

EOI, SOS, APP1 = 0xD9, 0xDA, 0xE1
SEQUENTIAL = (0xC0, 0xC1)
_FRAMES = (*SEQUENTIAL, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF)
CUTS, CUTS_NAME = 0xE7, b"restarts\0"
"""A segment (APP7) that packs write, so that a reader need not search for restart markers."""
ORIENTATION = 0x0112
_EXIF, _EXIF_INTEGERS = b"Exif\0\0", {1: "B", 3: "H", 4: "I"}
_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_CONTEXT = 16  # rows below a crop: chroma, with one row for at most four, is interpolated from neighbours


class Frame(NamedTuple):
    height: int
    width: int
    is_sequential: bool
    position: int  # offset of the height; the width follows it
    scan: int  # offset of the first entropy-coded byte
    # start and end of what follows `CUTS_NAME`, see `addons.datasets.jpeg_restarts`
    cuts: tuple[int, int] | None
    metadata: tuple[bytes, ...]  # the segments that may hold Exif or XMP data


def frame(data: bytes) -> Frame | None:
    """Return the frame of a JPEG, or None if `data` is not a JPEG with a well-formed header."""
    found, cuts, metadata = None, None, []
    for marker, start, end in header(data):
        if marker == CUTS and data.startswith(CUTS_NAME, start + 4):
            cuts = (start + 4 + len(CUTS_NAME), end)
        elif marker == APP1:
            metadata.append(data[start + 4 : end])
        elif marker in _FRAMES and end - start >= 10:
            height, width = struct.unpack_from(">HH", data, start + 5)
            found = Frame(height, width, marker in SEQUENTIAL, start + 5, 0, None, ())
        elif marker == SOS and found and found.height and found.width:
            return found._replace(scan=end, cuts=cuts, metadata=tuple(metadata))
    return None


def header(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, start, end) of each segment up to the first scan, including the marker.

    Stops early if the bytes are not a segment.
    """
    at, marker = 2, 0
    while data[:2] == b"\xff\xd8" and marker != SOS and at + 4 <= len(data) and data[at] == 0xFF:
        marker, end = data[at + 1], at + 2 + (data[at + 2] << 8 | data[at + 3])
        if marker < 0xC0 or 0xD0 <= marker <= EOI or marker == 0xFF or end < at + 4 or end > len(data):
            return
        yield marker, at, end
        at = end


def orientation(frame: Frame) -> int:
    """Return the EXIF orientation as it is written, or that of XMP, as Pillow does; else 1."""
    for segment in frame.metadata:
        with suppress(struct.error):  # a damaged segment
            if segment.startswith(_EXIF) and (found := _exif_orientation(segment.removeprefix(_EXIF))):
                return found
    return next((int(match[1]) for segment in frame.metadata if (match := _XMP.search(segment))), 1)


def _exif_orientation(exif: bytes) -> int | None:
    """Return the orientation in Exif data, or None. Pillow takes 0.6 ms to read all of their tags.

    Exif 2.32, 4.6.2: an image file directory has a count and entries of 12 bytes: tag, type, number
    of values, value. Raises struct.error if it ends early.
    """
    order = "<" if exif.startswith(b"II") else ">"
    (start,) = struct.unpack_from(f"{order}I", exif, 4)
    (count,) = struct.unpack_from(f"{order}H", exif, start)
    for at in range(start + 2, start + 2 + 12 * count, 12):
        tag, kind = struct.unpack_from(f"{order}HH", exif, at)
        if tag == ORIENTATION and kind in _EXIF_INTEGERS:
            return int(struct.unpack_from(order + _EXIF_INTEGERS[kind], exif, at + 8)[0])
    return None


def upper(data: bytes, frame: Frame, bottom: int) -> bytearray:
    """Return a JPEG with at least the rows above `bottom`, by lowering the height in its header.

    A sequential file is decoded from the top, so the rest is only skipped.
    """
    made = bytearray(data)
    struct.pack_into(">H", made, frame.position, min(frame.height, bottom + _CONTEXT))
    return made
