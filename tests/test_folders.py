"""The table of docs/your-data.md is what the commands do with folders as people have them.

`python tests/test_folders.py docs/your-data.md` writes the table; without an argument it is shown.
"""

import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from harness import SMALL, Result, quick
from PIL import Image

NFC, NFD = "Caf\u00e9", "Cafe\u0301"
ENDS = {0: "yes", 2: "refused", 4: "defects"}
PAGE = Path(__file__).parent.parent / "docs/your-data.md"
BEGIN, END = "<!-- written by tests/test_folders.py -->", "<!-- end -->"
TRAIN = (
    *SMALL, "augment.size=32", "batch.global=4", "train.max_steps=1", "schedule.warmup=0", "data.workers=0",
)  # fmt: skip


def photo(path: Path, orientation: int = 0) -> None:
    """Write a small noisy image in the format of its name; its brightness shows its class."""
    path.parent.mkdir(parents=True, exist_ok=True)
    seed = zlib.crc32(os.fsencode(Path(*path.parts[-3:])))
    noise = np.random.default_rng(seed).integers(0, 120, (32, 40, 3), np.uint8)
    exif = Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    kind = {".jfif": "JPEG", ".heic": "JPEG"}.get(path.suffix)
    Image.fromarray(noise + np.uint8(ord(path.parent.name[0]) % 3 * 60)).save(path, kind, exif=exif)


def many(root: Path, count: int, *classes: str, suffix: str = ".jpg", orientation: int = 0) -> None:
    for name in classes:
        for i in range(count):
            photo(root / name / f"{i:03}{suffix}", orientation)


def splits(train: str, val: str) -> Callable[[Path], None]:
    return lambda root: many(root, 5, f"{train}/cat", f"{train}/dog", f"{val}/cat", f"{val}/dog")


def turned(root: Path) -> None:
    for suffix, orientation in ((".jpg", 6), (".png", 3), (".webp", 8), (".tif", 5)):
        many(root, 3, "cat", "dog", suffix=suffix, orientation=orientation)


def deep(values: Callable[[np.ndarray], np.ndarray], suffix: str) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        for name, level in (("cat", 0.2), ("dog", 0.8)):
            (root / name).mkdir(parents=True)
            for i in range(6):
                noise = np.random.default_rng(i).random((24, 24)) * 0.2 + level - 0.1
                Image.fromarray(values(noise)).save(root / name / f"{i}{suffix}")

    return make


def hidden(root: Path) -> None:
    many(root, 6, "cat", "dog")
    for name in ("cat/._000.jpg", "dog/.DS_Store", "Thumbs.db"):
        (root / name).write_bytes(b"Mac OS X")
    many(root, 2, ".ipynb_checkpoints", "__MACOSX/cat", "cat/@eaDir", "lost+found")


def extensions(root: Path) -> None:
    many(root, 4, "cat", "dog")
    many(root, 3, "cat/more", suffix=".jfif")
    photo(root / "dog/phone.heic")


def equal_names(root: Path) -> None:
    many(root, 4, f"train/{NFC}", "train/Bar")
    many(root, 2, f"val/{NFD}", "val/Bar")


def twins(root: Path) -> None:
    many(root, 6, "train/cat", "train/dog")
    many(root, 3, "val/dog")
    (root / "val/cat").mkdir()
    for i in range(3):
        shutil.copy(root / f"train/cat/{i:03}.jpg", root / f"val/cat/again-{i}.jpg")


def two_labels(root: Path) -> None:
    many(root, 6, "cat", "dog")
    shutil.copy(root / "cat/000.jpg", root / "dog/same.jpg")


def cycle(root: Path) -> None:
    many(root, 5, "cat", "dog")
    (root / "cat/again").symlink_to("..")


def unequal(**counts: int) -> Callable[[Path], None]:
    return lambda root: [many(root, count, name) for name, count in counts.items()]


FOLDERS: dict[str, Callable[[Path], None]] = {
    "`Train/` and `Validation/`": splits("Train", "Validation"),
    "`train/` and `valid/`": splits("train", "valid"),
    "`images/` and `labels/`": lambda root: many(root, 5, "images", "labels"),
    "turned by EXIF: JPEG, PNG, WebP, TIFF": turned,
    "12-bit values in 16-bit PNG": deep(lambda noise: (noise * 4095).astype(np.uint16), ".png"),
    "float TIFF without a range": deep(lambda noise: noise.astype(np.float32), ".tif"),
    "`._0.jpg`, `__MACOSX/`, `.ipynb_checkpoints/`": hidden,
    "some `.jfif`, one `.heic`": extensions,
    "`Café`, written in two ways in train/ and val/": equal_names,
    "`Café`, written in two ways, as two classes": lambda root: many(root, 4, NFC, NFD),
    "files of train/ again in val/": twins,
    "one file in two classes": two_labels,
    "a link to a folder above": cycle,
    "a class of two images": unequal(cat=6, dog=6, eel=2),
    "200 classes of one image": lambda root: many(root, 1, *(f"c{i:03}" for i in range(200))),
}


def rows(folders: dict[str, Callable[[Path], None]], place: Path) -> list[list[str]]:
    """Return a row for each folder: what it is, and what the five commands do with it."""
    many(place / "clean", 6, "cat", "dog", "eel")
    data = ["data.source=folder", "data.root=clean", "run.dir=model"]
    result = quick("train", "digits", *TRAIN, *data, cwd=place)
    assert result.code == 0, result.err
    made = []
    data = ["data.source=folder", "data.root=photos", "data.val_split=0.3", "run.dir=run"]
    share = ("--val-split", "0.3")
    for number, (name, make) in enumerate(folders.items()):
        here = place / str(number)
        make(here / "photos")
        check = quick("data", "check", "photos", *share, cwd=here)
        done = {
            "plan": quick("plan", "digits", "--world", "1", *TRAIN, *data, cwd=here),
            "train": quick("train", "digits", *TRAIN, *data, cwd=here),
            "predict": quick("predict", "../model", "photos", cwd=here),
            "pack": quick("data", "pack", "photos", "pack", *share, cwd=here),
        }
        assert all("Traceback" not in result.err for result in (check, *done.values()))
        ends = {name: ENDS.get(result.code, f"exit {result.code}") for name, result in done.items()}
        if done["predict"].code == 0:
            ends["predict"] = f"{len(done['predict'].out.splitlines())} images"
        used = [ends[name] for name in ("plan", "train", "pack")]
        made.append([name, said(check), used[0] if len({*used}) == 1 else ", ".join(used), ends["predict"]])
    return made


def said(check: Result) -> str:
    """Return the last line of `data check`, which sums it up."""
    line = re.sub(r", digest \w+$", "", check.error if check.code else check.out.splitlines()[-1])
    return re.sub("^(data.root=)?(photos )?(is )?", "", line)


def table(made: list[list[str]]) -> str:
    head = ["the folder", "`data check` says", "plan, train, pack", "predict"]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *made))


def test_folders_are_read_as_the_page_says(tmp_path: Path, full: bool) -> None:
    some = FOLDERS if full else ("Train/", "turned", "MACOSX", "as two classes", "of two images")
    folders = {name: make for name, make in FOLDERS.items() if any(part in name for part in some)}
    assert len(folders) == len(some)
    for line in table(rows(folders, tmp_path)).splitlines():
        assert line in PAGE.read_text()


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        text = table(rows(FOLDERS, Path(place)))
    if len(sys.argv) < 2:
        print(text)
        return
    page = Path(sys.argv[1])
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
