"""Cuts of a JPEG by its restart markers, so that a crop decodes only its part of the file.

Promise: `part` of a file made by `jpeg_restarts.with_restarts` decodes to exactly the pixels that
the whole file has there. A decoder resets its state at a restart marker, so the segments between
markers can be taken out and joined again. Where chroma is interpolated from its neighbours, `part`
decodes a margin around the crop. Reading the entropy-coded bits is 70 % of a decode.
"""

import struct

import numpy as np

from pipeline.data.jpeg import EOI, Frame

BLOCK = 8
CUTS_HEAD = struct.Struct(">HBB")
"""In the segment `jpeg.CUTS`: MCUs per restart interval, height and width of an MCU in pixels.

For each restart interval, its length in bytes follows, in two bytes.
"""
_MARKER_BYTES = 2
_MARKERS = np.resize(np.arange(0xD0, 0xD8, dtype=np.uint8), 1 << 16)
"""The second byte of each restart marker of a file. There are no more, as `CUTS` is one segment."""


def part(
    data: bytes, frame: Frame, top: int, left: int, height: int, width: int
) -> tuple[bytearray, int, int] | None:
    """Return a JPEG of the restart intervals that the box touches, and its top and left there.

    Returns None if `with_restarts` did not make this file, or if its table of lengths does not fit
    it.
    """
    assert frame.cuts
    start, end = frame.cuts
    interval, mcu_height, mcu_width = CUTS_HEAD.unpack_from(data, start)
    # an interval has mcu_height rows of pixels and this many columns; the last ones may have fewer
    interval_width = interval * mcu_width
    if not interval_width or not mcu_height:
        return None
    grid = -(-frame.height // mcu_height), -(-frame.width // interval_width)
    lengths = np.frombuffer(data[start + CUTS_HEAD.size : end], ">u2").astype(np.int64)
    ends = np.cumsum(lengths + _MARKER_BYTES) + (frame.scan - _MARKER_BYTES)  # where a marker follows
    if len(lengths) != grid[0] * grid[1] or ends[-1] + _MARKER_BYTES > len(data):
        return None
    rows = _touched(top, height, mcu_height, mcu_height, grid[0])
    columns = _touched(left, width, interval_width, mcu_width, grid[1])
    starts = (ends - lengths).reshape(grid)[rows, columns][:, 0]
    ends = ends.reshape(grid)[rows, columns]
    stops = ends[:, -1] + _MARKER_BYTES
    coded = memoryview(data)
    spans = zip(starts.tolist(), stops.tolist(), strict=True)
    made = bytearray().join([coded[: frame.scan], *(coded[first:last] for first, last in spans)])
    markers = (ends + (np.cumsum(stops - starts) + frame.scan - stops)[:, None]).ravel()

    first_row, first_column = rows.start * mcu_height, columns.start * interval_width
    new_height = min(frame.height, rows.stop * mcu_height) - first_row
    new_width = min(frame.width, columns.stop * interval_width) - first_column
    struct.pack_into(">HH", made, frame.position, new_height, new_width)
    view = np.frombuffer(made, np.uint8)
    if not ((view[markers] == 0xFF).all() and (view[markers + 1] & 0xF0 == 0xD0).all()):
        return None
    view[markers + 1] = _MARKERS[: len(markers)]  # markers are numbered modulo 8, from 0
    view[markers[-1] + 1] = EOI
    return made, top - first_row, left - first_column


def _touched(first: int, length: int, size: int, mcu: int, count: int) -> slice:
    """Return those of `count` intervals of `size` pixels that the pixels and their margin touch."""
    margin = mcu // BLOCK if mcu > BLOCK else 0  # pixels whose chroma is interpolated with theirs
    return slice(max(0, first - margin) // size, min(count, -(-(first + length + margin) // size)))
