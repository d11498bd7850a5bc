"""A pack has the samples of its folder in the same order; a lossless pack has the same pixels."""

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import SMALL, environment, kill, quick
from PIL import Image
from streams import stream

from pipeline.addons.datasets import jpeg_cuts, jpeg_restarts, pack
from pipeline.addons.datasets import write_pack as packing
from pipeline.addons.datasets.manifest import scan
from pipeline.addons.datasets.write_pack import encode
from pipeline.addons.datasets.write_pack import pack as make
from pipeline.cli.main import main
from pipeline.config.load import load
from pipeline.data import jpeg
from pipeline.data.holdout import HoldOut
from pipeline.data.images import Picture, decode
from pipeline.data.interface import UnreadableError
from pipeline.data.sources import open_source
from pipeline.errors import RequestError

LEVELS = ("lossless", "max-side=100,q=90", "raw=64")


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    """Return an image with edges, gradients and noise, as photos have."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return Image.fromarray((smooth + rng.integers(-20, 20, smooth.shape)).clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return 64 training and 8 validation photos in all encodings; three are corrupt."""
    root = tmp_path_factory.mktemp("photos") / "images"
    kinds: list[dict[str, Any]] = [
        {"subsampling": 0}, {"subsampling": 2}, {"subsampling": 1, "optimize": True}, {"progressive": True}
    ]  # fmt: skip
    for number in range(72):
        split = "val" if number % 9 == 0 else "train"
        path = root / split / "ab"[number % 2] / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = photo(90 + number, 200 - number, number)
        if number % 8 == 5:
            path.with_suffix(".png").write_bytes(encoded(image, "PNG"))
        else:
            image = image.convert("L") if number % 8 == 6 else image
            path.write_bytes(encoded(image, quality=70 + number % 30, **kinds[number % 4]))
    content = (root / "train/b/01.jpg").read_bytes()
    (root / "train/b/01.jpg").write_bytes(content[: len(content) // 2])
    (root / "train/a/02.jpg").write_bytes(b"")
    (root / "train/b/03.jpg").unlink()
    (root / "train/b/03.jpg").symlink_to("nowhere")
    return root


@pytest.fixture(scope="module")
def packs(folder: Path, tmp_path_factory: pytest.TempPathFactory, jpegtran: str) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("packs")
    for level in LEVELS:
        make(folder, out / level, level, 0.1)
    return {level: out / level for level in LEVELS}


# --- JPEGs with restart markers, which can be decoded in part

SHAPES = [(120, 250), (33, 17), (8, 8), (200, 333), (97, 512), (160, 64)]


@pytest.mark.parametrize(
    "options",
    [{"subsampling": 0}, {"subsampling": 1}, {"subsampling": 2}, {"optimize": True, "quality": 30}],
    ids=str,
)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_region_has_exactly_the_pixels_of_the_whole_image(
    mode: str, options: dict[str, Any], jpegtran: str
) -> None:
    rng = np.random.default_rng(0)
    for number, (height, width) in enumerate(SHAPES):
        if mode != "RGB":
            options = {name: value for name, value in options.items() if name != "subsampling"}
        data = encoded(photo(height, width, number).convert(mode), **options)
        converted = jpeg_restarts.with_restarts(data)
        assert converted is not None
        pixels = decode(data)
        assert torch.equal(decode(converted), pixels)
        assert np.array_equal(
            np.asarray(Image.open(io.BytesIO(converted))), np.asarray(Image.open(io.BytesIO(data)))
        )
        cut, plain = Picture.open(converted), Picture.open(data)
        assert cut.frame
        assert cut.frame.cuts
        for _ in range(20):
            top, left = int(rng.integers(height)), int(rng.integers(width))
            h, w = int(rng.integers(1, height - top + 1)), int(rng.integers(1, width - left + 1))
            expected = pixels[:, top : top + h, left : left + w]
            assert torch.equal(cut.region(top, left, h, w), expected)
            assert torch.equal(plain.region(top, left, h, w), expected)


def test_a_false_table_of_segments_is_not_used(jpegtran: str) -> None:
    data = encoded(photo(400, 504))
    converted = bytearray(jpeg_restarts.with_restarts(data) or b"")
    lengths = converted.index(jpeg.CUTS_NAME) + len(jpeg.CUTS_NAME) + jpeg_cuts.CUTS_HEAD.size
    converted[lengths + 1] += 1
    converted[lengths + 3] -= 1  # the sum stays right
    assert torch.equal(Picture.open(bytes(converted)).region(0, 0, 50, 200), decode(data)[:, :50, :200])


@pytest.mark.parametrize(
    "data",
    [encoded(photo(64, 64), progressive=True), encoded(photo(64, 64), restart_marker_blocks=3),
     encoded(photo(64, 64), "PNG"), b"", b"\xff\xd8\xff"],
    ids=["progressive", "restarts of its own", "PNG", "empty", "short"],
)  # fmt: skip
def test_a_file_that_cannot_get_restart_markers_is_left_unchanged(data: bytes) -> None:
    assert jpeg_restarts.with_restarts(data) is None


def test_an_image_is_stored_unchanged_if_its_verification_fails(
    jpegtran: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encoded(photo(64, 64))
    other = jpeg_restarts.with_restarts(encoded(photo(64, 64, seed=1)))
    monkeypatch.setattr(jpeg_restarts, "with_restarts", lambda *_: other)
    assert encode(data, pack.Level.parse("lossless")) == (data, True, 0.0)


# --- jpegtran


def jpegs() -> dict[str, bytes]:
    """Return JPEGs of every kind that can get restart markers."""
    options: dict[str, dict[str, Any]] = {
        "no loss": {"quality": 100}, "mostly zeros": {"quality": 1}, "RGB": {"keep_rgb": True},
        "comment": {"comment": b"of a photo"}, "profile": {"icc_profile": bytes(3000)},
    }  # fmt: skip
    grey = encoded(photo(70, 90).convert("L"))
    at = grey.index(b"\xff\xc0") + 11
    return {
        **{name: encoded(photo(120, 250), **words) for name, words in options.items()},
        **{f"{h} x {w}": encoded(photo(h, w)) for h, w in [(1, 1), (1, 700), (700, 1), (90, 376)]},
        "grey 2x2": grey[:at] + b"\x22" + grey[at + 1 :],
        "flat": encoded(Image.new("RGB", (640, 480), "teal")),
    }


@pytest.mark.parametrize("kind", jpegs())
def test_a_sequential_jpeg_of_any_kind_gets_restart_markers(kind: str, jpegtran: str) -> None:
    data = jpegs()[kind]
    packed, is_unchanged, difference = encode(data, pack.Level.parse("lossless"))
    assert (is_unchanged, difference) == (False, 0)
    assert torch.equal(decode(packed), decode(data))


@pytest.mark.parametrize("script", ["exit 0", "cat", "cat; exit 2", "exec sleep 60"])
def test_a_file_that_jpegtran_refuses_is_stored_as_it_is(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "jpegtran"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    monkeypatch.setattr(jpeg_restarts, "_TIMEOUT_S", 0.5)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    data = encoded(photo(97, 61))
    assert encode(data, pack.Level.parse("lossless")) == packing.Encoded(data, True, 0.0)
    with pytest.raises(RequestError, match=rf"^{program} is not .*: install "):
        jpeg_restarts.check_jpegtran()


def test_without_jpegtran_the_command_says_what_to_install(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    for level in ("lossless", "max-side=100,q=90"):
        result = quick("data", "pack", str(folder), str(tmp_path / level), "--level", level)
        assert (result.code, result.err.count("\n")) == (2, 1)
        assert "install libjpeg-turbo-progs" in result.error
        assert not (tmp_path / level).exists()
    make(folder, tmp_path / "raw=64", "raw=64", 0.1)


# --- the same samples


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_stream_is_the_same_over_a_folder_and_every_pack(folder: Path, packs: dict[str, Path]) -> None:
    words = ("batch.global=16", "augment.size=48", "augment.scale=[0.08, 1]", "data.workers=0")
    expected, defects = stream(folder, range(8), "data.source=folder", *words)
    for level, root in packs.items():
        found, named = stream(root, range(8), "data.source=pack", *words)
        assert [(batch.ids, batch.labels) for batch in found] == [
            (batch.ids, batch.labels) for batch in expected
        ]
        assert {sample for sample, _ in named} == {sample for sample, _ in defects}
        assert (found == expected) == (level == "lossless")
        for world, workers, accumulate in ((2, 2, 1), (4, 0, 2)):
            more = (*words[:3], f"data.workers={workers}", f"batch.accumulate={accumulate}")
            assert stream(root, range(8), "data.source=pack", *more, world=world) == (found, named)


NPY_HEADERS = {
    "an open quote": "{'descr': '''|u1",
    "a number too large": "{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999999999999, 1, 3)}",
    "objects": "{'descr': 'O', 'fortran_order': False, 'shape': (1, 1, 3)}",
    "nested": "(" * 900,
}


@pytest.mark.parametrize("header", NPY_HEADERS.values(), ids=NPY_HEADERS)
def test_damaged_pixels_of_a_pack_are_a_named_defect(header: str) -> None:
    with pytest.raises(UnreadableError, match="its pixels cannot be read: "):
        pack.file_or_pixels(b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header.encode())


def test_the_tar_files_unpack_to_the_folder_without_its_bad_files(
    folder: Path, packs: dict[str, Path], tmp_path: Path
) -> None:
    summary = json.loads((packs["lossless"] / "pack.json").read_text())
    assert [name for name, _ in summary["bad"]] == ["train/a/02.jpg", "train/b/01.jpg", "train/b/03.jpg"]
    for shard in packs["lossless"].glob("*.tar"):
        with tarfile.open(shard) as file:
            file.extractall(tmp_path, filter="data")
    index = scan(folder, HoldOut())
    for split in (index.train, index.val):
        for i in range(len(split)):
            name = split.name(i).decode()
            if name == "train/b/03.jpg":
                assert not (tmp_path / name).exists()
            elif name not in ("train/b/01.jpg", "train/a/02.jpg"):
                assert torch.equal(
                    decode((tmp_path / name).read_bytes()), decode((folder / name).read_bytes())
                )


@pytest.mark.full
def test_a_run_from_a_lossless_pack_has_the_weights_of_one_from_the_folder(
    digits: Path, tmp_path: Path, jpegtran: str
) -> None:
    make(digits, tmp_path / "pack", "lossless", 0.1)
    words = [*SMALL, "train.max_steps=4", "data.workers=2"]
    runs = [
        quick("train", "digits", *words, *more)
        for more in (
            (f"data.root={digits}", f"run.dir={tmp_path / 'folder'}"),
            (f"data.root={tmp_path / 'pack'}", "data.source=pack", f"run.dir={tmp_path / 'run'}"),
        )
    ]
    assert runs[0].done == runs[1].done
    evaluated = quick("evaluate", str(tmp_path / "run"))
    assert evaluated.done == runs[1].done
    other = quick("train", "digits", *words, f"data.root={digits}", f"run.dir={tmp_path / 'run'}")
    assert (other.code, "data.source: pack -> digits" in other.error) == (2, True)


# --- packing


def file_digests(root: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(root.iterdir())}


def make_large_folder(root: Path) -> Path:
    for number in range(48):
        path = root / ("val" if number < 4 else "train") / "ab"[number % 2] / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(photo(240, 320, number), quality=95))
    return root


def test_a_killed_pack_resumes_and_ends_with_the_same_bytes(tmp_path: Path, seed: int, jpegtran: str) -> None:
    source = make_large_folder(tmp_path / "images")
    start = time.monotonic()
    make(source, tmp_path / "uninterrupted", "lossless", 0.1)
    seconds = time.monotonic() - start
    expected = file_digests(tmp_path / "uninterrupted")
    assert len(expected) > 4  # shards, the index and the summary
    out = tmp_path / f"killed-{seed}"
    command = [sys.executable, "-m", "pipeline", "data", "pack", str(source), str(out)]
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while process.poll() is None and not (out / ".packing.json").exists():
        time.sleep(0.01)
    time.sleep(float(np.random.default_rng(seed).uniform(0, seconds)))
    kill(process.pid, signal.SIGKILL)
    process.wait()
    make(source, out, "lossless", 0.1)
    assert file_digests(out) == expected, f"seed {seed}"


def test_any_number_of_workers_makes_the_same_pack(
    folder: Path, packs: dict[str, Path], tmp_path: Path
) -> None:
    for workers in (1, 3):
        command = ["data", "pack", str(folder), str(tmp_path / str(workers)), "--workers", str(workers)]
        assert main(command) == 0
        assert file_digests(tmp_path / str(workers)) == file_digests(packs["lossless"])


def test_a_folder_with_other_contents_is_left_unchanged(
    folder: Path, packs: dict[str, Path], tmp_path: Path
) -> None:
    out = packs["lossless"]
    before = file_digests(out)
    with pytest.raises(RequestError, match=r"holds a pack of another source, level or format"):
        make(folder, out, "raw=64", 0.1)
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(RequestError, match="is not empty and holds no pack: name another folder"):
        make(folder, tmp_path, "lossless", 0.1)
    assert file_digests(out) == before
    old = shutil.copytree(Path(__file__).with_name("pack-0.2"), tmp_path / "pack-0.2")
    with pytest.raises(RequestError, match="format 1"):
        make(folder, old, "lossless", 0.1)


@pytest.mark.parametrize("level", ["", "max-side=500", "max-side=0,q=90", "max-side=500,q=101", "raw=4"])
def test_an_invalid_level_is_refused(level: str) -> None:
    with pytest.raises(RequestError, match=f"^level {level} ?is not allowed: lossless, max-side="):
        pack.Level.parse(level)


# --- damage


def copy_folder(root: Path, to: Path) -> Path:
    to.mkdir()
    for path in root.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_a_damaged_pack_is_not_called_packed(folder: Path, packs: dict[str, Path], tmp_path: Path) -> None:
    root = copy_folder(packs["lossless"], tmp_path / "pack")
    words = ("data", "pack", str(folder), str(root))
    again = quick(*words)
    assert again.out.startswith(f"packed {root}: 72 images")
    assert f"{root} was packed before" in again.err
    shard = root / "val-0000.tar"
    shard.write_bytes(bytes(shard.stat().st_size))
    refused = quick(*words)
    problem = "val-0000.tar changed since it was packed: remove it and pack it again"
    assert (refused.code, refused.error) == (4, f"the pack {root} is damaged: {problem}")
    (root / "pack.json").write_text("x")
    assert quick(*words).code == 2
    shutil.rmtree(root)
    assert quick(*words).code == 0
    assert file_digests(root) == file_digests(packs["lossless"])


@pytest.mark.parametrize("file", ["pack.json", "pack.index", "train-0000.tar", "val-0000.tar"])
@pytest.mark.parametrize("damage", ["gone", "other", "a pipe"])
def test_a_damaged_pack_is_refused(packs: dict[str, Path], tmp_path: Path, file: str, damage: str) -> None:
    root = copy_folder(packs["lossless"], tmp_path / "pack")
    (root / file).unlink()
    if damage == "a pipe":
        os.mkfifo(root / file)
    elif damage == "other":
        (root / file).write_bytes(b"x" * 600)
    with pytest.raises(
        RequestError, match=r"the pack .* is damaged: |holds no complete pack|not a regular file"
    ):
        open_source(load("digits", ["data.source=pack", f"data.root={root}"]))
