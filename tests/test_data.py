"""Images: indexed, fingerprinted, split, checked, and decoded or reported as defects."""

import hashlib
import io
import os
import random
import resource
import shutil
import struct
import subprocess
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
from faults.ledger import Notes
from harness import quick, read_rows, refused
from numpy.typing import NDArray
from PIL import Image
from place import SMALL
from streams import joined, stream, train_batches
from test_pack import encoded, photo

from pipeline.addons.datasets import checksums, images, manifest
from pipeline.addons.datasets.folders import changes
from pipeline.addons.datasets.holdout import HoldOut
from pipeline.addons.datasets.images import Picture, decode
from pipeline.addons.datasets.index import MISSING, Index, Split
from pipeline.addons.datasets.manifest import open_index, scan
from pipeline.addons.datasets.sources import open_source, source_from_index
from pipeline.addons.datasets.write_pack import pack as make_pack
from pipeline.addons.models.eval_batches import EvalBatches
from pipeline.config.load import load
from pipeline.data.augment import center_crop
from pipeline.data.batch import NO_LABEL
from pipeline.data.interface import OutageError, UnreadableError
from pipeline.data.loader import batches
from pipeline.plan import DataSize


def small_png(shade: int = 0) -> bytes:
    return encoded(Image.fromarray(np.full((8, 8), shade, np.uint8)), "PNG")


def fill(root: Path, *names: str | bytes) -> Path:
    """Write a small image under each name and return `root`; images of one class look alike."""
    for name in names:
        path = root / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(small_png(sum(os.fsencode(name)) % 256))
    return root


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return an image folder of two classes, five training and two validation images."""
    images = "train/cat/1.png train/cat/2.PNG train/cat/more/3.jpeg train/dog/1.png train/dog/2.png"
    return fill(tmp_path / "images", *images.split(), "val/cat/1.png", "val/dog/1.png")


def names(split: Split) -> list[bytes]:
    return [split.name(i) for i in range(len(split))]


def digests(root: Path, index: Index) -> NDArray[np.uint8]:
    sums = [hashlib.sha256((root / os.fsdecode(name)).read_bytes()).digest() for name in index.names()]
    return np.frombuffer(b"".join(sums), np.uint8).reshape(-1, 32)


def write_sums(root: Path) -> None:
    index = scan(root, HoldOut())
    checksums.write_sums(root, index, digests(root, index))


# --- the index


def test_an_index_has_each_image_once_in_name_order_and_round_trips_through_its_bytes(folder: Path) -> None:
    write_sums(folder)
    index = scan(folder, HoldOut())
    assert names(index.train) == [b"train/cat/1.png", b"train/cat/2.PNG", b"train/cat/more/3.jpeg",
                                  b"train/dog/1.png", b"train/dog/2.png"]  # fmt: skip
    assert names(index.val) == [b"val/cat/1.png", b"val/dog/1.png"]
    assert (index.train.labels.tolist(), index.val.labels.tolist()) == ([0, 0, 0, 1, 1], [0, 1])
    assert index.classes == ("cat", "dog")
    assert list(index.train.sizes) == [(folder / name.decode()).stat().st_size for name in names(index.train)]
    restored = Index.from_bytes(index.to_bytes())
    assert (restored.to_bytes(), restored.digest) == (index.to_bytes(), index.digest)


def test_each_change_of_the_data_changes_the_digest_and_is_named(folder: Path) -> None:
    dog = folder / "val/dog/1.png"
    size = dog.stat().st_size
    steps: list[tuple[Callable[[], object], list[str]]] = [
        (lambda: fill(folder, "train/dog/3.png"), ["train/dog/3.png is new"]),
        ((folder / "train/cat/1.png").unlink, ["train/cat/1.png is gone"]),
        (lambda: dog.write_bytes(b"four"), [f"val/dog/1.png had {size} bytes and has 4"]),
        (lambda: fill(folder, "train/eel/1.png", "val/eel/1.png"),
         ["class eel is new", "train/eel/1.png is new", "val/eel/1.png is new"]),
        (lambda: write_sums(folder), ["SHA256SUMS is new"]),
        # of the same size: only the checksum differs
        (lambda: (dog.write_bytes(b"five"), write_sums(folder)),
         ["val/dog/1.png has another sum in SHA256SUMS"]),
    ]  # fmt: skip
    for change, said in steps:
        before = scan(folder, HoldOut())
        assert before.digest == scan(folder, HoldOut()).digest
        change()
        after = scan(folder, HoldOut())
        assert (before.digest != after.digest, list(changes(before, after))) == (True, said)


@pytest.mark.parametrize("split", [HoldOut(), HoldOut(0.5)])
def test_the_cache_is_used_until_a_folder_changes(
    tmp_path: Path, folder: Path, split: HoldOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans: list[Path] = []
    monkeypatch.setattr(manifest, "scan", lambda root, rule: scans.append(root) or scan(root, rule))
    root = folder if split == HoldOut() else folder / "train"
    before = {open_index(root, split, tmp_path / "spare", check_sizes=False).digest for _ in range(3)}
    assert (len(scans), len(before)) == (1, 1)
    fill(folder, "train/eel/1.png", "train/eel/2.png", "val/eel/1.png")
    after = open_index(root, split, tmp_path / "spare", check_sizes=False)
    assert (len(scans), after.digest) == (2, scan(root, split).digest)
    assert after.digest not in before
    assert after.classes == ("cat", "dog", "eel")
    assert not (tmp_path / "spare").exists()


def test_a_checked_size_that_changed_is_found_and_a_bad_cache_ignored(tmp_path: Path, folder: Path) -> None:
    before = open_index(folder, HoldOut(), tmp_path, check_sizes=True)
    (path,) = (folder / manifest.CACHE).glob("*.index")
    content = path.read_bytes()
    for damaged in (b"", content[:100], content[:-20] + bytes(20), content.replace(b"dog", b"cow")):
        path.write_bytes(damaged)
        index = open_index(folder, HoldOut(), tmp_path, check_sizes=False)
        assert (index.digest, index.classes) == (before.digest, ("cat", "dog"))
    (folder / "train/dog/2.png").write_bytes(b"x")  # in place, so that no folder's mtime changes
    assert open_index(folder, HoldOut(), tmp_path, check_sizes=False).digest == before.digest
    assert open_index(folder, HoldOut(), tmp_path, check_sizes=True).digest != before.digest
    assert manifest.find_cached_index(folder, tmp_path, before.digest), "a resume can name what changed"


@pytest.mark.fault("C3")
def test_the_index_of_read_only_data_is_saved_in_the_run_folder_or_it_is_logged(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / manifest.CACHE).write_text("not even root can make a folder here")
    (tmp_path / "file").write_text("x")
    for place in ("run", "run", "file", "file"):
        assert len(open_index(folder, HoldOut(), tmp_path / place / "index", check_sizes=False).train) == 5
        said = capsys.readouterr().err.splitlines()
        assert len(said) == (1 if place == "file" else 0)
        assert all(
            f"{folder / manifest.CACHE}: File exists, {tmp_path / 'file/index'}: " in line for line in said
        )
    assert len(list((tmp_path / "run/index").glob("*.index"))) == 1


# --- layouts and generated data


def test_the_share_of_each_class_is_held_out(tmp_path: Path) -> None:
    counts = {"one": 1, "two": 2, "three": 3, "seven": 7, "twenty": 20, "hundred": 100}
    root = fill(tmp_path / "images", *(f"{kind}/{i}.png" for kind in counts for i in range(counts[kind])))
    shares = {0: [0] * 6, 0.1: [0, 0, 1, 1, 2, 10], 0.3: [0, 1, 1, 2, 6, 30], 0.9: [0, 1, 2, 6, 18, 90]}
    for share, expected in shares.items():
        index = scan(root, HoldOut(share))
        held_out = dict(zip(index.classes, np.bincount(index.val.labels, minlength=6).tolist(), strict=True))
        assert list(map(held_out.get, counts)) == expected
        assert index.size.train_images + index.size.val_images == sum(counts.values())
    before = set(names(scan(root, HoldOut(0.3)).val))
    assert before <= set(names(scan(root, HoldOut(0.9)).val))
    assert set(names(scan(shutil.copytree(root, tmp_path / "moved"), HoldOut(0.3)).val)) == before


def test_a_file_of_a_split_by_file_moves_no_other_and_every_class_has_one_to_train(tmp_path: Path) -> None:
    root = fill(tmp_path / "images", *(f"{kind}/{i}.png" for kind in ("cat", "dog") for i in range(200)))
    rule = HoldOut(0.2, "file")
    before = scan(root, rule)
    # as version 0.2 chose them
    assert hashlib.sha256(b" ".join(names(before.val))).hexdigest()[:16] == "385c8be9c869d0ee"
    fill(root, *(f"{kind}/new-{i}.png" for kind in ("cat", "dog", "eel") for i in range(40)))
    after = scan(root, rule)
    assert set(names(before.val)) < set(names(after.val))
    assert set(names(before.train)) < set(names(after.train))
    fill(root, *(f"class {i:02}/0.png" for i in range(40)))
    held_out = [f"class {i:02}" for i in range(40) if rule.chosen([(b"class %02d/0.png" % i, i)])]
    assert f"no image to train of class {', '.join(held_out[:5])}" in refused(lambda: scan(root, rule))


def test_generated_data_is_complete_and_never_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "made"
    words = ("data", "make", "synthetic", str(out), "--images", "13", "--classes", "4", "--side", "16")
    first, second = quick(*words), quick(*words)
    assert (first.code, second.code, "already exists" in second.error) == (0, 2, True)
    assert scan(out, HoldOut()).size == DataSize(13, 4, 4)
    assert os.listdir(tmp_path) == ["made"]


# --- data check


@pytest.mark.fault("E2")
def test_sums_match_sha256sum_and_name_what_changed(tmp_path: Path) -> None:
    odd = [os.fsdecode(b"train/a/\xff.png"), "train/a/back\\slash.png", "train/b/line\nbreak.png"]
    root = fill(tmp_path / "images", *odd, "train/a/two words.png", "val/a/1.png", "val/b/1.png")
    quick("data", "check", str(root), "--write-sums", code=0)
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", checksums.SUMS], cwd=root, check=True)
    assert quick("data", "check", str(root)).code == 0

    changed = root / "train/a/two words.png"
    content = changed.read_bytes()
    changed.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # in IEND's checksum: no decoder looks
    (root / "val/a/1.png").rename(root / "val/a/2.png")
    # only their names are reported: whether a sum matches would tell what other files hold
    os.mkfifo(root / "pipe.png")
    outside = ["../outside.png", f"{tmp_path}/outside.png", "pipe.png"]
    with open(root / checksums.SUMS, "a") as file:
        file.writelines(f"{'0' * 64}  {name}\n" for name in [*outside, "/dev/zero", "notes.txt"])
    result = quick("data", "check", str(root), timeout=60, code=4)
    assert sorted(result.err.splitlines()[1:-1]) == sorted([
        "train/a/two words.png: has changed: its content is not that of SHA256SUMS",
        "val/a/2.png: has no sum in SHA256SUMS",
        *(f"{name}: has a sum in SHA256SUMS, but is not an image of this folder"
          for name in [*outside, "val/a/1.png"]),
    ])  # fmt: skip


PIPES = {"train/cat/pipe.png": (4, 0), "SHA256SUMS": (2, 2), f"{manifest.CACHE}/{'0' * 16}.index": (0, 0)}


@pytest.mark.parametrize(("name", "codes"), PIPES.items())
def test_a_named_pipe_is_not_waited_for(folder: Path, name: str, codes: tuple[int, int]) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    os.mkfifo(folder / name)
    plan = quick("plan", "digits", "batch.global=2", "data.source=folder", f"data.root={folder}", timeout=60)
    result = quick("data", "check", str(folder), timeout=60)
    assert (result.code, plan.code) == codes, plan.err
    assert codes == (0, 0) or f"{name}: not a regular file" in result.err


@pytest.mark.fault("E2")
def test_each_flipped_bit_is_named(tmp_path: Path, notes: Notes, pytestconfig: pytest.Config) -> None:
    count = 400 if pytestconfig.getoption("--faults") == "long" else 50
    names = sorted(f"train/{'ab'[number % 2]}/{number}.png" for number in range(count))
    root = fill(tmp_path / "images", *names, "val/a/1.png", "val/b/1.png")
    assert quick("data", "check", str(root), "--write-sums").code == 0
    rng = random.Random(1)
    for name in names:
        data = bytearray((root / name).read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (root / name).write_bytes(data)
    result = quick("data", "check", str(root), code=4)
    assert sorted(line.partition(":")[0] for line in result.err.splitlines()[1:-1]) == names
    notes.note("E2", times=count)


# --- image formats

PIXELS = np.stack(np.broadcast_arrays(*np.ogrid[0:240:6, 0:240:5], np.uint16(90)), -1)
RGB = Image.fromarray(PIXELS.astype(np.uint8))
MOVES = {"save_all": True, "append_images": [RGB.rotate(90, expand=False)]}
KINDS = {
    **{f"RGB {kind}": encoded(RGB, kind) for kind in ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "PPM", "GIF")},
    **{f"{mode} PNG": encoded(RGB.convert(mode), "PNG") for mode in ("L", "1", "P", "RGBA", "LA")},
    **{f"animated {kind}": encoded(RGB, kind, **MOVES) for kind in ("GIF", "PNG", "WEBP")},
    **{f"CMYK {kind}": encoded(RGB.convert("CMYK"), kind) for kind in ("JPEG", "TIFF")},
    "grey JPEG": encoded(RGB.convert("L"), "JPEG"),
    "palette PNG with a transparent colour": encoded(RGB.convert("P"), "PNG", transparency=3),
    "RGBA WebP": encoded(RGB.convert("RGBA"), "WEBP"),
    "1 × 1 JPEG": encoded(RGB.crop((0, 0, 1, 1)), "JPEG"),
}


@pytest.mark.fault("E1")
@pytest.mark.parametrize("kind", KINDS)
def test_an_image_has_the_pixels_that_pillow_decodes(kind: str) -> None:
    pixels = decode(KINDS[kind])  # the format is detected from the content
    expected = np.asarray(Image.open(io.BytesIO(KINDS[kind])).convert("RGB"))
    assert (pixels.dtype, pixels.shape) == (torch.uint8, (3, *expected.shape[:2]))
    assert np.abs(pixels.permute(1, 2, 0).numpy().astype(int) - expected).max() <= 2


def png(height: int, width: int, bits: int, colour: int, rows: bytes) -> bytes:
    """Return a PNG of a kind that Pillow does not write."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    made = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")):
        made += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return made


@pytest.mark.fault("E7")
def test_neither_a_bomb_is_decoded_nor_a_long_image_resized_as_a_whole() -> None:
    bomb = png(21_000, 21_000, 1, 0, bytes(21_000 * (1 + 21_000 // 8)))
    assert len(bomb) < 100_000
    long = torch.zeros((3, 1, 10_000), dtype=torch.uint8)
    long[..., 5_000] = 200
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UnreadableError, match="21000 × 21000 pixels"):
        decode(bomb)
    seen = center_crop(long, 224, 256)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert (seen.shape, seen.dtype, bool(seen.max() > 100)) == ((3, 224, 224), torch.uint8, True)
    assert grown < 64 * 1024, "KiB; as a whole they have 1.3 and 2 GB"


@pytest.mark.fault("E1")
@pytest.mark.parametrize(
    ("data", "reason"),
    [(b"", "empty file"),
     (b"hello\n", "not an image in a known format"),
     (encoded(RGB, "JPEG")[:600], "Truncated"),
     (encoded(RGB, "PNG")[:-60], "truncated"),
     (encoded(RGB, "WEBP")[:-60], "."),
     (encoded(RGB, "TIFF")[:900], "truncated"),
     (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "not an image in a known format")],
    ids=["empty", "text", "JPEG", "PNG", "WebP", "TIFF", "EPS, which would start Ghostscript"],
)  # fmt: skip
def test_a_file_that_is_no_image_is_a_named_defect(data: bytes, reason: str) -> None:
    with pytest.raises(UnreadableError, match=reason):
        decode(data)


def test_a_file_that_cannot_be_read_is_named(folder: Path) -> None:
    cats = folder / "train/cat"
    (cats / "0.png").symlink_to("nowhere")
    (cats / "1.png").touch()
    os.truncate(cats / "1.png", 1 << 40)
    images = source_from_index(folder, scan(folder, HoldOut())).train
    (cats / "2.PNG").write_bytes(small_png() + b"x")
    for number, reason in enumerate((
        "No such file or directory", "1,099,511,627,776 bytes, more than the 268,435,456 allowed",
        "changed since it was indexed, when it had ",
    )):  # fmt: skip
        with pytest.raises(UnreadableError, match=f"^{reason}"):
            images.read(number)


def test_missing_data_is_an_outage_and_no_defect(folder: Path) -> None:
    images, cats = source_from_index(folder, scan(folder, HoldOut())).train, folder / "train/cat"
    (cats / "1.png").unlink()
    (cats / "1.png").symlink_to("/proc/self/mem")  # can be opened, but reading at 0 fails
    with pytest.raises(OutageError, match=r"/train/cat/1.png: Input/output error"):
        images.read(0)
    shutil.rmtree(cats)
    cats.mkdir()  # as of a volume that is not mounted
    with pytest.raises(OutageError, match="No such file or directory"):
        images.read(0)


def test_links_that_come_back_are_indexed_again_and_loops_are_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "archives").symlink_to("/nowhere/archives")  # beside train/ and val/: no outage
    store = fill(tmp_path / "store", "1.png", "2.png")
    (folder / "train/cat/1.png").unlink()
    (folder / "train/cat/1.png").symlink_to(store / "2.png")
    (store / "2.png").rename(tmp_path / "away.png")
    assert open_index(folder, HoldOut(), tmp_path / "spare", check_sizes=False).train.sizes[0] == MISSING
    (tmp_path / "away.png").rename(store / "2.png")
    assert open_index(folder, HoldOut(), tmp_path / "spare", check_sizes=False).train.sizes[0] > 0
    (folder / "train/dog/loop").symlink_to("loop")
    assert f"data.root={folder} cannot be read: " in refused(lambda: scan(folder, HoldOut()))


@pytest.mark.fault("J3")
@pytest.mark.parametrize("state", ["missing", "empty"])
@pytest.mark.parametrize("name", ["train/cat/1.png", "train/cat", "train/cat/more", "train"])
def test_links_to_nothing_are_an_outage(folder: Path, tmp_path: Path, name: str, state: str) -> None:
    before, store = scan(folder, HoldOut()), tmp_path / "store"
    store.mkdir()
    (folder / name).rename(store / "moved")
    (folder / name).symlink_to(store / "moved")
    index = scan(folder, HoldOut())
    assert index.digest == before.digest
    images = source_from_index(folder, index).train
    store.rename(tmp_path / "away")
    if state == "empty":
        store.mkdir()
    with pytest.raises(OutageError, match=f"the data is out of reach .*{name}: No such file"):
        scan(folder, HoldOut())
    with pytest.raises(OutageError, match="No such file"):
        images.read(2 if name.endswith("more") else 0)


@pytest.mark.usefixtures("jpegtran")
@pytest.mark.fault("J3")
def test_loaders_wait_for_a_missing_pack_and_return_the_same_batches(
    tmp_path: Path, partly_bad: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root, words = tmp_path / "pack", ("data.source=pack", "data.workers=2")
    make_pack(partly_bad, root, "lossless", 0.1)
    expected = stream(root, range(4), *words)
    data = train_batches(root, *words)
    root.rename(tmp_path / "away")
    restore = threading.Timer(1.5, lambda: (tmp_path / "away").rename(root))
    restore.start()
    loaded = list(batches(data, range(4), data.plan, pin=False))
    restore.join()
    found = [joined([batch]) for batch in loaded], {defect for batch in loaded for defect in batch.defects}
    assert found == expected
    assert all(batch.outage is None for batch in loaded)
    assert 1 <= capfd.readouterr().err.count("waiting for it, 150 s at most") <= 2, "each worker"


# --- bad images in a run


@pytest.fixture
def partly_bad(tmp_path: Path) -> Path:
    """Return 80 training images, eight corrupt, and eight validation images, one corrupt."""
    root = fill(tmp_path / "images", *(f"train/{kind}/{i:02}.png" for kind in "ab" for i in range(40)),
                *(f"val/{kind}/{i}.png" for kind in "ab" for i in range(4)))  # fmt: skip
    for i in range(0, 40, 10):
        (root / f"train/a/{i:02}.png").write_bytes(b"")
        (root / f"train/b/{i:02}.png").write_text("text")
    (root / "val/b/2.png").write_bytes(small_png()[:40])
    return root


@pytest.mark.fault("E1")
def test_bad_images_are_replaced_identically_at_any_number_of_ranks_and_workers(partly_bad: Path) -> None:
    expected, defects = stream(partly_bad, range(3), "data.workers=0")
    bad = {0, 10, 20, 30, 40, 50, 60, 70}
    seen = {sample for batch in expected for sample in batch.ids}
    assert bad & seen <= {sample for sample, _ in defects} <= bad
    assert {reason for _, reason in defects} == {"empty file", "not an image in a known format"}
    for world, workers, accumulate in ((1, 2, 1), (2, 0, 2), (4, 4, 1)):
        words = (f"data.workers={workers}", f"batch.accumulate={accumulate}")
        assert stream(partly_bad, range(3), *words, world=world) == (expected, defects)
    rows = {pair for batch in expected for pair in zip(batch.ids, batch.labels, strict=True)}
    others = {sample for sample, label in rows if label != sample // 40}
    assert others, "a replacement has its own label"
    assert others <= bad


def test_a_bad_validation_image_counts_as_wrong(partly_bad: Path) -> None:
    config = load("digits", [f"data.root={partly_bad}", "evaluate.batch=5"])
    data = EvalBatches(open_source(config).val, config)
    batches = [data[i] for i in range(len(data))]
    assert [len(batch.labels) for batch in batches] == [5, 3]
    assert [label for batch in batches for label in batch.labels.tolist()] == [0, 0, 0, 0, 1, 1, NO_LABEL, 1]
    assert [sample for batch in batches for sample, _ in batch.defects] == [6]


@pytest.mark.fault("E1")
def test_a_run_names_each_bad_image_once_and_fails_above_the_limit(tmp_path: Path, partly_bad: Path) -> None:
    words = ["digits", *SMALL, f"data.root={partly_bad}", "batch.global=16", "train.epochs=1",
             "train.max_steps=none", "data.workers=2"]  # fmt: skip
    run = quick("train", *words, f"run.dir={tmp_path / 'run'}", "data.max_bad=0.1", code=0)
    assert run.done["images"] == "8/8"
    bad = [f"train/{kind}/{i:02}.png" for kind in "ab" for i in range(0, 40, 10)]
    events = [row for row in read_rows(tmp_path / "run/journal.jsonl") if row.get("event") == "bad image"]
    assert sorted(row["file"] for row in events) == bad
    assert [run.err.count(f"bad image {name}: ") for name in bad] == [1] * 8

    above = quick("train", *words, f"run.dir={tmp_path / 'above'}", "data.max_bad=0.09", code=4)
    assert "8 of 80 training images cannot be decoded" in above.error


def region(data: bytes, *crop: int) -> bytes | None:
    """Return the pixels of a crop, or None for a bad image."""
    try:
        return Picture.open(data).region(*crop).numpy().tobytes()
    except UnreadableError:
        return None


def test_simplejpeg_and_pillow_decode_the_same_and_print_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    image = photo(97, 131)
    wide = simplejpeg.encode_jpeg(np.asarray(photo(128, 160)), colorsubsampling="411")
    whole = {
        "4:2:0": encoded(image, subsampling=2, comment=b"a comment"),
        "4:4:1": wide.replace(b"\x01\x41\x00", b"\x01\x14\x00", 1),  # luma's factors, in the frame's header
        "restarts": encoded(image, restart_marker_blocks=3),
        "progressive": encoded(image, progressive=True),
        "RGB": encoded(image, keep_rgb=True),
        "CMYK": encoded(image.convert("CMYK")),
        "grey": encoded(image.convert("L")),
    }
    made = whole | {"a marker is damaged": whole["4:2:0"].replace(b"\xff\xfe", b"\xff\xff", 1)}
    for kind, data in whole.items():
        made[f"{kind}, cut"] = data[: len(data) // 2]
        made[f"{kind}, without an end"] = data[:-2]
        made[f"{kind}, surplus"] = data[:-2] + b"surplus" + data[-2:]
        made[f"{kind}, more behind"] = data + b"\xff\xda behind"
    crops = ((0, 0, 97, 131), (0, 0, 9, 131), (30, 50, 41, 17))
    for kind, data in made.items():
        found = [region(data, *crop) for crop in crops]
        with monkeypatch.context() as patch:
            patch.setattr(images, "simplejpeg", None)
            assert found == [region(data, *crop) for crop in crops], kind
        if "an end" not in kind:  # Pillow may find all pixels in a file without an end
            assert (found[0] is None) == ("cut" in kind), kind
        assert len({pixels is None for pixels in found}) == 1, f"{kind}: it is bad whatever the crop"
    assert capfd.readouterr() == ("", "")
