"""Folders as people have them: what is no image, or no class, is left out, counted or refused."""

import io
import json
import subprocess
from pathlib import Path

import pytest
from harness import quick
from PIL import Image
from test_data import fill, names, refused
from test_predict import save_run

from pipeline.data import images, manifest
from pipeline.data.access import EXTENSIONS
from pipeline.data.holdout import HoldOut
from pipeline.data.images import decode
from pipeline.data.index import Index
from pipeline.data.manifest import open_index, scan, scan_validation

IMAGES = [f"{split}/{kind}/{i}.png" for split in ("train", "val") for kind in ("cat", "dog") for i in range(4)]
HIDDEN_FILES = ("._1.png", ".DS_Store", "Thumbs.db", "desktop.ini")
HIDDEN_FOLDERS = (
    ".ipynb_checkpoints", "__MACOSX", "lost+found", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "#recycle",
    ".Trash-1000",
)  # fmt: skip
PLAN = ("digits", "data.source=folder", "batch.global=4", "run.device=cpu")


def add_hidden(root: Path, *folders: str) -> int:
    """Add hidden files, and folders with an image, to each of the folders; return how many."""
    for folder in folders:
        fill(root, *(f"{folder}/{name}" for name in HIDDEN_FILES))
        fill(root, *(f"{folder}/{name}/1.png" for name in HIDDEN_FOLDERS))
    return len(folders) * len(HIDDEN_FILES + HIDDEN_FOLDERS)


@pytest.mark.parametrize("layout", ["train and val", "class folders"])
def test_hidden_and_system_files_are_left_out_at_any_depth(tmp_path: Path, layout: str) -> None:
    classes = ("val/cat/more", "val/dog") if layout == "train and val" else ("cat", "dog")
    root = fill(tmp_path / "photos", *(IMAGES if len(classes[0]) > 3 else (name[6:] for name in IMAGES[:8])))
    fill(root, f"{classes[0]}/9.png")
    clean = open_index(root, HoldOut(0.5), tmp_path, check_sizes=False)
    assert (clean.ignored, scan(root, HoldOut(0.5)).ignored) == ({}, {}), "its own cache is no hidden file"
    count = add_hidden(root, "val" if layout == "train and val" else ".", *classes)
    index = scan(root, HoldOut(0.5))
    assert (index.digest, index.ignored) == (clean.digest, {"hidden or system": count})
    validation = scan_validation(root, ("cat", "dog"), HoldOut(0.5))
    assert names(validation) == names(clean.val)
    where = f"data.root={root}"
    for words in (["data", "check", str(root), "--val-split", "0.5"], ["plan", *PLAN, where, "data.val_split=0.5"]):
        result = quick(*words)
        assert (result.code, f"left out: {count} hidden or system" in result.out) == (0, True), result.err
    result = quick("data", "pack", str(root), str(tmp_path / "pack"), "--val-split", "0.5")
    assert (result.code, f"left out: {count} hidden or system" in result.err) == (0, True), result.err


def test_doctor_prints_what_is_left_out(tmp_path: Path) -> None:
    root = fill(tmp_path / "photos", *IMAGES, "train/cat/._0.png", "train/dog/0.heic", "val/dog/0.HEIC", "val/dog/txt")
    result = quick("doctor", *PLAN, f"data.root={root}", f"run.dir={tmp_path / 'run'}", "--json")
    (line,) = [row["line"] for row in json.loads(result.out)["findings"] if row["check"] == "data"]
    assert "left out: 2 .heic, 1 hidden or system, 1 without an extension" in line


def test_sums_neither_have_nor_miss_hidden_files(tmp_path: Path) -> None:
    root = fill(tmp_path / "photos", *IMAGES)
    add_hidden(root, "train/cat")
    files = "find -type f -not -name SHA256SUMS -print0 | xargs -0 sha256sum > SHA256SUMS"
    subprocess.run(files, shell=True, cwd=root, check=True)
    result = quick("data", "check", str(root))
    assert result.code == 0, result.err
    assert quick("data", "check", str(root), "--write-sums").code == 0
    assert len((root / "SHA256SUMS").read_text().splitlines()) == len(IMAGES)


def test_predict_leaves_out_what_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run = save_run(tmp_path / "run")
    new = fill(tmp_path / "new", "1.png", "a/b/2.png")
    count = add_hidden(new, ".", "a/b")
    (new / "a/1.heic").touch()
    result = quick("predict", str(run), str(new), "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert [row["image"] for row in found["predictions"]] == [f"{new}/1.png", f"{new}/a/b/2.png"]
    assert found["bad"] == []
    assert f"left out: {count} hidden or system, 1 .heic" in result.err
    result = quick("predict", str(run), str(new / "__MACOSX"), str(fill(tmp_path / "hidden", "._1.png")))
    assert result.code == 0, "a folder that the user names is read"


def test_an_index_of_version_0_2_is_not_used_again(tmp_path: Path) -> None:
    root = fill(tmp_path / "photos", *IMAGES, "train/cat/.hidden.png")
    index = open_index(root, HoldOut(), tmp_path, check_sizes=False)
    (path,) = (root / manifest.CACHE).iterdir()
    old = path.with_name(f"{index.digest[:16]}.index")
    path.rename(old)
    assert manifest.find_cached_index(root, tmp_path, index.digest), "to say what changed"
    assert open_index(root, HoldOut(), tmp_path, check_sizes=False).ignored == {"hidden or system": 1}
    assert path.exists()
    assert next(manifest._cached(root, tmp_path, manifest._CACHED)).ignored == {"hidden or system": 1}
    without = index.to_bytes().replace(b'"ignored"', b'"unknown"')
    assert Index.from_bytes(without).ignored == {}


def test_images_are_the_files_that_the_decoder_reads(tmp_path: Path) -> None:
    Image.init()
    formats = {name: kind for name, kind in Image.registered_extensions().items() if kind in images._FORMATS}
    allowed = {extension.decode() for extension in EXTENSIONS}
    assert set(formats) - allowed == {".pfm"}, "floating point"
    for extension in allowed:
        kind = formats.get(extension, {".mpo": "MPO"}.get(extension, "JPEG"))
        buffer = io.BytesIO()
        mode = {".pgm": "L", ".pbm": "1"}.get(extension, "RGB")
        Image.effect_noise((8, 8), 50).convert(mode).save(buffer, kind)
        assert decode(buffer.getvalue()).shape == (3, 8, 8)
        for split in ("train", "val"):
            for name in (f"cat/1{extension}", f"cat/2{extension.upper()}", f"dog/1{extension}"):
                path = tmp_path / "photos" / split / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(buffer.getvalue())
    index = scan(tmp_path / "photos", HoldOut())
    assert (len(index.train), index.ignored) == (3 * len(allowed), {})


def test_what_is_left_out_is_counted_by_extension(tmp_path: Path) -> None:
    root = fill(tmp_path / "photos", *IMAGES)
    for name in (
        "train/cat/1.HEIC",
        "train/dog/1.heic",
        "val/cat/1.avif",
        "val/dog/notes",
        "val/dog/1.jpg ",
        "train/1.jpg",
    ):
        (root / name).touch()
    assert scan(root, HoldOut()).ignored == {
        "extension .heic": 2, "extension .avif": 1, "without an extension": 2, "outside of the class folders": 1,
    }  # fmt: skip
    for path in (root / "val/dog").glob("*.png"):
        path.rename(path.with_suffix(".heic"))
    line = refused(lambda: scan(root, HoldOut()))
    assert "val/dog/" in line
    assert "4 .heic" in line


@pytest.mark.parametrize(
    ("folders", "says"),
    [("Train Validation", "rename Train/ to train/ and Validation/ to val/"),
     ("TRAIN VAL", "rename TRAIN/ to train/ and VAL/ to val/"),
     ("training validation testing", "rename training/ to train/ and validation/ to val/"),
     ("training_set test_set", "rename training_set/ to train/ and test_set/ to val/"),
     ("train2017 val2017 test2017", "rename train2017/ to train/ and val2017/ to val/"),
     ("images labels", "give a folder with train/ and val/"),
     ("Test", "give a folder with train/ and val/"),
     ("dev eval __MACOSX", "the folders dev, eval: give a folder with train/ and val/"),
     ("train valid", "no val/: rename valid/ to val/"),
     ("train Validation test", "no val/: rename Validation/ to val/"),
     ("train Val", "no val/: rename Val/ to val/"),
     ("train test", "no val/: add val/ with one folder per class, or rename test/ to val/"),
     ("Train val", "no train/: rename Train/ to train/"),
     ("training val", "no train/: rename training/ to train/"),
     ("train/images train/labels val/images val/labels", "the folders images, labels: ")],
)  # fmt: skip
def test_splits_are_not_classes(tmp_path: Path, folders: str, says: str) -> None:
    root = tmp_path / "photos"
    fill(root, *(f"{folder}/{name}" for folder in folders.split() for name in ("cat/1.png", "dog/1.png", "dog/2.png")))
    line = refused(lambda: scan(root, HoldOut(0.5)))
    assert says in line
    assert line.startswith(f"data.root={root} ")
    assert len(line.splitlines()) == 1


def test_a_class_may_have_the_name_of_a_split_beside_others(tmp_path: Path) -> None:
    root = fill(tmp_path / "photos", *(f"{kind}/{i}.png" for kind in ("test", "Training", "bus") for i in range(9)))
    assert scan(root, HoldOut(0.5)).classes == ("Training", "bus", "test")


def test_an_evaluation_of_a_folder_of_splits_names_the_split_to_give(tmp_path: Path) -> None:
    for split in ("valid", "Validation", "test"):
        root = fill(tmp_path / split / "photos", "train/cat/1.png", f"{split}/cat/1.png", f"{split}/dog/1.png")
        line = refused(lambda root=root: scan_validation(root, ("cat", "dog"), None))
        assert line.endswith(f"give data.root={root}/{split}")
        assert len(scan_validation(root / split, ("cat", "dog"), None)) == 2


@pytest.mark.parametrize(
    ("target", "link"),
    [(".", "cat/loop"), ("..", "cat/loop"), ("../..", "cat/loop"), ("../../..", "cat/a/b/loop"), ("../dog", "cat/loop"),
     (".", "loop")],
)  # fmt: skip
@pytest.mark.parametrize("split", ["", "train/"])
def test_a_cycle_of_links_is_named_by_its_link(tmp_path: Path, split: str, target: str, link: str) -> None:
    root = fill(tmp_path / "photos", *(IMAGES if split else (name[6:] for name in IMAGES[:8])))
    place = root / split / link
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)
    if target == "../dog":  # each class in the other
        (root / split / "dog/loop").symlink_to("../cat")
    if link == "loop" and split:
        fill(root, "val/loop/1.png")
    line = refused(lambda: scan(root, HoldOut(0.5)))
    assert "/loop is a link to a folder that it is in: remove the link" in line
    assert line.count("loop") <= 2
    assert len(line) < len(str(root)) + 100


def test_a_link_to_another_folder_is_followed(tmp_path: Path) -> None:
    root = fill(tmp_path / "photos", *IMAGES)
    fill(tmp_path / "more", "9.png")
    (root / "train/cat/more").symlink_to("../../../more")
    (root / "train/cat/again").symlink_to(tmp_path / "more")
    assert len(scan(root, HoldOut(0.5)).train) == 10
