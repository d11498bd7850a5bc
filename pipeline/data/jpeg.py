"""The structure of a JPEG: which bytes hold which rows, so that a crop costs little more than its own part of the file.

Promise: `part` of a file decodes to the very pixels that the whole file has there, and `with_restarts` changes how a file
can be cut, never a pixel. Why that holds: a decoder forgets everything at a restart marker, so the segments between
markers can be taken out and put together anew; and where chroma is interpolated from its neighbours, a little more is
decoded than asked for. 70 % of a decode is reading the entropy-coded bits: what is not read is not paid for.

Nothing that pip installs writes restart markers without re-encoding, and jpegtran is a program of the system's. At a marker
one DC difference a component changes, so those are coded anew here and all other bits are copied. What is not a
sequential Huffman-coded JPEG of one scan (progressive, arithmetic), or is damaged, has no layout: it is decoded whole.
"""

import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_EOI, _SOS, _DHT, _DRI = 0xD9, 0xDA, 0xC4, 0xDD
_SEQUENTIAL = (0xC0, 0xC1)
_FRAMES = (*_SEQUENTIAL, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF)
_MARKS = (0xE0, 0xEE)  # JFIF's and Adobe's, which says how colours are coded
_KEPT = (0xDB, *_SEQUENTIAL)  # quantisation tables and the frame
_APP, _NAME = 0xE7, b"segments\0"  # ours: the length of each segment, so that nobody has to look for the markers
_BLOCK = 8
_END_OF_BLOCK = 128  # more than the 64 places of a block, so that its end and an overrun differ
_BROKEN = 1 << 12
_CONTEXT = 16  # rows: chroma is interpolated from its neighbours, of which there is one for at most four rows
_MOST_BYTES = 8 << 20  # walking through a file takes forty times its bytes of memory
_STRIDE = 84  # pixels from restart to restart, at most: 1.41 × as fast as the whole; 168: 1.25 ×; 42: 1 % more bytes


class Frame(NamedTuple):
    """What the first bytes tell."""

    height: int
    width: int
    is_sequential: bool
    is_cut: bool
    """By `with_restarts`."""
    position: int
    """Of the height, with the width behind it."""


class Component(NamedTuple):
    id: int
    across: int
    """Blocks of one MCU, horizontally."""
    down: int
    dc: int
    """Huffman tables."""
    ac: int


class Layout(NamedTuple):
    """Where the parts of a sequential JPEG lie."""

    height: int
    width: int
    components: tuple[Component, ...]
    frame: int
    """Position of the height, with the width behind it."""
    scan: int
    """Position of the first entropy-coded byte."""
    interval: int
    """MCUs from restart to restart; 0: no restarts."""
    segments: tuple[tuple[int, int, int], ...]
    """(marker, start, end) of each segment of the header, the marker's own two bytes included."""
    lengths: tuple[int, int] | None
    """Start and end of our table of the scan's segments."""

    @property
    def mcu(self) -> tuple[int, int]:
        """Height and width in pixels of what is coded together."""
        return (
            _BLOCK * max(component.down for component in self.components),
            _BLOCK * max(component.across for component in self.components),
        )

    @property
    def margin(self) -> tuple[int, int]:
        """Pixels that must be decoded beyond a part, for chroma is interpolated from its neighbours."""
        height, width = self.mcu
        return height // _BLOCK if height > _BLOCK else 0, width // _BLOCK if width > _BLOCK else 0


def frame(data: bytes) -> Frame | None:
    """None if this is no JPEG, or none with an orderly header."""
    found, is_cut = None, False
    for marker, start, end in _header(data):
        if marker == _APP:
            is_cut = data.startswith(_NAME, start + 4)
        elif marker in _FRAMES and end - start >= 10:
            height, width = struct.unpack_from(">HH", data, start + 5)
            found = Frame(height, width, marker in _SEQUENTIAL, is_cut, start + 5)
        elif marker == _SOS:
            return found if found and found.height and found.width else None
    return None


def read_layout(data: bytes) -> Layout | None:
    """None where the file can only be decoded whole."""
    frame, interval, lengths, segments = None, 0, None, []
    for marker, start, end in _header(data):
        segments.append((marker, start, end))
        body = data[start + 4 : end]
        if marker in _FRAMES:
            if frame or marker not in _SEQUENTIAL:
                return None
            frame = start + 5
            sampling = {body[at]: (body[at + 1] >> 4, body[at + 1] & 15) for at in range(6, len(body) - 2, 3)}
            if len(body) < 9 or body[0] != 8 or len(sampling) != body[5] or len(body) != 6 + 3 * body[5]:
                return None
        elif marker == _DRI:
            interval = int.from_bytes(body[:2])
        elif marker == _APP and body.startswith(_NAME):
            lengths = (start + 4 + len(_NAME), end)
        elif marker == _SOS:
            if not frame or not body or body[0] != len(sampling) or len(body) != 4 + 2 * body[0]:
                return None
            tables = [(body[at], body[at + 1] >> 4, body[at + 1] & 15) for at in range(1, len(body) - 3, 2)]
            if [table[0] for table in tables] != list(sampling):
                return None
            components = tuple(Component(id, *sampling[id], dc, ac) for id, dc, ac in tables)
            if len(components) == 1:  # alone, a component is coded block by block, whatever its factors say
                components = (Component(components[0].id, 1, 1, components[0].dc, components[0].ac),)
            if not all(1 <= factor <= 4 for one in components for factor in (one.across, one.down)):
                return None
            height, width = struct.unpack_from(">HH", data, frame)
            if not height or not width:
                return None
            return Layout(height, width, components, frame, end, interval, tuple(segments), lengths)
    return None


def _header(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(marker, start, end) of each segment up to the first scan; ends early where something else stands."""
    at = 2
    if data[:2] != b"\xff\xd8":
        return
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker, end = data[at + 1], at + 2 + int.from_bytes(data[at + 2 : at + 4])
        if marker < 0xC0 or 0xD0 <= marker <= _EOI or end < at + 4 or end > len(data):
            return
        yield marker, at, end
        if marker == _SOS:
            return
        at = end


def part(data: bytes, top: int, left: int, height: int, width: int) -> tuple[bytearray, int, int]:
    """A JPEG that holds at least those pixels, and the row and column where they begin in it.

    Of a file that `with_restarts` made it has the segments that the box touches; of another, all.
    """
    layout = read_layout(data)
    grid = layout and _restart_grid(data, layout)
    if not layout or not grid:
        return bytearray(data), top, left
    mcu_height, mcu_width = layout.mcu
    margin_down, margin_across = layout.margin
    first_row = max(0, top - margin_down) // mcu_height
    last_row = -(-min(layout.height, top + height + margin_down) // mcu_height)
    stride = layout.interval * mcu_width
    first = max(0, left - margin_across) // stride
    last = -(-min(layout.width, left + width + margin_across) // stride)
    starts, ends = grid[0][first_row:last_row, first], grid[1][first_row:last_row, last - 1]
    made = bytearray(data[: layout.scan])
    struct.pack_into(
        ">HH", made, layout.frame,
        min(layout.height, last_row * mcu_height) - first_row * mcu_height,
        min(layout.width, last * stride) - first * stride,
    )  # fmt: skip
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        made += data[start : end + 2]  # with the marker behind it
    # markers count modulo 8 from the first on
    lengths = ends - starts + 2
    shifts = layout.scan + np.cumsum(lengths) - lengths - starts
    markers = (grid[1][first_row:last_row, first:last] + shifts[:, None]).ravel() + 1
    view = np.frombuffer(made, np.uint8)
    view[markers] = 0xD0 + np.arange(len(markers), dtype=np.uint8) % 8
    view[markers[-1]] = _EOI
    return made, top - first_row * mcu_height, left - first * stride


def upper(data: bytes, frame: Frame, bottom: int) -> bytearray:
    """A JPEG that has at least the rows above `bottom`: its header says that it ends there.

    A sequential file is read from the top, so what is below costs nothing but a look for the end. libjpeg says a line on
    standard error about what it has passed over.
    """
    made = bytearray(data)
    struct.pack_into(">H", made, frame.position, min(frame.height, bottom + _CONTEXT))
    return made


def _restart_grid(data: bytes, layout: Layout) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Start and end of each segment between restarts: [MCU rows, segments of a row]; None where no such grid is written."""
    if not layout.lengths or not layout.interval:
        return None
    lengths = np.frombuffer(data[slice(*layout.lengths)], ">u2").astype(np.int64)
    rows, across = (-(-size // mcu) for size, mcu in zip((layout.height, layout.width), layout.mcu, strict=True))
    if across % layout.interval or len(lengths) != rows * across // layout.interval:
        return None
    ends = layout.scan + np.cumsum(lengths + 2) - 2
    if ends[-1] + 2 > len(data):
        return None
    coded = np.frombuffer(data, np.uint8)
    kinds = 0xD0 + np.arange(len(ends), dtype=np.uint8) % 8
    kinds[-1] = _EOI
    if not ((coded[ends] == 0xFF).all() and np.array_equal(coded[ends + 1], kinds)):
        return None
    return (ends - lengths).reshape(rows, -1), ends.reshape(rows, -1)


def with_restarts(data: bytes) -> bytes | None:
    """The same picture with a restart marker every few MCUs, without metadata; None if the file does not allow it."""
    layout = read_layout(data)
    if not layout or layout.interval or len(data) > _MOST_BYTES:
        return None
    try:
        tables = _tables(data, layout)
        rows, across = (-(-size // mcu) for size, mcu in zip((layout.height, layout.width), layout.mcu, strict=True))
        interval = _interval(across, layout.mcu[1])
        coded = _unstuffed(data, layout)
        leads, end = _leads(coded, layout, tables, rows * across, interval)
        codes = []
        for component, values in enumerate(zip(*([value for _, _, value in lead] for lead in leads), strict=True)):
            name = (0, layout.components[component].dc)
            tables[name] = _extended(tables[name], {abs(value).bit_length() for value in values})
            codes.append(_codes(tables[name]))
        for component, one in enumerate(layout.components):  # another component may have extended the same table
            codes[component] = _codes(tables[0, one.dc])
        segments = list(_cut(np.unpackbits(coded)[:end], leads, codes))
        lengths = _NAME + struct.pack(f">{len(segments)}H", *map(len, segments))
        table = struct.pack(">BBH", 0xFF, _APP, 2 + len(lengths)) + lengths
    except (IndexError, ValueError, KeyError, struct.error):
        return None  # damaged: the bits end early, or a code or a table is none; or too large for our table
    kept = {
        kinds: [data[start:end] for marker, start, end in layout.segments if marker in kinds]
        for kinds in (_MARKS, _KEPT, (_SOS,))
    }
    parts = [b"\xff\xd8", *kept[_MARKS], table, *kept[_KEPT]]
    huffman = b"".join(
        bytes((kind << 4 | number,)) + counts + symbols for (kind, number), (counts, symbols) in tables.items()
    )
    parts.append(struct.pack(">BBH", 0xFF, _DHT, 2 + len(huffman)) + huffman)
    parts.append(struct.pack(">BBHH", 0xFF, _DRI, 4, interval))
    parts += kept[_SOS,]
    for number, segment in enumerate(segments):
        parts += [segment, bytes((0xFF, 0xD0 + number % 8))]
    parts[-1] = bytes((0xFF, _EOI))
    return b"".join(parts)


Table = tuple[bytes, bytes]
"""Of Huffman codes: how many there are of each length from 1 to 16, and their symbols, shortest first."""
Lead = tuple[int, int, int]
"""The DC difference that begins a segment's component: its first bit, the bit behind it, and the sum so far."""


def _tables(data: bytes, layout: Layout) -> dict[tuple[int, int], Table]:
    """Huffman tables by (0 for DC or 1 for AC, number)."""
    tables = {}
    for marker, start, end in layout.segments:
        at = start + 4
        while marker == _DHT and at < end:
            counts = data[at + 1 : at + 17]
            symbols = data[at + 17 : at + 17 + sum(counts)]
            tables[data[at] >> 4, data[at] & 15] = (counts, symbols)
            at += 17 + sum(counts)
    return tables


def _interval(across: int, mcu_width: int) -> int:
    """MCUs from restart to restart: they must divide a row, and a row of a prime number of MCUs is not divided."""
    fitting = [n for n in range(1, across + 1) if across % n == 0 and n * mcu_width >= _STRIDE / 2] or [across]
    return max((n for n in fitting if n * mcu_width <= _STRIDE), default=fitting[0])


def _unstuffed(data: bytes, layout: Layout) -> Bytes:
    """The entropy-coded bytes up to the next marker, without the zero that follows each FF."""
    coded = np.frombuffer(data, np.uint8)[layout.scan :]
    at = np.flatnonzero(coded[:-1] == 0xFF)
    markers = at[coded[at + 1] != 0]
    end = int(markers[0])  # IndexError where the file ends without one
    return np.delete(coded[:end], at[at < end] + 1)


def _leads(
    coded: Bytes, layout: Layout, tables: dict[tuple[int, int], Table], count: int, interval: int
) -> tuple[list[list[Lead]], int]:
    """For each segment to be, the leads of its components; and how many bits there are. Walks all bits once, which
    takes 25 ms for 110 KB: in plain Python, so that nothing in a file can hurt."""
    padded = np.concatenate((coded, np.zeros(8, np.uint8))).astype(np.int64)
    window: list[int] = (padded[:-2] << 16 | padded[1:-1] << 8 | padded[2:]).tolist()  # 24 bits from each byte on
    blocks = [
        (number, block == 0, _dc_steps(tables[0, one.dc]), *_ac_steps(tables[1, one.ac]))
        for number, one in enumerate(layout.components)
        for block in range(one.across * one.down)
    ]
    sums = [0] * len(layout.components)
    leads: list[list[Lead]] = []
    at = 0
    for mcu in range(count):
        is_first = mcu % interval == 0
        if is_first:
            leads.append([])
        for number, is_lead, dc, ac_pairs, ac in blocks:
            start = at
            step = dc[(window[at >> 3] >> (8 - (at & 7))) & 0xFFFF]
            at += step & 31
            size = step >> 5
            if size:
                value = (window[at >> 3] >> (24 - (at & 7) - size)) & ((1 << size) - 1)
                sums[number] += value if value >> (size - 1) else value - (1 << size) + 1
                at += size
            if is_first and is_lead:
                leads[-1].append((start, at, sums[number]))
            place = 1
            while place < 48:  # a pair begun here has its second half inside the block
                step = ac_pairs[(window[at >> 3] >> (8 - (at & 7))) & 0xFFFF]
                at += step & 63
                place += step >> 6
            while place < 64:
                step = ac[(window[at >> 3] >> (8 - (at & 7))) & 0xFFFF]
                at += step & 63
                place += step >> 6
            if place != 64 and not _END_OF_BLOCK < place < _END_OF_BLOCK + 64:
                raise ValueError("more than a block")
    if at > 8 * len(coded):
        raise ValueError("the bits end early")
    return leads, at


def _spread(table: Table) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(length, symbol) of the code that begins each 16 bits; length 0 where none does."""
    counts, symbols = table
    lengths = np.repeat(np.arange(1, 17), np.frombuffer(counts, np.uint8))
    spans = 1 << (16 - lengths)
    rest = (1 << 16) - int(spans.sum())
    if rest < 0 or len(counts) != 16 or len(symbols) != len(lengths):
        raise ValueError("no Huffman table")
    filled = np.frombuffer(symbols, np.uint8).astype(np.int64)
    return np.pad(np.repeat(lengths, spans), (0, rest)), np.pad(np.repeat(filled, spans), (0, rest))


@lru_cache(64)
def _dc_steps(table: Table) -> list[int]:
    """For each 16 bits: bits of the code, and of the difference that follows × 32."""
    lengths, sizes = _spread(table)
    if (sizes > 11).any():
        raise ValueError("more than 8 bits a sample")
    steps: list[int] = (lengths | sizes << 5).tolist()
    return steps


@lru_cache(64)
def _ac_steps(table: Table) -> tuple[list[int], list[int]]:
    """For each 16 bits: bits of one coefficient, code included, and places of the block that it fills × 64; first with a
    second coefficient where its code is within the 16 bits as well."""
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


def _extended(table: Table, sizes: set[int]) -> Table:
    """The table with codes for those sizes besides, behind all others, which so keep theirs: all ones is no code, thus
    there is always room for one that is longer."""
    counts, symbols = bytearray(table[0]), table[1]
    for size in sorted(sizes - set(symbols)):
        longest = max(length for length in range(16) if counts[length])
        counts[longest + 1] += 1  # IndexError where that is 16 already
        symbols += bytes((size,))
    return bytes(counts), symbols


def _codes(table: Table) -> dict[int, tuple[int, int]]:
    """Symbol -> its code and the code's length."""
    codes, code, at = {}, 0, 0
    for length, count in enumerate(table[0], 1):
        for symbol in table[1][at : at + count]:
            codes[symbol] = (code, length)
            code += 1
        at += count
        code <<= 1
    return codes


def _cut(bits: Bytes, leads: list[list[Lead]], codes: list[dict[int, tuple[int, int]]]) -> Iterator[bytes]:
    """The bytes of each segment, its leads coded as differences from 0."""
    ends = [lead[0][0] for lead in leads[1:]] + [len(bits)]
    for lead, end in zip(leads, ends, strict=True):
        pieces, at = [], lead[0][0]
        for (start, behind, value), table in zip(lead, codes, strict=True):
            pieces += [bits[at:start], _coded(value, table)]
            at = behind
        segment = np.concatenate([*pieces, bits[at:end]])
        filled = np.pad(segment, (0, -len(segment) % 8), constant_values=1)
        yield np.packbits(filled).tobytes().replace(b"\xff", b"\xff\0")


def _coded(value: int, codes: dict[int, tuple[int, int]]) -> Bytes:
    size = abs(value).bit_length()
    code, length = codes[size]
    bits = code << size | (value if value >= 0 else value + (1 << size) - 1)
    return np.array([bits >> place & 1 for place in reversed(range(length + size))], np.uint8)
