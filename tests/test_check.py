"""`data check` says what looks wrong with images that can be read: equal, dark and turned ones."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import quick
from PIL import Image

from pipeline.addons.datasets.check import Findings
from pipeline.addons.datasets.index import Index, Split
from pipeline.addons.datasets.write_pack import pack


def write(root: Path, name: str, image: Image.Image, orientation: int = 1) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    image.save(root / name, **({"exif": exif} if orientation > 1 else {}))


def copy(root: Path, source: str, *targets: str) -> None:
    for target in targets:
        (root / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / source, root / target)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """Return a folder of three classes, each with 3 images to train and 1 held out."""
    rng = np.random.default_rng(1)
    for label, name in itertools.product(
        ("ant", "bee", "cat"), ("train/{}/1", "train/{}/2", "train/{}/3", "val/{}/1")
    ):
        image = Image.fromarray(rng.integers(0, 256, (8, 9, 3), np.uint8))
        write(tmp_path / "photos", name.format(label) + ".png", image)
    return tmp_path / "photos"


def make_odd(root: Path) -> dict[str, Any]:
    """Add odd images to `good`, of which a pack keeps the bytes. Return what a check must find."""
    copy(root, "train/ant/1.png", "val/ant/leak.png")  # in both splits
    copy(root, "train/ant/2.png", "train/bee/ant.png")  # of two classes
    copy(root, "train/bee/1.png", "val/cat/bee.png")  # both
    copy(root, "train/cat/1.png", "train/cat/deep/again.png")  # twice in a class
    for shade in (0, 7, 8):
        write(root, f"train/bee/shade{shade}.png", Image.new("L", (9, 8), shade))
    for number, kind in enumerate(("png", "webp", "tiff")):
        write(root, f"train/cat/turned.{kind}", Image.effect_noise((9, 8), 60), 6 + number % 3)
    return {
        "images": 22, "classes": {"ant": 5, "bee": 8, "cat": 9}, "ignored": {}, "defects": [], "turned": 3,
        "twins": [["train/ant/1.png", "val/ant/leak.png"], ["train/bee/1.png", "val/cat/bee.png"],
                  ["train/cat/1.png", "train/cat/deep/again.png"]],
        "two_labels": [["train/ant/2.png", "train/bee/ant.png"], ["train/bee/1.png", "val/cat/bee.png"]],
        "dark": ["train/bee/shade0.png", "train/bee/shade7.png"],
    }  # fmt: skip


def found(root: Path, code: int = 0) -> dict[str, Any]:
    result = quick("data", "check", str(root), "--json")
    assert result.code == code, result.err
    return dict(json.loads(result.out))


@pytest.mark.usefixtures("jpegtran")
def test_equal_dark_and_turned_images_are_named_in_a_folder_and_in_a_pack(good: Path) -> None:
    assert "warning:" not in quick("data", "check", str(good)).out
    expected = make_odd(good)
    write(good, "train/bee/.hidden.png", Image.new("L", (9, 8)))
    (good / "train/ant/note.TXT").touch()
    assert found(good) == expected | {"ignored": {"hidden or system": 1, "extension .txt": 1}}
    page = quick("data", "check", str(good)).out.splitlines()
    assert [line for line in page if line.startswith("warning: 2 images in training and in validation")]
    assert {"  train/bee/1.png = val/cat/bee.png", "  train/bee/shade7.png"} <= set(page)
    assert page[-1].startswith(f"{good} can be used, but has 2 images in training and in validation, ")
    pack(good, good.parent / "pack", "lossless", 0.1)
    assert found(good.parent / "pack") == expected
    pack(good, good.parent / "raw", "raw=64", 0.1)
    assert found(good.parent / "raw") == expected | {"turned": 0}


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
    page = quick("data", "check", str(good))
    assert (page.code, "3 defects" in page.error) == (4, True)
    assert "val/bee/bad.png: not an image in a known format" in page.err.splitlines()
    assert page.out.splitlines()[-1] == f"{good} is not good: 3 defects"


def test_a_pack_of_0_2_is_checked_as_it_is_read() -> None:
    report = found(Path(__file__).with_name("pack-0.2"))
    assert (report["defects"], report["turned"]) == ([], 0)


def entries(split: str, labels: list[int]) -> Split:
    return Split.from_entries([(f"{split}/{i:09}".encode(), 1, label) for i, label in enumerate(labels)])


@pytest.mark.parametrize("number", range(8))
def test_pairs_are_exact(number: int) -> None:
    rng = np.random.default_rng(number)
    bounds = ((1, 60), (0, 60), (2, 5), (1, 60))
    count, held_out, classes, contents = (int(rng.integers(*pair)) for pair in bounds)
    labels = rng.integers(0, classes, count + held_out).tolist()
    index = Index(entries("train", labels[:count]), entries("val", labels[count:]), tuple("abcde"[:classes]))
    findings = Findings(index)
    findings.digests[:] = rng.integers(1, 256, (contents, 32))[rng.integers(0, contents, count + held_out)]
    twins, two_labels = findings.equal_images()
    every = [
        (i, j) for i, j in itertools.combinations(range(count + held_out), 2)
        if (findings.digests[i] == findings.digests[j]).all()
    ]  # fmt: skip
    all_twins = {pair for pair in every if pair[0] < count <= pair[1] or labels[pair[0]] == labels[pair[1]]}
    all_two_labels = {pair for pair in every if labels[pair[0]] != labels[pair[1]]}
    for pairs, expected in ((twins, all_twins), (two_labels, all_two_labels)):
        assert set(pairs) <= expected
        assert len(set(pairs)) == len(pairs) <= count + held_out
        assert {second for _, second in pairs} == {second for _, second in expected}, "each image is named"
    leaks = {second for first, second in every if first < count <= second}
    assert {second for first, second in twins if first < count <= second} == leaks
