"""The table of docs/your-data.md is what the commands do with folders as people have them.

`python tests/test_folders.py` writes it.
"""

import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from harness import SMALL, quick
from PIL import Image

NFC, NFD = "Caf\u00e9", "Cafe\u0301"
ENDS = {0: "yes", 2: "refused", 4: "defects"}
PAGE = Path(__file__).parent.parent / "docs/your-data.md"
BEGIN, END = "<!-- written by tests/test_folders.py -->", "<!-- end -->"
TRAIN = (
    *SMALL, "augment.size=32", "batch.global=4", "train.max_steps=1", "schedule.warmup=0", "data.workers=0",
)  # fmt: skip


def photo(path: Path, orientation: int = 1) -> None:
    """Write a small noisy image in the format of its name; its brightness shows its class."""
    path.parent.mkdir(parents=True, exist_ok=True)
    seed = zlib.crc32(os.fsencode(Path(*path.parts[-3:])))
    noise = np.random.default_rng(seed).integers(0, 120, (32, 40, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    kind = {".jfif": "JPEG", ".heic": "JPEG"}.get(path.suffix)
    Image.fromarray(noise + np.uint8(ord(path.parent.name[0]) % 3 * 60)).save(path, kind, exif=exif)


def turned(root: Path) -> None:
    for suffix, orientation in ((".jpg", 6), (".png", 3), (".webp", 8), (".tif", 5)):
        for i in range(3):
            photo(root / f"cat/{i}{suffix}", orientation)
            photo(root / f"dog/{i}{suffix}", orientation)


def dark(root: Path) -> None:
    for name, level in (("cat", 0.2), ("dog", 0.8)):
        (root / name).mkdir(parents=True)
        for i in range(6):
            noise = np.random.default_rng(i).random((24, 24)) * 0.2 + level - 0.1
            Image.fromarray((noise * 4095).astype(np.uint16)).save(root / name / f"{i}.png")


def hidden(root: Path) -> None:
    for name in ("cat/._000.jpg", "dog/.DS_Store", "Thumbs.db"):
        (root / name).write_bytes(b"Mac OS X")


def extensions(root: Path) -> None:
    for name in ("cat/more/1.jfif", "cat/more/2.jfif", "cat/more/3.jfif", "dog/phone.heic"):
        photo(root / name)


def twins(root: Path) -> None:
    shutil.copytree(root / "train/cat", root / "val/cat")
    for i in range(3, 6):
        (root / f"val/cat/{i:03}.jpg").unlink()


# The number of images in each folder, and what else is done.
FOLDERS: dict[str, tuple[dict[str, int], Callable[[Path], object] | None]] = {
    "`Train/` and `Validation/`": (
        {"Train/cat": 5, "Train/dog": 5, "Validation/cat": 5, "Validation/dog": 5}, None),
    "`images/` and `labels/`": ({"images": 5, "labels": 5}, None),
    "turned by EXIF: JPEG, PNG, WebP, TIFF": ({}, turned),
    "12-bit values in 16-bit PNG": ({}, dark),
    "`._0.jpg`, `__MACOSX/`, `.ipynb_checkpoints/`": (
        {"cat": 6, "dog": 6, ".ipynb_checkpoints": 2, "__MACOSX/cat": 2, "cat/@eaDir": 2, "lost+found": 2},
        hidden),
    "some `.jfif`, one `.heic`": ({"cat": 4, "dog": 4}, extensions),
    "`Café`, written in two ways in train/ and val/": (
        {f"train/{NFC}": 4, "train/Bar": 4, f"val/{NFD}": 2, "val/Bar": 2}, None),
    "`Café`, written in two ways, as two classes": ({NFC: 4, NFD: 4}, None),
    "files of train/ again in val/": ({"train/cat": 6, "train/dog": 6, "val/dog": 3}, twins),
    "one file in two classes": (
        {"cat": 6, "dog": 6}, lambda root: shutil.copy(root / "cat/000.jpg", root / "dog/same.jpg")),
    "a link to a folder above": (
        {"cat": 5, "dog": 5}, lambda root: (root / "cat/again").symlink_to("..")),
    "a class of two images": ({"cat": 6, "dog": 6, "eel": 2}, None),
    "200 classes of one image": ({f"c{i:03}": 1 for i in range(200)}, None),
}  # fmt: skip


def fill(root: Path, counts: dict[str, int]) -> None:
    for name, count in counts.items():
        for i in range(count):
            photo(root / name / f"{i:03}.jpg")


def table(names: list[str], place: Path) -> list[str]:
    """Return a line for each folder: what it is, and what the five commands do with it."""
    fill(place / "clean", {"cat": 6, "dog": 6, "eel": 6})
    data = ("data.source=folder", "data.root=clean", "run.dir=model")
    assert quick("train", "digits", *TRAIN, *data, cwd=place).code == 0
    lines = ["| the folder | `data check` says | plan, train, pack | predict |", "| --- | --- | --- | --- |"]
    words = [*TRAIN, "data.source=folder", "data.root=photos", "data.val_split=0.3", "run.dir=run"]
    share = ("--val-split", "0.3")
    for number, name in enumerate(names):
        counts, change = FOLDERS[name]
        fill(place / f"{number}/photos", counts)
        if change:
            change(place / f"{number}/photos")
        check, *used, predict = (
            quick(*command, cwd=place / str(number))
            for command in (
                ["data", "check", "photos", *share],
                ["plan", "digits", "--world", "1", *words],
                ["train", "digits", *words],
                ["data", "pack", "photos", "pack", *share],
                ["predict", "../model", "photos"],
            )
        )
        said = re.sub(r", digest \w+$", "", check.error if check.code else check.out.splitlines()[-1])
        said = re.sub("^(data.root=)?(photos )?(is )?", "", said)
        ends = [ENDS.get(result.code, f"exit {result.code}") for result in used]
        images = ENDS[predict.code] if predict.code else f"{len(predict.out.splitlines())} images"
        lines.append(f"| {name} | {said} | {', '.join(ends if len({*ends}) > 1 else ends[:1])} | {images} |")
        assert all("Traceback" not in result.err for result in (check, *used, predict))
    return lines


def test_folders_are_read_as_the_page_says(tmp_path: Path, full: bool) -> None:
    some = FOLDERS if full else ("Train/", "turned", "MACOSX", "as two classes", "of two images")
    names = [name for name in FOLDERS if any(part in name for part in some)]
    assert len(names) == len(some)
    for line in table(names, tmp_path):
        assert line in PAGE.read_text()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        made = "\n".join(table([*FOLDERS], Path(place)))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.partition(END)[2]}")
