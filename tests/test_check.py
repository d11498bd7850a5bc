"""`data check` says what looks wrong with images that can be read: equal, dark and turned ones."""

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import quick
from PIL import Image

from pipeline.addons.datasets.write_pack import pack


def write(root: Path, name: str, image: Image.Image, orientation: int = 1) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    image.save(root / name, **({"exif": exif} if orientation > 1 else {}))


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """Return a folder of three classes, each with 3 images to train and 1 held out."""
    rng = np.random.default_rng(1)
    for label, name in product(("ant", "bee", "cat"), ("train/{}/1", "train/{}/2", "train/{}/3", "val/{}/1")):
        image = Image.fromarray(rng.integers(0, 256, (8, 9, 3), np.uint8))
        write(tmp_path / "photos", name.format(label) + ".png", image)
    return tmp_path / "photos"


def found(root: Path, code: int = 0) -> dict[str, Any]:
    return dict(json.loads(quick("data", "check", str(root), "--json", code=code).out))


@pytest.mark.usefixtures("jpegtran")
def test_equal_dark_and_turned_images_are_named_in_a_folder_and_in_a_pack(good: Path) -> None:
    assert "warning:" not in quick("data", "check", str(good)).out
    copies = {
        "train/ant/1.png": ["val/ant/leak.png"], "train/bee/1.png": ["val/cat/bee.png"],
        "train/cat/1.png": ["train/cat/again.png"],
        "train/ant/2.png": ["train/bee/ant.png", "train/bee/more.png", "val/bee/ant.png", "val/cat/ant.png"],
    }  # fmt: skip
    for source, targets in copies.items():
        for target in targets:
            shutil.copy(good / source, good / target)
    for shade in (0, 7, 8):
        write(good, f"train/bee/shade{shade}.png", Image.new("L", (9, 8), shade))
    for number, kind in enumerate(("png", "webp", "tiff")):
        write(good, f"train/cat/turned.{kind}", Image.effect_noise((9, 8), 60), 6 + number % 3)
    expected = {
        "images": 25, "classes": {"ant": 5, "bee": 10, "cat": 10}, "ignored": {}, "defects": [], "turned": 3,
        "twins": [["train/ant/1.png", "val/ant/leak.png"], ["train/ant/2.png", "val/bee/ant.png"],
                  ["train/ant/2.png", "val/cat/ant.png"], ["train/bee/1.png", "val/cat/bee.png"],
                  ["train/bee/ant.png", "train/bee/more.png"], ["train/cat/1.png", "train/cat/again.png"]],
        "two_labels": [*(["train/ant/2.png", target] for target in copies["train/ant/2.png"]),
                       ["train/bee/1.png", "val/cat/bee.png"]],
        "dark": ["train/bee/shade0.png", "train/bee/shade7.png"],
    }  # fmt: skip
    write(good, "train/bee/.hidden.png", Image.new("L", (9, 8)))
    (good / "train/ant/note.TXT").touch()
    assert found(good) == expected | {"ignored": {"hidden or system": 1, "extension .txt": 1}}
    page = quick("data", "check", str(good)).out.splitlines()
    assert [line for line in page if line.startswith("warning: 4 images in training and in validation")]
    assert {"  train/bee/1.png = val/cat/bee.png", "  train/bee/shade7.png"} <= set(page)
    assert page[-1].startswith(f"{good} can be used, but has 4 images in training and in validation, ")
    for level, turned in (("lossless", 3), ("raw=64", 0)):
        pack(good, good.parent / level, level, 0.1)
        assert found(good.parent / level) == expected | {"turned": turned}


@pytest.mark.usefixtures("jpegtran")
def test_a_class_that_is_never_held_out_is_a_warning(good: Path) -> None:
    write(good / "train", "dog/1.png", Image.effect_noise((9, 8), 60))  # which stays in training
    page = quick("data", "check", str(good / "train"), "--val-split=0.4").out.splitlines()
    assert page[-3:-1] == ["warning: 1 class without a validation image", "  dog"]
    pack(good / "train", good.parent / "pack", "lossless", 0)
    page = quick("data", "check", str(good.parent / "pack")).out.splitlines()
    assert page[-2] == "warning: no validation images"


def test_defects_end_the_check_with_4_and_are_no_twins(good: Path) -> None:
    names = ("train/ant/bad.png", "val/ant/bad.png", "val/bee/bad.png")
    for name in names:
        (good / name).write_bytes(b"no image")
    report = found(good, code=4)
    assert report["defects"] == [{"file": name, "reason": "not an image in a known format"} for name in names]
    assert (report["images"], report["twins"], report["two_labels"]) == (15, [], [])
    page = quick("data", "check", str(good), code=4)
    assert "3 defects" in page.error
    assert "val/bee/bad.png: not an image in a known format" in page.err.splitlines()


def test_a_pack_of_0_2_is_checked_as_it_is_read() -> None:
    report = found(Path(__file__).with_name("pack-0.2"))
    assert (report["defects"], report["turned"]) == ([], 0)
