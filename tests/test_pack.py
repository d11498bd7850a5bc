"""A pack has the samples of its folder in the same order; a lossless pack has the same pixels."""

import errno
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import environment, kill, quick, refused
from PIL import Image
from streams import stream

from pipeline.addons.datasets import jpeg, jpeg_restarts, pack
from pipeline.addons.datasets.holdout import HoldOut
from pipeline.addons.datasets.images import Picture, decode
from pipeline.addons.datasets.manifest import scan
from pipeline.addons.datasets.pack_target import open_target
from pipeline.addons.datasets.sources import open_source
from pipeline.addons.datasets.write_pack import encode
from pipeline.addons.datasets.write_pack import pack as make
from pipeline.config.load import load
from pipeline.data.interface import UnreadableError
from pipeline.errors import RequestError, StorageError

LEVELS = ("lossless", "max-side=100,q=90", "raw=64")
LOSSLESS = pack.Level.parse("lossless")


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


def write_jpegs(root: Path, train: int, val: int, height: int, width: int) -> Path:
    """Write photos of two classes, and return `root`."""
    for number in range(train + val):
        path = root / ("val" if number < val else "train") / "ab"[number % 2] / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(photo(height, width, number), quality=95))
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return 64 training and 8 validation photos in all encodings; three are corrupt."""
    root = tmp_path_factory.mktemp("photos") / "images"
    kinds = [{"subsampling": 0}, {"subsampling": 2}, {"subsampling": 1, "optimize": 1}, {"progressive": 1}]
    for number in range(72):
        path = root / ("val" if number % 9 == 0 else "train") / "ab"[number % 2] / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = photo(90 + number, 200 - number, number)
        if number % 8 == 5:
            path.with_suffix(".png").write_bytes(encoded(image, "PNG"))
        else:
            image = image.convert("L") if number % 8 == 6 else image
            path.write_bytes(encoded(image, quality=70 + number % 30, **kinds[number % 4]))
    bad = [root / "train/b/01.jpg", root / "train/a/02.jpg", root / "train/b/03.jpg"]
    os.truncate(bad[0], bad[0].stat().st_size // 2)
    os.truncate(bad[1], 0)
    bad[2].unlink()
    bad[2].symlink_to("nowhere")
    return root


@pytest.fixture(scope="module")
def packs(folder: Path, tmp_path_factory: pytest.TempPathFactory, jpegtran: str) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("packs")
    for level in LEVELS:
        make(folder, out / level, level, 0.1)
    return {level: out / level for level in LEVELS}


# --- JPEGs with restart markers, which can be decoded in part


def test_a_sequential_jpeg_gets_restart_markers_and_keeps_its_pixels(jpegtran: str) -> None:
    sizes = ((120, 250), (33, 17), (8, 8), (200, 333), (97, 512), (1, 1), (1, 700), (700, 1))
    grey = encoded(photo(70, 90).convert("L"))
    factors = grey.index(b"\xff\xc0") + 11  # grey is coded block by block, whatever they are
    sequential = [
        *(encoded(photo(*size), subsampling=number % 3) for number, size in enumerate(sizes)),
        *(encoded(photo(*size).convert(mode), optimize=True) for size in sizes[:5] for mode in ("L", "CMYK")),
        *(encoded(photo(120, 250), quality=quality) for quality in (1, 100)),
        encoded(photo(120, 250), keep_rgb=True),
        encoded(photo(120, 250), icc_profile=bytes(3000)),
        encoded(photo(120, 250), restart_marker_blocks=3),
        grey[:factors] + b"\x22" + grey[factors + 1 :],
        encoded(Image.new("RGB", (640, 480), "teal")),
    ]
    rng = np.random.default_rng(0)
    for data in sequential:
        packed, difference = encode(data, LOSSLESS)
        assert (packed != data, difference) == (True, 0)
        pixels = decode(data)
        assert torch.equal(decode(packed), pixels)
        assert Image.open(io.BytesIO(packed)).tobytes() == Image.open(io.BytesIO(data)).tobytes()
        cut, plain = Picture.open(packed), Picture.open(data)
        assert cut.frame.cuts
        for _ in range(20):
            top, left = int(rng.integers(plain.height)), int(rng.integers(plain.width))
            bottom, right = int(rng.integers(top, plain.height)) + 1, int(rng.integers(left, plain.width)) + 1
            for picture in (cut, plain):
                region = picture.region(top, left, bottom - top, right - left)
                assert torch.equal(region, pixels[:, top:bottom, left:right])
    for other in (encoded(photo(64, 64), progressive=True), encoded(photo(64, 64), "PNG"), b"\xff\xd8\xff"):
        assert jpeg_restarts.with_restarts(other) is None


def test_a_false_table_of_segments_is_not_used(jpegtran: str) -> None:
    data = encoded(photo(400, 504))
    converted = bytearray(jpeg_restarts.with_restarts(data) or b"")
    lengths = converted.index(jpeg.CUTS_NAME) + len(jpeg.CUTS_NAME) + jpeg_restarts.CUTS_HEAD.size
    converted[lengths + 1] += 1
    converted[lengths + 3] -= 1  # the sum stays right
    assert torch.equal(Picture.open(bytes(converted)).region(0, 0, 50, 200), decode(data)[:, :50, :200])


def test_a_missing_or_wrong_jpegtran_is_named_and_never_changes_pixels(
    folder: Path, tmp_path: Path, jpegtran: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encoded(photo(97, 61))
    other = jpeg_restarts.with_restarts(encoded(photo(97, 61, seed=1)))
    with monkeypatch.context() as patch:
        patch.setattr(jpeg_restarts, "with_restarts", lambda *_: other)
        assert encode(data, LOSSLESS) == (data, 0.0)
    monkeypatch.setattr(jpeg_restarts, "_TIMEOUT_S", 0.5)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for script in ("exit 0", "cat", "cat; exit 2", "exec sleep 60"):
        (tmp_path / "jpegtran").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "jpegtran").chmod(0o700)
        assert encode(data, LOSSLESS) == (data, 0.0)
        assert "is not the jpegtran of libjpeg-turbo" in refused(jpeg_restarts.check_jpegtran)
    monkeypatch.setenv("PATH", "")
    for level in ("lossless", "max-side=100,q=90"):
        result = quick("data", "pack", str(folder), str(tmp_path / level), "--level", level, code=2)
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
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours.ids, ours.labels) == (theirs.ids, theirs.labels)
        assert {sample for sample, _ in named} == {sample for sample, _ in defects}
        assert (found == expected) == (level == "lossless")
        for world, workers, accumulate in ((2, 2, 1), (4, 0, 2)):
            more = (*words[:3], f"data.workers={workers}", f"batch.accumulate={accumulate}")
            assert stream(root, range(8), "data.source=pack", *more, world=world) == (found, named)


@pytest.mark.parametrize("header", ["{'descr': '''|u1", "{'descr': 'O', 'shape': (1, 1, 3)}", "(" * 900])
def test_damaged_pixels_of_a_pack_are_a_named_defect(header: str) -> None:
    with pytest.raises(UnreadableError, match="its pixels cannot be read: "):
        pack.file_or_pixels(b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header.encode())


def test_the_tar_files_unpack_to_the_folder(folder: Path, packs: dict[str, Path], tmp_path: Path) -> None:
    for shard in packs["lossless"].glob("*.tar"):
        with tarfile.open(shard) as file:
            file.extractall(tmp_path, filter="data")
    unpacked = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")}
    assert {name.decode() for name in scan(folder, HoldOut()).names()} - unpacked == {"train/b/03.jpg"}
    bad = {name for name, _ in json.loads((packs["lossless"] / "pack.json").read_text())["bad"]}
    assert bad == {"train/a/02.jpg", "train/b/01.jpg", "train/b/03.jpg"}
    for name in unpacked - bad:
        assert torch.equal(decode((tmp_path / name).read_bytes()), decode((folder / name).read_bytes()))


# --- packing


def file_digests(root: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(root.iterdir())}


def test_a_killed_packing_resumes_to_the_same_bytes(tmp_path: Path, seed: int, jpegtran: str) -> None:
    source = write_jpegs(tmp_path / "images", train=44, val=4, height=240, width=320)
    start = time.monotonic()
    make(source, tmp_path / "uninterrupted", "lossless", 0.1, workers=1)
    seconds = time.monotonic() - start
    expected = file_digests(tmp_path / "uninterrupted")
    assert len(expected) > 4  # shards, the index and the summary
    out = tmp_path / f"killed-{seed}"
    command = [sys.executable, "-m", "pipeline", "data", "pack", str(source), str(out)]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)
    while process.poll() is None and not (out / ".packing.json").exists():
        time.sleep(0.01)
    time.sleep(float(np.random.default_rng(seed).uniform(0, seconds)))
    kill(process.pid, signal.SIGKILL)
    process.wait()
    make(source, out, "lossless", 0.1, workers=3)
    assert file_digests(out) == expected, f"seed {seed}"


def test_other_contents_are_left_unchanged(folder: Path, packs: dict[str, Path], tmp_path: Path) -> None:
    out = packs["lossless"]
    before = file_digests(out)
    (tmp_path / "notes").write_text("mine")
    old = shutil.copytree(Path(__file__).with_name("pack-0.2"), tmp_path / "pack-0.2")
    for place, level, reason in (
        (out, "raw=64", "holds a pack of another source, level or format"),
        (old, "lossless", "format 1"),
        (tmp_path, "lossless", "is not empty and holds no pack"),
    ):
        with pytest.raises(RequestError, match=reason):
            make(folder, place, level, 0.1)
    assert (file_digests(out), {*os.listdir(tmp_path)}) == (before, {"notes", "pack-0.2"})


def test_a_start_that_waits_for_a_lock_which_is_removed_locks_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / ".lock"

    def next_start() -> bool:
        with open_target(tmp_path).hold():
            return path.exists()

    with ThreadPoolExecutor(1) as thread:
        with open_target(tmp_path).hold():
            task = thread.submit(next_start)
            while [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()].count(str(path)) < 2:
                time.sleep(0.01)
        assert task.result()
    with pytest.raises(StorageError), open_target(tmp_path).hold():
        raise OSError(errno.ENOSPC, "full")
    assert path.exists(), "workers that still run hold it"


@pytest.mark.parametrize("file", ["pack.json", "pack.index", "train-0000.tar"])
def test_a_damaged_pack_is_refused(folder: Path, packs: dict[str, Path], tmp_path: Path, file: str) -> None:
    root = shutil.copytree(packs["lossless"], tmp_path / "pack")
    words = ("data", "pack", str(folder), str(root))
    config = load("digits", ["data.source=pack", f"data.root={root}"])
    assert f"{root} was packed before" in quick(*words, code=0).err
    if file.endswith(".tar"):
        (root / file).write_bytes(bytes((root / file).stat().st_size))
        assert quick(*words).code == 4, "the same size, other bytes"
    (root / file).write_bytes(b"x" * 600)
    assert quick(*words).code == 2, "it is not called packed"
    for damage in (Path.exists, Path.unlink, os.mkfifo):  # other bytes, none, and a pipe
        damage(root / file)
        assert str(root) in refused(lambda: open_source(config))
