"""The structure of a JPEG file, so that a crop decodes only its part of the file.

Promise: `part` of a file made by `jpeg_restarts.with_restarts` decodes to exactly the pixels that
the whole file has there. A decoder resets its state at a restart marker, so the segments between
markers can be taken out and joined again. Where chroma is interpolated from its neighbours, `part`
decodes a margin around the crop. Reading the entropy-coded bits is 70 % of a decode.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

EOI, SOS, DHT, DRI = 0xD9, 0xDA, 0xC4, 0xDD
SEQUENTIAL = (0xC0, 0xC1)
FRAMES = (*SEQUENTIAL, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF)
APP1 = 0xE1
BLOCK = 8
CUTS, CUTS_NAME, CUTS_HEAD = 0xE7, b"restarts\0", struct.Struct(">HBB")
"""A segment of our own (APP7), so that a reader need not search for the markers.

It holds its name; MCUs per restart interval, height and width of an MCU in pixels; and for each
restart interval its length in bytes, in two bytes.
"""

_CONTEXT = 16  # rows below a crop: chroma, with one row for at most four, is interpolated from neighbours
_MARKER_BYTES = 2
_MARKERS = np.resize(np.arange(0xD0, 0xD8, dtype=np.uint8), 1 << 16)
"""The second byte of each restart marker of a file. There are no more, as `CUTS` is one segment."""


class Frame(NamedTuple):
    """The parts of a JPEG's header that are needed."""

    height: int
    width: int
    is_sequential: bool
    position: int
    """Offset of the height; the width follows it."""
    scan: int
    """Offset of the first entropy-coded byte."""
    cuts: tuple[int, int] | None
    """Start and end of what follows `CUTS_NAME`, in a file that `with_restarts` made."""
    metadata: tuple[tuple[int, int], ...]
    """Start and end of each segment that may hold Exif or XMP data."""


def frame(data: bytes) -> Frame | None:
    """Return the frame of a JPEG, or None if `data` is not a JPEG with a well-formed header."""
    found, cuts, metadata = None, None, []
    for marker, start, end in header(data):
        if marker == CUTS and data.startswith(CUTS_NAME, start + 4):
            cuts = (start + 4 + len(CUTS_NAME), end)
        elif marker == APP1:
            metadata.append((start + 4, end))
        elif marker in FRAMES and end - start >= 10:
            height, width = struct.unpack_from(">HH", data, start + 5)
            found = Frame(height, width, marker in SEQUENTIAL, start + 5, 0, None, ())
        elif marker == SOS:
            is_valid = found and found.height and found.width
            return found._replace(scan=end, cuts=cuts, metadata=tuple(metadata)) if found and is_valid else None
    return None


def header(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, start, end) of each segment up to the first scan, including the marker.

    Stops early if the bytes are not a segment.
    """
    at = 2
    if data[:2] != b"\xff\xd8":
        return
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker, end = data[at + 1], at + 2 + (data[at + 2] << 8 | data[at + 3])
        if marker < 0xC0 or 0xD0 <= marker <= EOI or marker == 0xFF or end < at + 4 or end > len(data):
            return
        yield marker, at, end
        if marker == SOS:
            return
        at = end


@dataclass(frozen=True)
class RestartGrid:
    """The restart intervals of a file that `with_restarts` made, in rows and columns."""

    height: int
    """Pixels of an interval, as is the width. The last row and column may have fewer."""
    width: int
    margin_down: int
    """Pixels around a crop whose chroma is interpolated with its own."""
    margin_across: int
    starts: NDArray[np.int64]
    """[rows, columns]: offset of each interval's first byte."""
    ends: NDArray[np.int64]
    """[rows, columns]: offset behind its last byte, where the next marker is."""

    @classmethod
    def read(cls, data: bytes, frame: Frame) -> "RestartGrid | None":
        """Return the grid, or None if the file has none, or one that does not fit it."""
        if not frame.cuts:
            return None
        start, end = frame.cuts
        interval, mcu_height, mcu_width = CUTS_HEAD.unpack_from(data, start)
        lengths = np.frombuffer(data[start + CUTS_HEAD.size : end], ">u2")
        width = interval * mcu_width
        if not width or not mcu_height:
            return None
        rows, columns = -(-frame.height // mcu_height), -(-frame.width // width)
        if len(lengths) != rows * columns:
            return None
        ends = np.cumsum(lengths + np.int64(_MARKER_BYTES)) + (frame.scan - _MARKER_BYTES)
        if ends[-1] + _MARKER_BYTES > len(data):
            return None
        starts = ends - lengths
        down, across = (size // BLOCK if size > BLOCK else 0 for size in (mcu_height, mcu_width))
        return cls(mcu_height, width, down, across, starts.reshape(rows, columns), ends.reshape(rows, columns))

    def rows_of(self, top: int, height: int) -> slice:
        return _touched(top - self.margin_down, top + height + self.margin_down, self.height, len(self.ends))

    def columns_of(self, left: int, width: int) -> slice:
        return _touched(left - self.margin_across, left + width + self.margin_across, self.width, self.ends.shape[1])

    def cut(self, data: bytes, scan: int, rows: slice, columns: slice) -> tuple[bytearray, NDArray[np.int64]]:
        """Return the first `scan` bytes and these intervals, and the offset of each marker."""
        ends = self.ends[rows, columns]
        starts = self.starts[rows, columns][:, 0]
        stops = ends[:, -1] + _MARKER_BYTES
        coded = memoryview(data)
        spans = zip(starts.tolist(), stops.tolist(), strict=True)
        made = bytearray().join([coded[:scan], *(coded[start:stop] for start, stop in spans)])
        new_stops = np.cumsum(stops - starts) + scan
        return made, (ends + (new_stops - stops)[:, None]).ravel()


def _touched(first: int, last: int, size: int, count: int) -> slice:
    """Return those of `count` intervals of `size` pixels that the pixels first:last touch."""
    return slice(max(0, first) // size, min(count, -(-last // size)))


def part(data: bytes, frame: Frame, top: int, left: int, height: int, width: int) -> tuple[bytearray, int, int] | None:
    """Return a JPEG of the restart intervals that the box touches, and its top and left there.

    Returns None if `with_restarts` did not make this file, or if its table of lengths does not fit
    it.
    """
    grid = RestartGrid.read(data, frame)
    if not grid:
        return None
    rows, columns = grid.rows_of(top, height), grid.columns_of(left, width)
    made, markers = grid.cut(data, frame.scan, rows, columns)
    first_row, first_column = rows.start * grid.height, columns.start * grid.width
    struct.pack_into(
        ">HH", made, frame.position,
        min(frame.height, rows.stop * grid.height) - first_row,
        min(frame.width, columns.stop * grid.width) - first_column,
    )  # fmt: skip
    view = np.frombuffer(made, np.uint8)
    if not ((view[markers] == 0xFF).all() and (view[markers + 1] & 0xF0 == 0xD0).all()):
        return None
    view[markers + 1] = _MARKERS[: len(markers)]  # markers are numbered modulo 8, from 0
    view[markers[-1] + 1] = EOI
    return made, top - first_row, left - first_column


def upper(data: bytes, frame: Frame, bottom: int) -> bytearray:
    """Return a JPEG with at least the rows above `bottom`, by lowering the height in its header.

    A sequential file is decoded from the top, so the rest is only skipped.
    """
    made = bytearray(data)
    struct.pack_into(">H", made, frame.position, min(frame.height, bottom + _CONTEXT))
    return made
