"""Lossless recoding of a JPEG with restart markers and optimal Huffman tables.

Promise: no coefficient changes, so any decoder makes the same pixels, and `jpeg.part` can crop the
file. Only the first DC coefficient of each restart interval is coded differently, because a decoder
resets its prediction at a marker.

There are two coders. jpegtran, a program of libjpeg-turbo, is much faster (docs/benchmarks.md). The
coder in this file is the reference. It codes the files that jpegtran cannot, and all files if there
is no jpegtran. Both give the same bytes: they take Huffman tables from the same
counts by the same rules, and the rest of the file is written here. The bytes may differ only for a
file that no usual encoder writes, whose blocks end with coded zeros, and for a damaged file that
can still be decoded. Both coders keep the pixels of these, too.

The reference reads the file's bits as Huffman symbols, and writes these again. It reads in plain
Python, so that a hostile file does no harm; the rest is NumPy, a row of MCUs at a time. Figures and
annexes refer to ITU-T T.81.
"""

import heapq
import io
import os
import re
import select
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pipeline.data import jpeg

Bytes = NDArray[np.uint8]
Integers = NDArray[np.int64]
Table = tuple[bytes, bytes]
"""Huffman codes: the number of codes of each length from 1 to 16, and their symbols in order."""
Name = tuple[int, int]
"""Identifies a table in the file: 0 for DC or 1 for AC, and its number."""
Coded = tuple[list[Table], list[bytes]]
"""The Huffman tables, in the order of `_names`, and the bytes of each restart interval."""

_MARKS = (0xE0, 0xEE)  # JFIF's, and Adobe's, which says how colours are coded
_KEPT = (0xDB, *jpeg.SEQUENTIAL)  # quantisation tables and the frame
_CODE_BITS = 16
_DC_BITS = 11  # of a DC difference, at most, with 8 bits per sample
_END_OF_BLOCK = 128  # more than the 64 places of a block, so that its end and an overrun differ
_BROKEN = 1 << 12  # places skipped by bits that are not a code, so that the block overruns
_BROKEN_BITS = 1 << 40
_MAX_BYTES = 8 << 20  # reading a file takes forty times its size in memory
_JPEGTRAN_TIMEOUT_S = 60
_JPEGTRAN_MEMORY = "256M"  # of coefficients: 42 megapixels, or 85 with reduced chroma; the reference codes larger ones
_STRIDE = 56  # pixels per restart interval, at most; 84: 4 % slower, 0.7 % smaller; 42: 2 % faster, 1.7 % larger


class Component(NamedTuple):
    id: int
    across: int
    """Blocks in an MCU, horizontally."""
    down: int
    """Blocks in an MCU, vertically."""
    dc: int
    """The number of its Huffman table for DC coefficients."""
    ac: int
    """The number of its Huffman table for AC coefficients."""


class Layout(NamedTuple):
    """The positions of the parts of a sequential JPEG, and how it is coded."""

    height: int
    width: int
    components: tuple[Component, ...]
    scan: int
    """Position of the first entropy-coded byte."""
    interval: int
    """MCUs per restart interval; 0: no restarts."""
    segments: tuple[tuple[int, int, int], ...]
    """(marker, start, end) of each segment of the header, from the marker's first byte."""

    @property
    def mcu(self) -> tuple[int, int]:
        """Height and width of an MCU in pixels."""
        return (
            jpeg.BLOCK * max(component.down for component in self.components),
            jpeg.BLOCK * max(component.across for component in self.components),
        )


class Row(NamedTuple):
    """The symbols of one row of MCUs, in the order in which they are coded."""

    tables: NDArray[np.uint8]
    """[N]: the number of the symbol's Huffman table."""
    symbols: NDArray[np.uint8]
    """[N]: the low four bits are the number of additional bits after the code."""
    further: NDArray[np.uint16]
    """[N]: the additional bits."""
    segments: Integers
    """[S]: the index of the first symbol of each restart interval."""


def with_restarts(data: bytes, jpegtran: str | None = None, orientation: int = 1) -> bytes | None:
    """Return the same image for `jpeg.part` to crop; None if not possible.

    jpegtran: the program that `find_jpegtran` found. The bytes are the same without it.
    orientation: the only metadata that is written, as Exif data, unless it is 1.
    """
    layout = _layout(data)
    if not layout or layout.interval or len(data) > _MAX_BYTES:
        return None
    interval = _interval(-(-layout.width // layout.mcu[1]), layout.mcu[1])
    try:
        coded = _code_with_jpegtran(jpegtran, data, layout, interval) if jpegtran else None
        tables, segments = coded or _code(data, layout, interval)
        head = jpeg.CUTS_HEAD.pack(interval, *layout.mcu)
        cuts = _segment(jpeg.CUTS, jpeg.CUTS_NAME + head + struct.pack(f">{len(segments)}H", *map(len, segments)))
    except (IndexError, ValueError, KeyError, struct.error):
        return None  # damaged (the bits end early, a code or a table is not valid), or too large for our table
    named = zip(_names(layout), tables, strict=True)
    kept = [
        b"".join(data[start:end] for marker, start, end in layout.segments if marker in kinds)
        for kinds in (_MARKS, _KEPT, (jpeg.SOS,))
    ]
    parts = [
        b"\xff\xd8", kept[0], _exif(orientation) if orientation != 1 else b"", cuts, kept[1],
        _segment(jpeg.DHT, b"".join(bytes((kind << 4 | number,)) + b"".join(table) for (kind, number), table in named)),
        _segment(jpeg.DRI, interval.to_bytes(2)), kept[2],
    ]  # fmt: skip
    for number, segment in enumerate(segments):
        parts += [segment, bytes((0xFF, 0xD0 + number % 8))]
    parts[-1] = bytes((0xFF, jpeg.EOI))
    return b"".join(parts)


def find_jpegtran() -> str | None:
    """Return the path of a jpegtran that codes a sample as `_code` does, or None.

    mozjpeg has a program of this name that does not.
    """
    program = shutil.which("jpegtran")
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 96, 3), np.uint8)).save(buffer, "JPEG")
    data = buffer.getvalue()
    layout = _layout(data)
    assert layout
    return program if program and _code_with_jpegtran(program, data, layout, 2) == _code(data, layout, 2) else None


def _code_with_jpegtran(program: str, data: bytes, layout: Layout, interval: int) -> Coded | None:
    """Return what `_code` does, made by jpegtran; None if it fails, or warns of a damaged file."""
    command = [program, "-copy", "none", "-optimize", "-restart", f"{interval}B", "-maxmemory", _JPEGTRAN_MEMORY]
    try:
        # files in memory, because a pipe would take 4 KB at a time
        with open(os.memfd_create("in"), "w+b") as source, open(os.memfd_create("out"), "w+b") as target:
            source.write(data)
            source.seek(0)
            is_good = _run(command, source, target)
            target.seek(0)
            made = target.read()
    except OSError:
        return None
    found = _layout(made)
    expected = layout._replace(interval=interval, scan=0, segments=())
    if not is_good or not found or found._replace(scan=0, segments=()) != expected:
        return None  # the tables' numbers are other ones if the file's are unusual
    tables, names = _tables(made, found), _names(layout)
    segments = re.split(rb"\xff[\xd0-\xd7]", made[found.scan : -len(b"\xff\xd9")])
    down, across = (-(-size // mcu) for size, mcu in zip((layout.height, layout.width), layout.mcu, strict=True))
    if len(segments) != down * across // interval or not tables.keys() >= set(names):
        return None
    return [tables[name] for name in names], segments


def _run(command: list[str], source: BinaryIO, target: BinaryIO) -> bool:
    """Run a program in at most a minute. Return True if it ended with exit code 0."""
    with subprocess.Popen(command, stdin=source, stdout=target, stderr=subprocess.DEVNULL) as process:
        # Popen.wait(timeout) would sleep for 1 ms
        with open(os.pidfd_open(process.pid), "rb", 0) as ended:
            if not select.select([ended], [], [], _JPEGTRAN_TIMEOUT_S)[0]:
                process.kill()
        return process.wait() == 0


def _code(data: bytes, layout: Layout, interval: int) -> Coded:
    """Return the image's bits with restart markers. Raises many errors if the file is damaged."""
    names = _names(layout)
    rows = list(_read(data, layout, names, interval))
    tables = [_best(counts) for counts in _counts(rows, len(names))]
    codes, bits = (np.stack(arrays) for arrays in zip(*map(_codes, tables), strict=True))
    return tables, [segment for row in rows for segment in _written(row, codes, bits)]


def _names(layout: Layout) -> list[Name]:
    """Return the names of the Huffman tables that the scan uses, in order."""
    return sorted({name for component in layout.components for name in ((0, component.dc), (1, component.ac))})


def _layout(data: bytes) -> Layout | None:
    """Return the layout, or None if this is not a sequential Huffman-coded JPEG of one scan."""
    frame, interval, segments = None, 0, []
    for marker, start, end in jpeg.header(data):
        segments.append((marker, start, end))
        body = data[start + 4 : end]
        if marker in jpeg.FRAMES:
            if frame or marker not in jpeg.SEQUENTIAL:
                return None
            frame = start + 5
            sampling = {body[at]: (body[at + 1] >> 4, body[at + 1] & 15) for at in range(6, len(body) - 2, 3)}
            if len(body) < 9 or body[0] != 8 or len(sampling) != body[5] or len(body) != 6 + 3 * body[5]:
                return None
        elif marker == jpeg.DRI:
            interval = int.from_bytes(body[:2])
        elif marker == jpeg.SOS:
            if not frame or not body or body[0] != len(sampling) or len(body) != 4 + 2 * body[0]:
                return None
            tables = [(body[at], body[at + 1] >> 4, body[at + 1] & 15) for at in range(1, len(body) - 3, 2)]
            if [table[0] for table in tables] != list(sampling):
                return None
            components = tuple(Component(id, *sampling[id], dc, ac) for id, dc, ac in tables)
            if len(components) == 1:  # a single component is coded block by block, whatever its factors
                components = (components[0]._replace(across=1, down=1),)
            if not all(1 <= factor <= 4 for component in components for factor in (component.across, component.down)):
                return None
            height, width = struct.unpack_from(">HH", data, frame)
            if not height or not width:
                return None
            return Layout(height, width, components, end, interval, tuple(segments))
    return None


def _segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, 2 + len(body)) + body


def _exif(orientation: int) -> bytes:
    """Return a segment of Exif data with one entry."""
    entry = struct.pack(">HHIHH", 0x0112, 3, 1, orientation, 0)  # tag, SHORT, one value
    return _segment(jpeg.APP1, b"Exif\0\0MM\0*" + struct.pack(">IH", 8, 1) + entry + bytes(4))


def _interval(across: int, mcu_width: int) -> int:
    """Return the MCUs per restart interval, which divide a row; all of it if it is prime."""
    fitting = [n for n in range(1, across + 1) if across % n == 0 and n * mcu_width >= _STRIDE / 2] or [across]
    return max((n for n in fitting if n * mcu_width <= _STRIDE), default=fitting[0])


# --- from bits to symbols


@dataclass(frozen=True)
class _Scan:
    """The entropy-coded bits of a file, and the tables to read them."""

    windows: Integers
    """The 24 bits that begin at each byte."""
    bits: int
    components: list[int]
    """The component of each block of an MCU."""
    tables: Integers
    """[blocks of an MCU, 2]: their DC and AC table, as an index into `lengths` and `symbols`."""
    lengths: Integers
    """[tables, 65,536]: bits of the code at the start of each 16 bits."""
    symbols: Integers
    """[tables, 65,536]: the symbol of that code."""
    steps: list[tuple[list[int], list[int], list[int]]]
    """For each block of an MCU, see `_dc_steps` and `_ac_steps`."""
    rows: int
    """Rows of MCUs."""
    across: int
    """MCUs in a row."""


def _read(data: bytes, layout: Layout, names: list[Name], interval: int) -> Iterator[Row]:
    scan = _scan(data, layout, names)
    sums = np.zeros(len(layout.components), np.int64)
    for starts, begins in _walk(scan):
        yield _restarted(scan, *_symbols(scan, np.array(starts), np.array(begins)), sums, interval)


def _scan(data: bytes, layout: Layout, names: list[Name]) -> _Scan:
    tables = _tables(data, layout)
    rows, across = (-(-size // mcu) for size, mcu in zip((layout.height, layout.width), layout.mcu, strict=True))
    coded = _unstuffed(data, layout)
    padded = np.concatenate((coded, np.zeros(8, np.uint8))).astype(np.int64)
    blocks = [
        number for number, component in enumerate(layout.components) for _ in range(component.across * component.down)
    ]
    used = [((0, layout.components[number].dc), (1, layout.components[number].ac)) for number in blocks]
    spread = [_spread(tables[name]) for name in names]
    return _Scan(
        padded[:-2] << 16 | padded[1:-1] << 8 | padded[2:],
        8 * len(coded),
        blocks,
        np.array([[names.index(name) for name in both] for both in used]),
        np.stack([lengths for lengths, _ in spread]),
        np.stack([symbols for _, symbols in spread]),
        [(_dc_steps(tables[dc]), *_ac_steps(tables[ac])) for dc, ac in used],
        rows,
        across,
    )


def _walk(scan: _Scan) -> Iterator[tuple[list[int], list[int]]]:
    """Yield for each row of MCUs the bit positions of its codes, and which of them begin a block.

    The end of the row is the last position. Takes 30 ms for 110 KB in plain Python, since each code
    must be read to know where the next one begins.
    """
    window: list[int] = scan.windows.tolist()
    at = 0
    for _ in range(scan.rows):
        starts: list[int] = []
        begins: list[int] = []
        for _ in range(scan.across):
            for dc, ac_pairs, ac in scan.steps:
                begins.append(len(starts))
                starts.append(at)
                at += dc[(window[at >> 3] >> (8 - (at & 7))) & 0xFFFF]
                place = 1
                while place < 48:  # so that the second code of a pair is in this block, too
                    starts.append(at)
                    step = ac_pairs[(window[at >> 3] >> (8 - (at & 7))) & 0xFFFF]
                    at += step & 63
                    place += step >> 6
                while place < 64:
                    starts.append(at)
                    step = ac[(window[at >> 3] >> (8 - (at & 7))) & 0xFFFF]
                    at += step & 63
                    place += step >> 6
                if place != 64 and not _END_OF_BLOCK < place < _END_OF_BLOCK + 64:
                    raise ValueError("more than a block")
        if at > scan.bits:
            raise ValueError("the bits end early")
        starts.append(at)
        yield starts, begins


def _symbols(scan: _Scan, starts: Integers, begins: Integers) -> tuple[Integers, Integers, Integers, Integers]:
    """Return table, symbol and additional bits of each code, and the indices that begin a block."""
    starts, end = starts[:-1], starts[1:]
    blocks = np.tile(scan.tables, (scan.across, 1))
    tables = np.repeat(blocks[:, 1], np.diff(begins, append=len(starts)))
    tables[begins] = blocks[:, 0]

    def read() -> tuple[Integers, Integers]:
        word = (scan.windows[starts >> 3] >> (8 - (starts & 7))) & 0xFFFF
        return starts + scan.lengths[tables, word], scan.symbols[tables, word]

    behind, symbols = read()
    second = behind + (symbols & 15)
    pairs = np.flatnonzero(second < end)
    begins = begins + np.searchsorted(pairs, begins)
    starts, tables = np.insert(starts, pairs + 1, second[pairs]), np.insert(tables, pairs + 1, tables[pairs])
    behind, symbols = read()
    size = symbols & 15
    further = (scan.windows[behind >> 3] >> (24 - (behind & 7) - size)) & ((1 << size) - 1)
    return tables, symbols, further, begins


def _restarted(
    scan: _Scan, tables: Integers, symbols: Integers, further: Integers, begins: Integers, sums: Integers, interval: int
) -> Row:
    """Return the row with its DC coefficients predicted anew in each restart interval.

    sums: the last DC coefficient of each component, carried from row to row.
    """
    size = symbols[begins]
    values = further[begins]
    values = np.where(values >> np.maximum(size - 1, 0) > 0, values, values - (1 << size) + 1)  # figure F.12
    components = np.tile(scan.components, scan.across)
    for component, before in enumerate(sums):
        own = np.flatnonzero(components == component)
        absolute = before + np.cumsum(values[own])
        sums[component] = absolute[-1]
        previous = np.roll(absolute, 1)
        previous[:: interval * (len(own) // scan.across)] = 0
        values[own] = absolute - previous
    size = np.frexp(np.abs(values))[1].astype(np.int64)
    if (size > _DC_BITS).any():
        raise ValueError("more than 8 bits a sample")
    symbols[begins] = size
    further[begins] = np.where(values < 0, values + (1 << size) - 1, values)
    segments = begins[:: interval * len(scan.components)]
    return Row(tables.astype(np.uint8), symbols.astype(np.uint8), further.astype(np.uint16), segments)


def _tables(data: bytes, layout: Layout) -> dict[Name, Table]:
    tables = {}
    for marker, start, end in layout.segments:
        at = start + 4
        while marker == jpeg.DHT and at < end:
            counts = data[at + 1 : at + 17]
            symbols = data[at + 17 : at + 17 + sum(counts)]
            tables[data[at] >> 4, data[at] & 15] = (counts, symbols)
            at += 17 + sum(counts)
    return tables


def _unstuffed(data: bytes, layout: Layout) -> Bytes:
    """Return the entropy-coded bytes up to the next marker, without the zero after each FF."""
    coded = np.frombuffer(data, np.uint8)[layout.scan :]
    at = np.flatnonzero(coded[:-1] == 0xFF)
    markers = at[coded[at + 1] != 0]
    end = int(markers[0])  # IndexError if the file ends without one
    return np.delete(coded[:end], at[at < end] + 1)


def _spread(table: Table) -> tuple[Integers, Integers]:
    """Return (length, symbol) of the code at the start of each 16 bits; length 0 if none."""
    counts, symbols = table
    lengths = np.repeat(np.arange(1, 17), np.frombuffer(counts, np.uint8))
    spans = 1 << (16 - lengths)
    rest = (1 << 16) - int(spans.sum())
    if rest < 0 or len(counts) != 16 or len(symbols) != len(lengths):
        raise ValueError("not a Huffman table")
    filled = np.frombuffer(symbols, np.uint8).astype(np.int64)
    return np.pad(np.repeat(lengths, spans), (0, rest)), np.pad(np.repeat(filled, spans), (0, rest))


@lru_cache(64)
def _dc_steps(table: Table) -> list[int]:
    """Return for each 16 bits how many bits a DC difference takes, with its code."""
    lengths, sizes = _spread(table)
    if (sizes > _DC_BITS).any():
        raise ValueError("more than 8 bits a sample")
    steps: list[int] = np.where(lengths, lengths + sizes, _BROKEN_BITS).tolist()
    return steps


@lru_cache(64)
def _ac_steps(table: Table) -> tuple[list[int], list[int]]:
    """Return for each 16 bits the bits of an AC coefficient with its code, + 64 × places it fills.

    The first list counts two coefficients if the code of the second is within the 16 bits, too.
    """
    lengths, symbols = _spread(table)
    size = symbols & 15
    bits = lengths + size
    places = np.where((size == 0) & (symbols != 0xF0), _END_OF_BLOCK, (symbols >> 4) + 1)
    places[lengths == 0] = _BROKEN
    behind = (np.arange(1 << 16) << np.minimum(bits, 16)) & 0xFFFF
    is_pair = (places < _END_OF_BLOCK) & (bits + lengths[behind] <= 16) & (lengths[behind] > 0)
    pair_bits = np.where(is_pair, bits + bits[behind], bits)
    pair_places = np.where(is_pair, places + places[behind], places)
    return (pair_bits | pair_places << 6).tolist(), (bits | places << 6).tolist()


# --- from symbols to bits


def _counts(rows: list[Row], tables: int) -> Integers:
    """Return how often each symbol is coded, [tables, 256]."""
    counts = np.zeros(tables * 256, np.int64)
    for row in rows:
        counts += np.bincount(row.tables * np.int64(256) + row.symbols, minlength=len(counts))
    return counts.reshape(-1, 256)


def _best(counts: Integers) -> Table:
    """Return the optimal Huffman table of codes up to 16 bits, none of them all ones: annex K.2.

    Among equal counts it chooses as libjpeg does.
    """
    heap = [(count, -symbol, [symbol]) for symbol, count in enumerate(counts.tolist()) if count] + [(1, -256, [256])]
    heapq.heapify(heap)
    lengths = [0] * 257
    while len(heap) > 1:
        count, order, symbols = heapq.heappop(heap)
        other = heapq.heappop(heap)
        merged = symbols + other[2]
        for symbol in merged:
            lengths[symbol] += 1
        heapq.heappush(heap, (count + other[0], order, merged))
    numbers = np.bincount(lengths, minlength=_CODE_BITS + 1).tolist()
    for length in range(len(numbers) - 1, _CODE_BITS, -1):
        while numbers[length]:  # two codes move: one becomes a bit shorter, one joins a code that becomes longer
            shorter = max(n for n in range(1, length - 1) if numbers[n])
            for n, change in ((length, -2), (length - 1, 1), (shorter + 1, 2), (shorter, -1)):
                numbers[n] += change
    numbers[max(n for n in range(1, _CODE_BITS + 1) if numbers[n])] -= 1  # the code of all ones, which symbol 256 took
    ordered = sorted((symbol for symbol in range(256) if lengths[symbol]), key=lambda symbol: lengths[symbol])
    return bytes(numbers[1 : _CODE_BITS + 1]), bytes(ordered)


def _codes(table: Table) -> tuple[Integers, Integers]:
    """Return the code of each symbol and its length, [256] each."""
    codes, lengths = np.zeros(256, np.int64), np.zeros(256, np.int64)
    code, symbols = 0, iter(table[1])
    for length, count in enumerate(table[0], 1):
        for symbol in islice(symbols, count):
            codes[symbol], lengths[symbol] = code, length
            code += 1
        code <<= 1
    return codes, lengths


def _written(row: Row, codes: Integers, lengths: Integers) -> list[bytes]:
    """Return each restart interval's bytes, padded with ones. codes, lengths: [tables, 256]."""
    size = row.symbols & 15
    words = codes[row.tables, row.symbols] << size | row.further
    bits = lengths[row.tables, row.symbols] + size
    ends = np.append(row.segments[1:], len(bits))
    fill = -np.add.reduceat(bits, row.segments) % 8
    words, bits = np.insert(words, ends, (1 << fill) - 1), np.insert(bits, ends, fill)
    behind = np.cumsum(bits)
    places = np.repeat(behind, bits) - np.arange(1, behind[-1] + 1)
    coded = np.packbits((np.repeat(words, bits) >> places & 1).astype(np.uint8)).tobytes()
    cuts = [0, *(behind[ends + np.arange(len(ends))] // 8).tolist()]
    return [coded[start:end].replace(b"\xff", b"\xff\0") for start, end in pairwise(cuts)]
