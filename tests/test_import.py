"""Published archives become a complete data set without unpacking twice, or are refused by name."""

import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from harness import refused
from scipy.io import savemat
from test_pack import encoded, file_digests, photo
from torchvision.datasets import Imagenette

from pipeline.addons.datasets import imagenet
from pipeline.addons.datasets.holdout import HoldOut
from pipeline.addons.datasets.images import decode
from pipeline.addons.datasets.make import get, import_imagenet
from pipeline.addons.datasets.manifest import scan
from pipeline.addons.datasets.write_pack import pack
from pipeline.cli.main import main
from pipeline.errors import StorageError

CLASSES = {"n01440764": 3, "n02102040": 5, "n02979186": 4}
TRUTH = ["n02979186", "n01440764", "n02102040", "n01440764"]


def add(file: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    file.addfile(member, io.BytesIO(data))


def make_devkit(path: Path, counts: dict[str, int], patch: pytest.MonkeyPatch) -> None:
    """Write a development kit with the real fields, which counts as the published one."""
    names = "ILSVRC2012_ID WNID words gloss num_children children wordnet_height num_train_images"
    rows = [(i + 1, wnid, "a, b", "text", 0, 0, 0, count) for i, (wnid, count) in enumerate(counts.items())]
    rows.append((9, "n00000009", "all", "text", len(rows), 1, 2, 0))  # an inner node of the hierarchy
    meta = io.BytesIO()
    kinds = [(name, object) for name in names.split()]
    savemat(meta, {"synsets": np.array(rows, dtype=kinds).reshape(-1, 1)})
    truth = "".join(f"{list(counts).index(wnid) + 1}\n" for wnid in TRUTH)
    with tarfile.open(path, "w:gz") as kit:
        add(kit, "ILSVRC2012_devkit_t12/data/meta.mat", meta.getvalue())
        add(kit, "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt", truth.encode())
    patch.setattr(imagenet, "_DEVKIT_MD5", md5(path))


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def image_file(seed: int) -> bytes:
    """Return an image file: as in the real set, one is a PNG named JPEG and one is CMYK."""
    image = photo(40, 60, seed).convert("CMYK" if seed == 6 else "RGB")
    return encoded(image, "PNG" if seed == 4 else "JPEG")


@pytest.fixture
def archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "archives"
    root.mkdir()
    make_devkit(root / imagenet.DEVKIT, CLASSES, monkeypatch)
    seed = 0
    with tarfile.open(root / imagenet.TRAIN, "w") as outer:
        for wnid, count in CLASSES.items():
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as file:
                for number in range(count):
                    add(file, f"{wnid}_{number}.JPEG", image_file(seed := seed + 1))
            add(outer, f"{wnid}.tar", inner.getvalue())
    with tarfile.open(root / imagenet.VAL, "w") as file:
        for number in range(len(TRUTH)):
            add(file, f"ILSVRC2012_val_{number + 1:08d}.JPEG", image_file(100 + number))
    return root


@pytest.mark.usefixtures("jpegtran")
def test_the_archives_become_an_image_folder_or_the_pack_of_it(
    archives: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "imagenet"
    assert main(["data", "import", "imagenet", str(archives), str(out)]) == 0
    line = "12 images to train, 4 held out, 3 classes, as the development kit counts them"
    assert capsys.readouterr().out == f"imported {out}: {line}\n"
    index = scan(out, HoldOut())
    assert index.classes == tuple(CLASSES)
    assert np.bincount(index.train.labels).tolist() == list(CLASSES.values())
    assert [index.val.name(i).decode().split("/")[1:] for i in range(4)] == sorted(
        [wnid, f"ILSVRC2012_val_{number + 1:08d}.JPEG"] for number, wnid in enumerate(TRUTH)
    )
    assert (out / "train/n02102040/n02102040_0.JPEG").read_bytes() == image_file(4)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.JPEG")}
    (out / "train/n01440764/n01440764_2.JPEG").unlink()
    (out / "val/n01440764/ILSVRC2012_val_00000002.JPEG").write_bytes(b"half")
    assert import_imagenet(archives, out, None).endswith(line)
    after = {path: path.stat().st_mtime_ns for path in out.rglob("*.JPEG")}
    # only the missing and the truncated file are written
    assert sum(before[path] != after[path] for path in before) == 2
    assert scan(out, HoldOut()).digest == index.digest
    pack(out, tmp_path / "from folder", "lossless", 0.1)
    line = import_imagenet(archives, tmp_path / "from archives", "lossless")
    assert line.startswith(f"packed {tmp_path / 'from archives'}: 16 images in 2 shards")
    found = [file_digests(tmp_path / name).items() for name in ("from folder", "from archives")]
    assert {name for name, _ in found[0] ^ found[1]} == {"pack.json"}, "which names its source"


def test_wrong_archives_are_refused(archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal() -> str:
        line = refused(lambda: import_imagenet(archives, tmp_path / "out", None))
        assert not (tmp_path / "out").exists()
        return line

    make_devkit(archives / imagenet.DEVKIT, {**CLASSES, "n02102040": 6}, monkeypatch)
    assert "n02102040 has 5 of 6" in refusal()
    make_devkit(archives / imagenet.DEVKIT, CLASSES, monkeypatch)
    content = (archives / imagenet.TRAIN).read_bytes()
    for length in (len(content) // 2, 700, 100):
        (archives / imagenet.TRAIN).write_bytes(content[:length])
        assert refusal().startswith(f"{archives / imagenet.TRAIN} is damaged or cut short (")
    (archives / imagenet.TRAIN).write_bytes(content)
    (archives / imagenet.DEVKIT).write_bytes(b"nonsense")
    assert f"{archives / imagenet.DEVKIT} is not the published development kit" in refusal()
    (archives / imagenet.VAL).unlink()
    assert refusal().startswith(f"{archives} holds no {imagenet.VAL}: it needs {imagenet.TRAIN}, ")


@pytest.mark.fault("J5")
@pytest.mark.parametrize("name", ["../outside.txt", "imagenette2/../../../outside.txt", "imagenette2/link"])
def test_an_archive_stays_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    archive = tmp_path / "deep/.imagenette.download/imagenette2.tgz"
    archive.parent.mkdir(parents=True)
    with tarfile.open(archive, "w:gz") as file:
        add(file, "imagenette2/train/n01440764/x.JPEG", image_file(1))
        if name.endswith("link"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, "../../.."
            file.addfile(link)
        else:
            add(file, name, b"outside")
    # torchvision's own downloader, with an archive that has the expected checksum
    known = {"full": (f"https://example.invalid/{archive.name}", md5(archive))}
    monkeypatch.setattr(Imagenette, "_ARCHIVES", known)
    monkeypatch.setattr(tarfile.TarFile, "extraction_filter", staticmethod(tarfile.fully_trusted_filter))
    with pytest.raises(StorageError, match="nothing of it is used"):
        get("imagenette", tmp_path / "deep" / "imagenette")
    assert not list(tmp_path.rglob("outside*"))
    assert not (tmp_path / "deep" / "imagenette").exists()


def test_cifar10_is_fetched_without_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, out = tmp_path / ".cifar10.download/cifar-10-binary.tar.gz", tmp_path / "cifar10"
    archive.parent.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (6, 10, 3072), np.uint8)
    with tarfile.open(archive, "w:gz") as file:  # downloaded before, so no network is needed
        add(file, "cifar-10-batches-bin/../../outside.bin", b"")
        for number, images in enumerate(pixels):
            name = f"data_batch_{number}" if number else "test_batch"
            records = b"".join(bytes([label]) + image.tobytes() for label, image in enumerate(images))
            add(file, f"cifar-10-batches-bin/{name}.bin", records)
    monkeypatch.setattr("pipeline.addons.datasets.make._CIFAR10_MD5", md5(archive))
    assert get("cifar10", out) == f"fetched {out}: 50 images to train, 10 held out, 10 classes"
    assert not archive.parent.exists()
    files = sorted(out.rglob("*.png"), key=lambda path: (path.parts[-3] == "train", path.name))
    found = [decode(path.read_bytes()).numpy().tobytes() for path in files]
    assert found == [image.tobytes() for image in pixels.reshape(60, 3072)]
    assert [path.parent.name for path in files[:2]] == ["airplane", "automobile"]
    assert not list(tmp_path.rglob("outside*"))
