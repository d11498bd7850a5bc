"""Damaged and hostile files are decoded or named as defects: no crash, no hang, bounded memory."""

import io
import resource
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_pack import LEVELS, encoded, photo, write_jpegs

from pipeline.addons.datasets import jpeg, jpeg_restarts
from pipeline.addons.datasets.images import Picture
from pipeline.addons.datasets.pack import Level
from pipeline.addons.datasets.sources import open_source
from pipeline.addons.datasets.write_pack import encode
from pipeline.addons.datasets.write_pack import pack as make
from pipeline.config.load import load
from pipeline.data.interface import UnreadableError
from pipeline.errors import RequestError

MAX_CPU_S = 30
MAX_KIB = 512 * 1024
MARKERS = [bytes((0xFF, kind)) for kind in (0xD8, 0xD9, 0xDA, 0xC0, 0xC2, 0xC4, 0xDD, 0xE7, 0xFF)]


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """Return `data` damaged in one of six ways."""
    content = bytearray(data)
    match rng.integers(6):
        case 0:  # flipped bits
            for at in rng.integers(0, len(content), rng.integers(1, 20)):
                content[at] ^= 1 << rng.integers(8)
        case 1:
            del content[rng.integers(len(content)) :]
        case 2:
            first, last = sorted(rng.integers(0, len(content), 2).tolist())
            content[first:first] = content[first:last]
        case 3:
            at = int(rng.integers(len(content)))
            content[at : at + 2] = MARKERS[rng.integers(len(MARKERS))]
        case 4:  # in the header, which has the sizes
            for at in rng.integers(0, min(700, len(content)), 4):
                content[at] = rng.integers(256)
        case 5:
            at = content.find(b"\xff\xc0")
            content[at + 5 : at + 9] = rng.integers(0, 256, 4, np.uint8).tobytes()
    return bytes(content)


def bombs() -> list[bytes]:
    """Return small JPEGs: one of 65,500 × 1,220 pixels, one of 200 scans, and false tables."""
    small = encoded(photo(64, 64), subsampling=0)
    at = small.index(b"\xff\xc0") + 5
    huge = small[:at] + (1220).to_bytes(2, "big") + (65500).to_bytes(2, "big") + small[at + 4 :]
    passes = encoded(photo(64, 64), progressive=True)
    scan = passes.rindex(b"\xff\xda")
    cut = jpeg_restarts.with_restarts(small) or b""
    table = cut.index(jpeg.CUTS_NAME) + len(jpeg.CUTS_NAME)
    places = (table, table + jpeg_restarts.CUTS_HEAD.size)
    tables = [cut[:at] + byte * 16 + cut[at + 16 :] for at in places for byte in (b"\xff", b"\0")]
    return [huge, passes[:scan] + passes[scan:-2] * 200 + b"\xff\xd9", *tables]


@pytest.mark.fault("E1", ci=1, long=10)
def test_a_mutated_jpeg_is_decoded_or_named(seed: int, full: bool, jpegtran: str) -> None:
    count = 300 if full else 60
    kinds = [{"subsampling": 0}, {"subsampling": 2, "optimize": True}, {"progressive": True}]
    seeds = [encoded(photo(*size), **options) for size in ((200, 300), (97, 61)) for options in kinds]
    seeds += [jpeg_restarts.with_restarts(data) or data for data in seeds]
    rng, reasons = np.random.default_rng(seed), []
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number, data in enumerate(bombs() + [mutated(seeds[i % len(seeds)], rng) for i in range(count)]):
        start = time.process_time()
        try:
            picture = Picture.open(data)
            top, left = picture.height // 4, picture.width // 4
            height, width = picture.height - top, picture.width - left
            assert picture.region(top, left, height, width).shape == (3, height, width)
        except UnreadableError as defect:
            reasons.append(str(defect))
        if number % 5 == 1:  # packing keeps the pixels or names a defect
            with suppress(UnreadableError, OSError):
                packed, _ = encode(data, Level.parse("lossless"))
                before, after = (np.asarray(Image.open(io.BytesIO(image))) for image in (data, packed))
                assert np.array_equal(before, after), number
        assert time.process_time() - start < MAX_CPU_S, number
    assert reasons
    assert all(reasons)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < MAX_KIB


@pytest.mark.fault("E1", ci=1, long=10)
@pytest.mark.parametrize("level", LEVELS)
def test_a_mutated_pack_is_read_correctly_or_refused(
    tmp_path: Path, level: str, seed: int, full: bool, jpegtran: str
) -> None:
    count = 300 if full else 30
    damaged = tmp_path / "pack"
    make(write_jpegs(tmp_path / "images", train=4, val=2, height=60, width=80), damaged, level, 0.1)
    config = load("digits", ["data.source=pack", f"data.root={damaged}"])
    expected = [np.asarray(open_source(config).train.read(i)).tobytes() for i in range(4)]
    files = {name: (damaged / name).read_bytes() for name in ("pack.json", "pack.index", "train-0000.tar")}
    rng, refused = np.random.default_rng(seed), 0
    for number in range(count):
        name = sorted(files)[rng.integers(3)]
        (damaged / name).write_bytes(mutated(files[name], rng))
        try:
            images = open_source(config).train
            for i in range(4):
                with suppress(UnreadableError):
                    assert np.asarray(images.read(i)).tobytes() == expected[i], (number, name)
        except RequestError:
            refused += 1
        (damaged / name).write_bytes(files[name])
    # a shard is verified image by image, so not every mutation is refused
    assert count / 2 < refused < count
