"""Folders as people have them: what is no image, or no class, is left out, counted or refused."""

import io
import os
import shutil
import unicodedata
from pathlib import Path

import pytest
from harness import quick
from PIL import Image
from test_data import digests, fill, names, refused

from pipeline.addons.datasets import checksums, images
from pipeline.addons.datasets.folders import changes
from pipeline.addons.datasets.holdout import HoldOut
from pipeline.addons.datasets.images import decode
from pipeline.addons.datasets.manifest import open_index, scan, scan_validation
from pipeline.addons.datasets.names import EXTENSIONS, normal_path

IMAGES = [f"{side}/{kind}/{i}.png" for side in ("train", "val") for kind in ("cat", "dog") for i in range(4)]
HIDDEN_FOLDERS = (".ipynb_checkpoints", "__MACOSX", "lost+found", "@eaDir", "$RECYCLE.BIN",
                  "System Volume Information", "#recycle", ".Trash-1000")  # fmt: skip


@pytest.mark.parametrize("classes", [("val/cat/more", "val/dog"), ("cat", "dog")])
def test_hidden_and_system_files_are_left_out_at_any_depth(tmp_path: Path, classes: tuple[str, ...]) -> None:
    images = IMAGES if "val/dog" in classes else [name.removeprefix("train/") for name in IMAGES[:8]]
    root = fill(tmp_path / "photos", *images, f"{classes[0]}/9.png")
    clean = open_index(root, HoldOut(0.5), tmp_path, check_sizes=False)
    assert (clean.ignored, scan(root, HoldOut(0.5)).ignored) == ({}, {}), "its own cache is no hidden file"
    files = ("._1.png", ".DS_Store", "Thumbs.db", "desktop.ini")
    hidden = [*files, *(f"{name}/1.png" for name in HIDDEN_FOLDERS)]
    folders = (os.path.dirname(classes[1]) or ".", *classes)
    fill(root, *(f"{folder}/{name}" for folder in folders for name in hidden))
    index = scan(root, HoldOut(0.5))
    assert (index.digest, index.ignored) == (clean.digest, {"hidden or system": len(folders) * len(hidden)})
    assert names(scan_validation(root, ("cat", "dog"), HoldOut(0.5))[0]) == names(clean.val)


def test_images_are_the_files_that_the_decoder_reads(tmp_path: Path) -> None:
    Image.init()
    formats = {name: kind for name, kind in Image.registered_extensions().items() if kind in images._FORMATS}
    allowed = [extension.decode() for extension in EXTENSIONS]
    assert formats.keys() - allowed == {".pfm"}, "floating point"
    for extension in allowed:
        buffer, mode = io.BytesIO(), {".pgm": "L", ".pbm": "1"}.get(extension, "RGB")
        kind = formats.get(extension, "MPO" if extension == ".mpo" else "JPEG")
        Image.effect_noise((8, 8), 50).convert(mode).save(buffer, kind)
        assert decode(buffer.getvalue()).shape == (3, 8, 8)
    files = (f"cat/1{name}" for extension in allowed for name in (extension, extension.upper()))
    index = scan(fill(tmp_path / "photos", *files, "dog/1.png"), HoldOut(0))
    assert (len(index.train), index.ignored) == (2 * len(allowed) + 1, {})


def test_what_is_left_out_is_counted_by_extension(tmp_path: Path) -> None:
    root = fill(tmp_path / "photos", *IMAGES)
    for name in ("cat/1.HEIC", "dog/1.heic", "cat/1.avif", "dog/notes", "dog/1.jpg ", "1.jpg"):
        (root / "train" / name).touch()
    assert scan(root, HoldOut()).ignored == {
        "extension .heic": 2, "extension .avif": 1, "without an extension": 2,
        "outside of the class folders": 1,
    }  # fmt: skip
    for path in (root / "val/dog").glob("*.png"):
        path.rename(path.with_suffix(".heic"))
    line = refused(lambda: scan(root, HoldOut()))
    assert "val/dog/" in line
    assert "4 .heic" in line


SPLITS = {
    "Train Validation": "rename Train/ to train/ and Validation/ to val/",
    "train2017 val2017 test2017": "rename train2017/ to train/ and val2017/ to val/",
    "dev eval __MACOSX": "the folders dev, eval: give a folder with train/ and val/",
    "train Validation test": "no val/: rename Validation/ to val/",
    "train": "no val/: add val/",
    "training val": "no train/: rename training/ to train/",
    "train/images train/labels val/images val/labels": "the folders images, labels: ",
}


@pytest.mark.parametrize("folders", SPLITS)
def test_splits_are_not_classes(tmp_path: Path, folders: str) -> None:
    classes = ("cat/1.png", "dog/1.png", "dog/2.png")
    root = fill(tmp_path / "photos", *(f"{folder}/{name}" for folder in folders.split() for name in classes))
    line = refused(lambda: scan(root, HoldOut(0.5)))
    assert line.startswith(f"data.root={root} ")
    assert SPLITS[folders] in line


def test_a_class_may_have_the_name_of_a_split_and_links_are_followed(tmp_path: Path) -> None:
    names = (f"{kind}/{i}.png" for kind in ("test", "Training", "bus") for i in range(9))
    root = fill(tmp_path / "photos", *names)
    assert scan(root, HoldOut(0.5)).classes == ("Training", "bus", "test")
    fill(tmp_path / "more", "9.png")
    (root / "bus/more").symlink_to("../../more")
    (root / "bus/again").symlink_to(tmp_path / "more")
    assert scan(root, HoldOut(0)).size.train_images == 29


# --- names that look alike

LATTE, LATTE_NFD = "Café", "Cafe\u0301"


def photos(root: Path, *parents: str) -> Path:
    names = [f"{kind}/é{i} b.png" for kind in (LATTE, "dog", "Ünlü ", "e", "猫") for i in range(6)]
    return fill(root, *(parent + name for name in names for parent in parents))


def respell(root: Path, form: str) -> Path:
    """Rename all files and folders to NFC or NFD, as a copy to another system may."""
    for folder, _, files in os.walk(root, topdown=False):
        for path in (Path(folder, name) for name in (*files, ".")):
            if path != root:
                path.rename(path.with_name(unicodedata.normalize(form, path.name)))
    return root


@pytest.mark.parametrize("parents", [("train/", "val/"), ("",)])
def test_folders_of_two_systems_have_one_index(tmp_path: Path, parents: tuple[str, ...]) -> None:
    linux, mac = (respell(photos(tmp_path / form, *parents), form) for form in ("NFC", "NFD"))
    ours, theirs = scan(linux, HoldOut(0.3)), scan(mac, HoldOut(0.3))
    assert ours.classes == theirs.classes == (LATTE, "dog", "e", "Ünlü", "猫")
    assert (ours.digest, ours.names_digest()) == (theirs.digest, theirs.names_digest())
    assert names(ours.val) == [normal_path(name) for name in names(theirs.val)]
    assert names(ours.val) != names(theirs.val), "as the file system spells them"
    assert list(changes(ours, theirs)) == []
    for root, index, other in ((linux, ours, mac), (mac, theirs, linux)):
        checksums.write_sums(root, index, digests(root, index))
        shutil.copy(root / checksums.SUMS, other)
        assert scan(root, HoldOut(0.3)).digest == scan(other, HoldOut(0.3)).digest
        assert quick("data", "check", str(other), "--val-split=0.3").code == 0


@pytest.mark.usefixtures("jpegtran")
def test_a_run_takes_the_folder_and_the_pack_of_another_system(tmp_path: Path) -> None:
    root = fill(photos(tmp_path / "photos", ""), "eel/1.png", "eel/2.png")
    words = (
        "train", "digits", "data.source=folder", f"data.root={root}", f"run.dir={tmp_path / 'run'}",
        "batch.global=4", "data.workers=0", "run.device=cpu", "model.arch=shufflenet_v2_x0_5",
        "track.uri=none", "checkpoint.every=1 steps",
    )  # fmt: skip
    alone = "no validation image of class eel"
    assert alone in quick("data", "check", str(root)).out
    assert alone in quick(*words, "train.max_steps=1", timeout=200, code=0).err
    respell(root, "NFD")
    assert "resuming from" in quick(*words, "train.max_steps=2", timeout=200, code=0).err
    assert quick("data", "pack", str(root), str(tmp_path / "pack")).code == 0
    place = ("data.source=pack", f"data.root={tmp_path / 'pack'}")
    evaluated = quick("evaluate", str(tmp_path / "run"), *place, timeout=200)
    assert (evaluated.code, evaluated.done["images"]) == (0, "5/5"), evaluated.err
    assert "over 5 of 6 classes" in evaluated.err


def test_train_and_val_may_spell_a_class_differently_and_other_classes_are_told_apart(tmp_path: Path) -> None:
    latte = (f"train/{LATTE}/1.png", f"val/{LATTE_NFD}/2.png")
    root = fill(tmp_path / "photos", *latte, "train/cat /1.png", "val/cat/3.png")
    index = scan(root, HoldOut())
    assert index.classes == (LATTE, "cat")
    assert index.val.labels.tolist() == [0, 1]
    assert names(scan_validation(root, (LATTE_NFD, "cat"), None)[0]) == names(index.val)
    fill(root, "train/p\u0430ss/1.png", "val/pass/1.png")  # the first with a Cyrillic letter
    assert "p\\u0430ss') in train/ only, pass in val/ only" in refused(lambda: scan(root, HoldOut()))
