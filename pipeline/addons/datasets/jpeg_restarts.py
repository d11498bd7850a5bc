"""Lossless recoding of a JPEG with restart markers and optimal Huffman tables, by jpegtran.

Promise: no coefficient changes, so any decoder makes the same pixels, and `jpeg_cuts.part` can crop
the file. jpegtran, a program of libjpeg-turbo, makes the Huffman tables and the entropy-coded
bytes; the header is written here, from that of the source.
"""

import io
import os
import re
import select
import shutil
import struct
import subprocess
from typing import BinaryIO

import numpy as np
from PIL import Image

from pipeline.addons.datasets.jpeg_cuts import BLOCK, CUTS_HEAD
from pipeline.data import jpeg
from pipeline.errors import RequestError, StorageError
from pipeline.machine import start_failure

_MARKS = (0xE0, 0xEE)  # JFIF's, and Adobe's, which says how colours are coded
_TABLES_AND_FRAME = (0xDB, *jpeg.SEQUENTIAL)  # of quantisation
_MAX_BYTES = 8 << 20  # as in version 0.2, so that a pack has the same bytes
_TIMEOUT_S = 60
_MAX_MEMORY = "512M"  # of coefficients: the 80 megapixels that are decoded at most
_STRIDE = (
    56  # pixels per restart interval, at most; 84: 4 % slower, 0.7 % smaller; 42: 2 % faster, 1.7 % larger
)
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
    restarts = [segment for marker, segment in segments if marker == jpeg.DRI and any(segment[4:])]
    count = data[frame.position + 4]
    mcu = _mcu(data[frame.position + 6 : frame.position + 6 + 3 * count : 3])
    if restarts or not all(mcu) or segments[-1][1][4:5] != bytes((count,)):  # it has several scans
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
    huffman = b"".join(sorted(_huffman_tables(made)))
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
        _segment(jpeg.DHT, huffman),
        _segment(jpeg.DRI, interval.to_bytes(2)),
        *(made[start:end] for marker, start, end in jpeg.header(made) if marker == jpeg.SOS),
    ]
    for number, scan in enumerate(scans):
        parts += [scan, bytes((0xFF, 0xD0 + number % 8))]
    parts[-1] = bytes((0xFF, jpeg.EOI))
    return b"".join(parts)


def check_jpegtran() -> None:
    """Raise RequestError that says what to install unless there is a jpegtran that can be used.

    mozjpeg has a program of this name that writes progressive JPEGs.
    """
    program = shutil.which("jpegtran")
    if not program:
        raise RequestError("JPEGs are packed by the program jpegtran, which is not installed", _INSTALL)
    sample = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 96, 3), np.uint8)).save(sample, "JPEG")
    if not with_restarts(sample.getvalue()):
        raise RequestError(f"{program} is not the jpegtran of libjpeg-turbo, which packs JPEGs", _INSTALL)


def _run_jpegtran(data: bytes, interval: int) -> bytes:
    """Return the file that jpegtran made; nothing if it failed, or warned of damage."""
    command = [
        "jpegtran",
        "-copy",
        "none",
        "-optimize",
        "-restart",
        f"{interval}B",
        "-maxmemory",
        _MAX_MEMORY,
    ]
    try:
        # files in memory, because a pipe would take 4 KB at a time
        with open(os.memfd_create("in"), "w+b") as source, open(os.memfd_create("out"), "w+b") as target:
            source.write(data)
            source.seek(0)
            is_good = _run(command, source, target)
            target.seek(0)
            return target.read() if is_good else b""
    except OSError as error:
        raise StorageError(start_failure("jpegtran", error, "give fewer --workers")) from None


def _run(command: list[str], source: BinaryIO, target: BinaryIO) -> bool:
    """Run a program in at most a minute. Return True if it ended with exit code 0."""
    with subprocess.Popen(command, stdin=source, stdout=target, stderr=subprocess.DEVNULL) as process:
        # Popen.wait(timeout) would sleep for 1 ms
        with open(os.pidfd_open(process.pid), "rb", 0) as ended:
            if not select.select([ended], [], [], _TIMEOUT_S)[0]:
                process.kill()
        return process.wait() == 0


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
    fitting = [n for n in range(1, across + 1) if across % n == 0 and n * mcu_width >= _STRIDE / 2] or [
        across
    ]
    return max((n for n in fitting if n * mcu_width <= _STRIDE), default=fitting[0])
