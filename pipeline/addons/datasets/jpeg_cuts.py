"""Cuts of a JPEG by its restart markers, so that a crop decodes only its part of the file.

Promise: `part` of a file made by `jpeg_restarts.with_restarts` decodes to exactly the pixels that
the whole file has there. A decoder resets its state at a restart marker, so the segments between
markers can be taken out and joined again. Where chroma is interpolated from its neighbours, `part`
decodes a margin around the crop. Reading the entropy-coded bits is 70 % of a decode.
"""

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.data.jpeg import EOI, Frame

BLOCK = 8
CUTS_HEAD = struct.Struct(">HBB")
"""In the segment `jpeg.CUTS`: MCUs per restart interval, height and width of an MCU in pixels.

For each restart interval, its length in bytes follows, in two bytes.
"""
_MARKER_BYTES = 2
_MARKERS = np.resize(np.arange(0xD0, 0xD8, dtype=np.uint8), 1 << 16)
"""The second byte of each restart marker of a file. There are no more, as `CUTS` is one segment."""


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
        return cls(
            mcu_height, width, down, across, starts.reshape(rows, columns), ends.reshape(rows, columns)
        )

    def rows_of(self, top: int, height: int) -> slice:
        return _touched(top - self.margin_down, top + height + self.margin_down, self.height, len(self.ends))

    def columns_of(self, left: int, width: int) -> slice:
        return _touched(
            left - self.margin_across, left + width + self.margin_across, self.width, self.ends.shape[1]
        )

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


def part(
    data: bytes, frame: Frame, top: int, left: int, height: int, width: int
) -> tuple[bytearray, int, int] | None:
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
