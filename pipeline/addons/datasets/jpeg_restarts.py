"""Lossless recoding of a JPEG with restart markers and optimal Huffman tables, by jpegtran.

Promise: no coefficient changes, so any decoder makes the same pixels, and `jpeg_cuts.part` can crop
the file. jpegtran, a program of libjpeg-turbo, makes the Huffman tables and the entropy-coded
bytes; the header is written here, from that of the source.
"""

import re
import shutil
import struct
import subprocess

from pipeline.addons.datasets.jpeg_cuts import BLOCK, CUTS_HEAD
from pipeline.data import jpeg
from pipeline.errors import RequestError, StorageError
from pipeline.machine import start_failure

_MARKS = (0xE0, 0xEE)  # JFIF's, and Adobe's, which says how colours are coded
_TABLES_AND_FRAME = (0xDB, *jpeg.SEQUENTIAL)  # of quantisation
_MAX_BYTES = 8 << 20  # as in version 0.2, so that a pack has the same bytes
_TIMEOUT_S = 60
_MAX_MEMORY = "512M"  # of coefficients: the 80 megapixels that are decoded at most
# pixels per restart interval, at most; 84: 4 % slower, 0.7 % smaller; 42: 2 % faster, 1.7 % larger
_STRIDE = 56
_INSTALL = (
    "install libjpeg-turbo-progs (Fedora: libjpeg-turbo-utils), or pack pixels with a level such as raw=256"
)


def with_restarts(data: bytes, orientation: int = 1) -> bytes | None:
    """Return the same image for `jpeg_cuts.part` to crop; None if jpegtran cannot make it.

    That is if it is not a sequential JPEG of one scan, has restart markers already, or is damaged.
    orientation: the only metadata that is written, as Exif data, unless it is 1.
    """
    frame = jpeg.frame(data)
    if not frame or not frame.is_sequential or len(data) > _MAX_BYTES:
        return None
    segments = [(marker, data[start:end]) for marker, start, end in jpeg.header(data)]
    has_restarts = any(marker == jpeg.DRI and any(segment[4:]) for marker, segment in segments)
    count = data[frame.position + 4]
    mcu = _mcu(data[frame.position + 6 : frame.position + 6 + 3 * count : 3])
    if has_restarts or not all(mcu) or segments[-1][1][4:5] != bytes((count,)):  # it has several scans
        return None
    down, across = -(-frame.height // mcu[0]), -(-frame.width // mcu[1])
    interval = _interval(across, mcu[1])
    made = _run_jpegtran(data, interval)
    recoded = jpeg.frame(made)
    if not recoded or not recoded.is_sequential:
        return None
    scans = re.split(rb"\xff[\xd0-\xd7]", made[recoded.scan : -len(b"\xff\xd9")])
    if len(scans) != down * across // interval:
        return None
    try:
        lengths = struct.pack(f">{len(scans)}H", *map(len, scans))
        cuts = _segment(jpeg.CUTS, jpeg.CUTS_NAME + CUTS_HEAD.pack(interval, *mcu) + lengths)
    except struct.error:  # too large for our table
        return None
    parts = [
        b"\xff\xd8",
        *(segment for marker, segment in segments if marker in _MARKS),
        _exif(orientation) if orientation != 1 else b"",
        cuts,
        *(segment for marker, segment in segments if marker in _TABLES_AND_FRAME),
        _segment(jpeg.DHT, b"".join(sorted(_huffman_tables(made)))),
        _segment(jpeg.DRI, interval.to_bytes(2)),
        *(made[start:end] for marker, start, end in jpeg.header(made) if marker == jpeg.SOS),
    ]
    for number, scan in enumerate(scans):
        parts += [scan, bytes((0xFF, 0xD0 + number % 8))]
    parts[-1] = bytes((0xFF, jpeg.EOI))
    return b"".join(parts)


def check_jpegtran() -> None:
    """Raise RequestError that says what to install unless there is a jpegtran."""
    if not shutil.which("jpegtran"):
        raise RequestError("JPEGs are packed by the program jpegtran, which is not installed", _INSTALL)


def _run_jpegtran(data: bytes, interval: int) -> bytes:
    """Return the file that jpegtran made; nothing if it failed, or warned of damage."""
    options = f"-copy none -optimize -restart {interval}B -maxmemory {_MAX_MEMORY}"
    try:
        done = subprocess.run(
            ["jpegtran", *options.split()], input=data, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return b""
    except OSError as error:
        raise StorageError(start_failure("jpegtran", error, "give fewer --workers")) from None
    return b"" if done.returncode else done.stdout


def _huffman_tables(data: bytes) -> list[bytes]:
    """Return each table: its name in a byte, the number of codes of each length, and symbols."""
    tables = []
    for marker, start, end in jpeg.header(data):
        at = start + 4
        while marker == jpeg.DHT and at < end:
            size = 17 + sum(data[at + 1 : at + 17])
            tables.append(data[at : at + size])
            at += size
    return tables


def _mcu(sampling: bytes) -> tuple[int, int]:
    """Return the height and width of an MCU in pixels. sampling: that byte of each component."""
    if len(sampling) == 1:  # coded block by block, whatever its factors
        return BLOCK, BLOCK
    down = max((byte & 15 for byte in sampling), default=0)
    across = max((byte >> 4 for byte in sampling), default=0)
    return BLOCK * down, BLOCK * across


def _segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, 2 + len(body)) + body


def _exif(orientation: int) -> bytes:
    """Return a segment of Exif data with one entry."""
    entry = struct.pack(">HHIHH", 0x0112, 3, 1, orientation, 0)  # tag, SHORT, one value
    return _segment(jpeg.APP1, b"Exif\0\0MM\0*" + struct.pack(">IH", 8, 1) + entry + bytes(4))


def _interval(across: int, mcu_width: int) -> int:
    """Return the MCUs per restart interval, which divide a row; all of it if it is prime."""
    divisors = [n for n in range(1, across + 1) if across % n == 0 and n * mcu_width >= _STRIDE / 2]
    fitting = divisors or [across]
    return max((n for n in fitting if n * mcu_width <= _STRIDE), default=fitting[0])
