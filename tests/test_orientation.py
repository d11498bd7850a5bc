"""Images are read upright, and as bright as their file says, in all formats and places."""

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import SMALL, quick
from PIL import Image, ImageOps
from streams import stream
from test_data import png
from torch import Tensor

from pipeline.addons.datasets.images import Picture, decode
from pipeline.addons.datasets.sources import open_source
from pipeline.addons.datasets.write_pack import pack as make
from pipeline.addons.models.eval_batches import EvalBatches
from pipeline.config.load import from_yaml, load
from pipeline.config.sections import Augment
from pipeline.data.augment import SampleKey, augment
from pipeline.data.interface import UnreadableError
from pipeline.record import checkpoint_contents, checkpoint_files

PACK_0_2 = Path(__file__).parent / "pack-0.2"
"""A lossless pack that version 0.2 made of turned images and one of floats."""
FORMATS: dict[str, dict[str, Any]] = {
    "JPEG": {"quality": 90}, "progressive": {"format": "JPEG", "progressive": True}, "PNG": {},
    "WEBP": {"lossless": True}, "TIFF": {},
}  # fmt: skip


def pattern(seed: int = 0) -> Image.Image:
    """Return an image whose corners all differ, of 72 × 104 pixels."""
    coarse = np.random.default_rng(seed).integers(0, 256, (9, 13, 3), np.uint8)
    return Image.fromarray(coarse).resize((104, 72), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "PNG", orientation: int | None = None, **options: Any) -> bytes:
    buffer, exif = io.BytesIO(), Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    image.save(buffer, exif=exif, **{"format": kind} | FORMATS.get(kind, {}) | options)
    return buffer.getvalue()


def by_pillow(data: bytes, *, upright: bool = True) -> Tensor:
    image = Image.open(io.BytesIO(data))
    image = ImageOps.exif_transpose(image) if upright else image
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


@pytest.mark.parametrize("kind", FORMATS)
def test_images_are_turned_as_pillow_turns_them(kind: str) -> None:
    options, key = Augment(), SampleKey(1, 2, 0)
    for orientation in range(1, 9):
        data = encoded(pattern(), kind, orientation)
        upright, picture = decode(data), Picture.open(data)
        assert torch.equal(upright, by_pillow(data))
        assert (picture.height, picture.width) == upright.shape[1:]
        assert picture.orientation == orientation
        # a crop is drawn on the upright size
        assert torch.equal(picture.region(11, 5, 43, 29), upright[:, 11:54, 5:34])
        plain = Picture.open(encoded(Image.fromarray(upright.permute(1, 2, 0).numpy())))
        assert torch.equal(augment(picture, options, 32, 7, key), augment(plain, options, 32, 7, key))
        # as version 0.2: Pillow turns TIFF by itself, and nothing else is turned
        assert torch.equal(decode(data, upright=False), by_pillow(data, upright=False))


def test_odd_orientations_are_read_as_upright() -> None:
    plain = pattern()
    for kind in ("PNG", "JPEG"):
        for orientation in (0, 9, 65535):
            assert torch.equal(decode(encoded(plain, kind, orientation)), decode(encoded(plain, kind)))
    damaged = encoded(plain, "JPEG", 6).replace(b"MM\0*\0\0\0\x08\0\x01", b"MM\0*\xff\xff\xff\xff\xff\xff")
    assert torch.equal(decode(damaged), decode(encoded(plain, "JPEG")))
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><a tiff:Orientation="6"/></x:xmpmeta>'
    data = encoded(plain, "JPEG", xmp=xmp)
    assert torch.equal(decode(data), by_pillow(data))
    assert decode(data).shape == (3, 104, 72)


@pytest.fixture
def turned(tmp_path: Path) -> Path:
    """Return a folder with turned images in all formats, and the same images upright in `plain`."""
    for number in range(16):
        kind = list(FORMATS)[number % 5]
        data = encoded(pattern(number), kind, number % 8 + 1)
        upright = encoded(Image.fromarray(decode(data).permute(1, 2, 0).numpy()))
        suffix = FORMATS[kind].get("format", kind).lower()
        for split in ("train", "val"):
            for root, content, ending in (("turned", data, suffix), ("plain", upright, "png")):
                path = tmp_path / root / split / "ab"[number % 2] / f"{number:02}.{ending}"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
    return tmp_path / "turned"


def words(root: Path, source: str = "folder") -> list[str]:
    return [f"data.source={source}", f"data.root={root}", "batch.global=8", "augment.size=32"]


def pixels_of(root: Path, *more: str) -> list[str]:
    """Return the digests of two global batches."""
    made, defects = stream(root, range(2), *words(root), *more)
    assert not defects
    return [batch.pixels for batch in made]


@pytest.mark.usefixtures("jpegtran")
def test_batches_of_a_folder_and_packs_are_those_of_the_upright_images(turned: Path, tmp_path: Path) -> None:
    expected = pixels_of(tmp_path / "plain")
    assert pixels_of(turned) == expected
    assert pixels_of(turned, "data.orientation=ignore") != expected
    held_out = []
    for root in (turned, tmp_path / "plain"):
        config = load("digits", words(root))
        held_out.append(EvalBatches(open_source(config).val, config)[0].images)
    assert torch.equal(*held_out), "what is evaluated; test_export.py has predict"
    make(turned, tmp_path / "pack", "lossless", 0.1)
    assert pixels_of(tmp_path / "pack", "data.source=pack") == expected
    for level in ("max-side=200,q=95", "raw=72"):
        shapes = []
        for name in ("turned", "plain"):
            make(tmp_path / name, tmp_path / f"{name} {level}", level, 0.1)
            images = open_source(load("digits", words(tmp_path / f"{name} {level}", "pack"))).train
            shapes.append([decode(images.read(i)).shape for i in range(len(images))])
        assert shapes[0] == shapes[1]


def test_a_pack_of_0_2_gives_its_pixels_of_0_2_and_runs_on_it_keep_its_orientation(tmp_path: Path) -> None:
    source, digest = open_source(load("digits", words(PACK_0_2, "pack"))), hashlib.sha256()
    for images in (source.train, source.val):
        assert not images.upright
        for i in range(len(images)):
            pixels = decode(images.read(i), upright=images.upright)
            digest.update(pixels.numpy().tobytes() + str(tuple(pixels.shape)).encode())
    assert (source.digest[:16], digest.hexdigest()[:16]) == ("f437f235afc28ef3", "4307afebc588325b")
    run = ["train", "digits", *SMALL, *words(PACK_0_2, "pack"), f"run.dir={tmp_path}", "data.max_bad=1"]
    for steps in (1, 2):
        assert quick(*run, f"train.max_steps={steps}", "schedule.warmup=0").code == 0
        contents = checkpoint_contents.read_model(checkpoint_files.find(tmp_path))
        assert from_yaml(contents["config"], "").data.orientation == "ignore"


def test_a_configuration_of_0_2_keeps_its_orientation_and_split(tmp_path: Path) -> None:
    def loaded(*more: str) -> tuple[str, str]:
        data = load("digits", [f"run.dir={tmp_path}", *more]).data
        return data.orientation, data.split_by

    new = load("digits", [f"run.dir={tmp_path}"]).to_yaml()
    assert loaded() == ("apply", "class")
    old = new.replace("  orientation: apply\n", "").replace("  split_by: class\n", "")
    (tmp_path / "config.yaml").write_text(old)
    assert loaded() == ("ignore", "file")
    assert loaded("data.orientation=apply") == ("apply", "file")
    assert loaded("run.resume=never") == ("apply", "class")
    (tmp_path / "config.yaml").write_text(new)
    assert loaded() == ("apply", "class")


# --- images of more than 8 bits

RAMP = np.linspace(0, 1, 24 * 32).reshape(24, 32)
LOW, HIGH, HIGHEST, SIGN = 340, 341, 281, 339
"""Tags of TIFF."""


def deep(values: Any, dtype: type, kind: str = "TIFF", tags: dict[int, float] | None = None) -> bytes:
    return encoded(Image.fromarray(values.astype(dtype)), kind, tiffinfo=tags or {})


GIVEN = {
    "16 bits": deep(RAMP * 65535, np.uint16),
    "16-bit PNG": deep(RAMP * 65535, np.uint16, "PNG"),
    "12 bits in 16": deep(RAMP * 4095, np.uint16, tags={HIGHEST: 4095}),
    "float around 0": deep(RAMP * 1000 - 500, np.float32, tags={LOW: -500, HIGH: 500}),
    "32 bits": deep(RAMP * 100_000, np.int32, tags={LOW: 0, HIGH: 100_000}),
}
ROWS = b"".join(b"\0" + row.astype(">u2").repeat(3).tobytes() for row in RAMP * 4095)
# What the error names, and the kind.
UNKNOWN = {
    "32-bit float": deep(RAMP, np.float32),
    "32-bit float, PFM": b"Pf\n32 24\n-1.0\n" + RAMP.astype("<f4").tobytes(),
    "32-bit integer": deep(RAMP * 255, np.int32),
    "16-bit integer, signed": deep(RAMP * 32767, np.uint16, tags={SIGN: 2}),
    "12-bit, TIFF": deep(RAMP * 4095, np.uint16),
    "12-bit, PNG": deep(RAMP * 4095, np.uint16, "PNG"),
    "12-bit, in colour": png(*RAMP.shape, 16, 2, ROWS),
    "outside, above white": deep(RAMP * 2, np.float32, tags={LOW: 0, HIGH: 1}),
    "outside, not a number": deep(RAMP * np.nan, np.float32, tags={LOW: 0, HIGH: 1}),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_a_range_that_the_file_gives_is_scaled(kind: str) -> None:
    assert np.abs(decode(GIVEN[kind])[0].numpy() - RAMP * 255).max() <= 1
    black = deep(RAMP * 0, np.uint16, "PNG")
    assert not decode(black).any(), "it is no defect, though its range is not known"


@pytest.mark.parametrize("kind", UNKNOWN)
def test_an_unknown_range_is_a_named_defect(kind: str) -> None:
    with pytest.raises(UnreadableError, match=kind.partition(",")[0]):
        decode(UNKNOWN[kind])
    decode(UNKNOWN[kind], upright=False)  # as version 0.2
