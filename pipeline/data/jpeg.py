"""The structure of a JPEG: which bytes hold which rows, so that a crop costs little more than its own part of the file.

Promise: `part` of a file that `recode` made decodes to the very pixels that the whole file has there. Why that holds: a
decoder forgets everything at a restart marker, so the segments between markers can be taken out and put together anew; and
where chroma is interpolated from its neighbours, a little more is decoded than asked for. 70 % of a decode is reading the
entropy-coded bits: what is not read is not paid for.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

EOI, SOS, DHT, DRI = 0xD9, 0xDA, 0xC4, 0xDD
SEQUENTIAL = (0xC0, 0xC1)
FRAMES = (*SEQUENTIAL, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF)
BLOCK = 8
CUTS, CUTS_NAME, CUTS_HEAD = 0xE7, b"restarts\0", struct.Struct(">HBB")
"""A segment of our own: its name, MCUs from restart to restart, height and width of an MCU in pixels, and the bytes between
restarts, two for each of these. With it nobody has to look for the markers."""

_CONTEXT = 16  # rows: chroma is interpolated from its neighbours, of which there is one for at most four rows
_KINDS = np.resize(np.arange(0xD0, 0xD8, dtype=np.uint8), 1 << 16)
"""The second byte of each restart marker of a file, of which there are no more: `CUTS` is one segment."""


class Frame(NamedTuple):
    """What the header tells."""

    height: int
    width: int
    is_sequential: bool
    position: int
    """Of the height, with the width behind it."""
    scan: int
    """Of the first entropy-coded byte."""
    cuts: tuple[int, int] | None
    """Start and end of what follows `CUTS_NAME`, in a file that `recode` made."""


def frame(data: bytes) -> Frame | None:
    """None if this is no JPEG, or none with an orderly header."""
    found, cuts = None, None
    for marker, start, end in header(data):
        if marker == CUTS and data.startswith(CUTS_NAME, start + 4):
            cuts = (start + 4 + len(CUTS_NAME), end)
        elif marker in FRAMES and end - start >= 10:
            height, width = struct.unpack_from(">HH", data, start + 5)
            found = Frame(height, width, marker in SEQUENTIAL, start + 5, 0, None)
        elif marker == SOS:
            return found._replace(scan=end, cuts=cuts) if found and found.height and found.width else None
    return None


def header(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(marker, start, end) of each segment up to the first scan, the marker's own two bytes included; ends early where
    something else stands."""
    at = 2
    if data[:2] != b"\xff\xd8":
        return
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker, end = data[at + 1], at + 2 + (data[at + 2] << 8 | data[at + 3])
        if marker < 0xC0 or 0xD0 <= marker <= EOI or end < at + 4 or end > len(data):
            return
        yield marker, at, end
        if marker == SOS:
            return
        at = end


def part(data: bytes, frame: Frame, top: int, left: int, height: int, width: int) -> tuple[bytearray, int, int] | None:
    """A JPEG of the segments that the box touches, and the row and column where the box begins in it.

    None if `recode` did not make this file, or if its table of segments does not fit it.
    """
    if not frame.cuts:
        return None
    start, end = frame.cuts
    interval, mcu_height, mcu_width = CUTS_HEAD.unpack_from(data, start)
    lengths = np.frombuffer(data[start + CUTS_HEAD.size : end], ">u2")
    stride = interval * mcu_width
    if not stride or not mcu_height:
        return None
    rows, across = -(-frame.height // mcu_height), -(-frame.width // stride)
    if len(lengths) != rows * across:
        return None
    ends = (np.cumsum(lengths + np.int64(2)) + (frame.scan - 2)).reshape(rows, across)
    if ends[-1, -1] + 2 > len(data):
        return None
    margin_down, margin_across = (size // BLOCK if size > BLOCK else 0 for size in (mcu_height, mcu_width))
    first_row, first = max(0, top - margin_down) // mcu_height, max(0, left - margin_across) // stride
    last_row = -(-min(frame.height, top + height + margin_down) // mcu_height)
    last = -(-min(frame.width, left + width + margin_across) // stride)
    touched = ends[first_row:last_row, first:last]
    starts = touched[:, 0] - lengths.reshape(rows, across)[first_row:last_row, first]
    stops = touched[:, -1] + 2  # with the marker behind it
    coded = memoryview(data)
    made = bytearray().join(
        [coded[: frame.scan], *(coded[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True))]
    )
    struct.pack_into(
        ">HH", made, frame.position,
        min(frame.height, last_row * mcu_height) - first_row * mcu_height,
        min(frame.width, last * stride) - first * stride,
    )  # fmt: skip
    behind = np.cumsum(stops - starts) + frame.scan
    markers = (touched + (behind - stops)[:, None]).ravel()
    view = np.frombuffer(made, np.uint8)
    if not ((view[markers] == 0xFF).all() and (view[markers + 1] & 0xF0 == 0xD0).all()):
        return None
    view[markers + 1] = _KINDS[: len(markers)]  # they count modulo 8 from the first on
    view[markers[-1] + 1] = EOI
    return made, top - first_row * mcu_height, left - first * stride


def upper(data: bytes, frame: Frame, bottom: int) -> bytearray:
    """A JPEG that has at least the rows above `bottom`: its header says that it ends there.

    A sequential file is read from the top, so what is below costs nothing but a look for the end. libjpeg says a line on
    standard error about what it has passed over.
    """
    made = bytearray(data)
    struct.pack_into(">H", made, frame.position, min(frame.height, bottom + _CONTEXT))
    return made
