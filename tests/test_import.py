"""Published archives become a data set without unpacking twice, whole or refused by name."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from harness import pipeline
from scipy.io import savemat
from test_data import encoded
from test_pack import contents, photo

from pipeline.data import imagenet
from pipeline.data.manifest import scan
from pipeline.operate.data import get, import_imagenet
from pipeline.operate.pack import pack
from pipeline.verdict import RequestError

CLASSES = {"n01440764": 3, "n02102040": 5, "n02979186": 4}
TRUTH = ["n02979186", "n01440764", "n02102040", "n01440764"]


def add(file: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    file.addfile(member, io.BytesIO(data))


def make_devkit(path: Path, counts: dict[str, int]) -> None:
    """With the fields of the real one, an inner node of the hierarchy included."""
    kinds = [(name, object) for name in ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children",
                                         "wordnet_height", "num_train_images")]  # fmt: skip
    rows = [(i + 1, wnid, "a, b", "text", 0, 0, 0, count) for i, (wnid, count) in enumerate(counts.items())]
    rows.append((9, "n00000009", "all", "text", len(rows), 1, 2, 0))
    meta = io.BytesIO()
    savemat(meta, {"synsets": np.array(rows, dtype=kinds).reshape(-1, 1)})
    truth = "".join(f"{list(counts).index(wnid) + 1}\n" for wnid in TRUTH)
    with tarfile.open(path, "w:gz") as kit:
        add(kit, "ILSVRC2012_devkit_t12/data/meta.mat", meta.getvalue())
        add(kit, "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt", truth.encode())


def picture(seed: int) -> bytes:
    """One of them is a PNG that is called JPEG, one is CMYK, as in the real set."""
    image = photo(40, 60, seed)
    return encoded(image, "PNG") if seed == 4 else encoded(image.convert("CMYK") if seed == 6 else image, "JPEG")


@pytest.fixture
def archives(tmp_path: Path) -> Path:
    root = tmp_path / "archives"
    root.mkdir()
    make_devkit(root / imagenet.DEVKIT, CLASSES)
    seed = 0
    with tarfile.open(root / imagenet.TRAIN, "w") as outer:
        for wnid, count in CLASSES.items():
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as file:
                for number in range(count):
                    add(file, f"{wnid}_{number}.JPEG", picture(seed := seed + 1))
            add(outer, f"{wnid}.tar", inner.getvalue())
    with tarfile.open(root / imagenet.VAL, "w") as file:
        for number in range(len(TRUTH)):
            add(file, f"ILSVRC2012_val_{number + 1:08d}.JPEG", picture(100 + number))
    return root


def test_the_archives_become_an_image_folder(archives: Path, tmp_path: Path) -> None:
    out = tmp_path / "imagenet"
    made = pipeline("data", "import", "imagenet", str(archives), str(out))
    assert made.code == 0, made.err
    line = "12 images to train, 4 held out, 3 classes, as the development kit counts them"
    assert made.out == f"imported {out}: {line}\n"
    index = scan(out, 0.1)
    assert index.classes == tuple(sorted(CLASSES))
    assert np.bincount(index.train.labels).tolist() == list(CLASSES.values())
    assert [index.val.name(i).decode().split("/")[1:] for i in range(4)] == sorted(
        [wnid, f"ILSVRC2012_val_{number + 1:08d}.JPEG"] for number, wnid in enumerate(TRUTH)
    )
    assert (out / "train/n02102040/n02102040_0.JPEG").read_bytes() == picture(4)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.JPEG")}
    (out / "train/n01440764/n01440764_2.JPEG").unlink()
    (out / "val/n01440764/ILSVRC2012_val_00000002.JPEG").write_bytes(b"half")
    assert import_imagenet(archives, out, None).endswith(line)
    after = {path: path.stat().st_mtime_ns for path in out.rglob("*.JPEG")}
    assert sum(before[path] != after[path] for path in before) == 2  # what was missing or half, and nothing else
    assert scan(out, 0.1).digest == index.digest


def test_a_pack_of_the_archives_is_the_pack_of_their_folder(archives: Path, tmp_path: Path) -> None:
    import_imagenet(archives, tmp_path / "folder", None)
    pack(tmp_path / "folder", tmp_path / "from folder", "lossless", 0.1)
    line = import_imagenet(archives, tmp_path / "from archives", "lossless")
    assert line.startswith(f"packed {tmp_path / 'from archives'}: 16 images in 2 shards")
    found = [contents(tmp_path / name) for name in ("from folder", "from archives")]
    assert all(found[0][name] == found[1][name] for name in found[0] if name != "pack.json")  # it names its source


def test_what_is_missing_miscounted_or_cut_short_is_refused(archives: Path, tmp_path: Path) -> None:
    def refused() -> str:
        with pytest.raises(RequestError) as refusal:
            import_imagenet(archives, tmp_path / "out", None)
        assert not (tmp_path / "out").exists()
        return str(refusal.value)

    make_devkit(archives / imagenet.DEVKIT, {**CLASSES, "n02102040": 6})
    assert refused() == (
        f"{imagenet.TRAIN} holds 12 images, and the development kit says 13: n02102040 has 5 of 6: download it again"
    )
    make_devkit(archives / imagenet.DEVKIT, CLASSES)
    whole = (archives / imagenet.TRAIN).read_bytes()
    for length in (len(whole) // 2, 700, 100):
        (archives / imagenet.TRAIN).write_bytes(whole[:length])
        assert refused().startswith(f"{archives / imagenet.TRAIN} is damaged or cut short (")
    (archives / imagenet.TRAIN).write_bytes(whole)
    (archives / imagenet.DEVKIT).write_bytes(b"nonsense")
    assert refused().startswith(f"{archives / imagenet.DEVKIT} cannot be read as the development kit (")
    (archives / imagenet.VAL).unlink()
    assert refused().startswith(f"{archives} holds no {imagenet.VAL}: it needs {imagenet.TRAIN}, ")


def test_imagenette_is_laid_out_where_it_was_fetched(tmp_path: Path) -> None:
    fetched = tmp_path / ".imagenette.download/imagenette2"
    for split in ("train", "val"):
        for wnid in CLASSES:
            (fetched / split / wnid).mkdir(parents=True)
            (fetched / split / wnid / f"{wnid}_1.JPEG").write_bytes(picture(1))
    out = tmp_path / "imagenette"
    assert get("imagenette", str(out)) == f"fetched {out}: 3 images to train, 3 held out, 3 classes"
    assert not (tmp_path / ".imagenette.download").exists()
    again = pipeline("data", "get", "imagenette", str(out))
    assert (again.code, again.error) == (2, f"{out} is there already: remove it, or name another folder")
