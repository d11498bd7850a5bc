"""`predict` returns the model's predictions, names images that it cannot read, and continues."""

import csv
import fcntl
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Result, quick, save_checkpoint
from torch.nn.functional import softmax
from torchvision.models import get_model
from torchvision.transforms.functional import normalize, resize

from pipeline.addons.datasets.images import decode
from pipeline.config.load import load

ARCH = "shufflenet_v2_x0_5"
CLASSES = [f"digit {label}" for label in range(10)]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run's folder with a checkpoint of random weights, enough to compare predictions."""
    return save_run(tmp_path_factory.mktemp("run"))


def save_run(folder: Path, scale: float = 1, classes: list[Any] = CLASSES) -> Path:
    """Save a checkpoint and return `folder`; `scale` multiplies the weights of the last layer."""
    (folder / "checkpoints").mkdir(parents=True)
    torch.manual_seed(0)
    config = load("digits", [f"model.arch={ARCH}", "run.device=cpu", "data.workers=0"])
    model = get_model(ARCH, num_classes=10)
    model.fc.weight.data.mul_(scale)
    contents = {"model": model.state_dict(), "average": None, "config": config.to_yaml(), "classes": classes}
    save_checkpoint(folder, contents, 7)
    return folder


def predict(run: Path, images: Path, *words: str, code: int = 0) -> Result:
    return quick("predict", str(run), str(images), *words, code=code)


def test_the_predictions_are_those_of_the_model(run_dir: Path, digits: Path) -> None:
    output = json.loads(predict(run_dir, digits / "val", "--json").out)
    assert output["bad"] == []
    files = sorted((digits / "val").glob("*/*.png"))
    assert [row["image"] for row in output["predictions"]] == [str(file) for file in files]
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    model = get_model(ARCH, num_classes=10).eval()
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])
    images = torch.stack([resize(decode(file.read_bytes()), [32, 32], antialias=True) for file in files])
    images = normalize(images.float() / 255, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    with torch.inference_mode():
        probabilities = softmax(model(images), 1)
    for row, expected in zip(output["predictions"], probabilities, strict=True):
        found = {answer["class"]: answer["probability"] for answer in row["top"]}
        shares, labels = expected.topk(5)
        assert list(found) == [CLASSES[label] for label in labels]
        assert list(found.values()) == pytest.approx(shares.tolist(), abs=1e-5, rel=1e-4)


def test_a_bad_image_is_named_and_a_file_continued(run_dir: Path, image: Path, tmp_path: Path) -> None:
    photos, out = tmp_path / "photos", tmp_path / "out.csv"
    shutil.copytree(image.parent, photos / "a, b")
    (photos / "torn.png").write_bytes(image.read_bytes()[:40])
    (photos / "notes.txt").write_text("not an image")
    text = predict(run_dir, photos)
    first, *_ = text.out.splitlines()
    assert first.startswith(str(photos / "a, b"))
    assert first.count("digit ") == 5
    assert f"bad image {photos / 'torn.png'}: " in text.err
    assert "left out: 1 .txt" in text.err

    output = json.loads(predict(run_dir, photos, "--json").out)
    shown = predict(run_dir, photos, "--csv").out
    rows = list(csv.DictReader(shown.splitlines()))
    good = [row for row in rows if row["class"]]
    assert [row["path"] for row in good] == [row["image"] for row in output["predictions"]]
    for row, expected in zip(good, output["predictions"], strict=True):
        for rank, top in zip(("", "_2", "_3", "_4", "_5"), expected["top"], strict=True):
            assert row[f"class{rank}"] == top["class"]
            assert float(row[f"probability{rank}"]) == pytest.approx(top["probability"], abs=1e-6)
    (bad,) = (row for row in rows if not row["class"])
    assert {"image": bad["path"], "defect": bad["defect"]} == output["bad"][0]
    assert not any(value for name, value in bad.items() if name.startswith(("class", "probability")))

    words = ("--csv", "--out", str(out))
    predict(run_dir, photos, *words)
    assert out.read_text() == shown
    for cut in (3, len(shown) // 2, len(shown) - 1):  # in the header, in a row, before the last line's end
        out.write_text(shown[:cut])
        predict(run_dir, photos, *words)
        assert sorted(out.read_text().splitlines()) == sorted(shown.splitlines())
    again = predict(run_dir, photos, *words)
    assert again.out == f"{out}: 0 rows, 0 of them of bad images; it had {len(rows)}\n"
    assert out.read_text().startswith(shown.splitlines()[0])
    with open(out, "a") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert "another command writes it" in predict(run_dir, photos, *words, code=4).error


def test_a_file_of_another_model_or_program_is_kept(run_dir: Path, image: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    words = ("--csv", "--out", str(out))
    predict(save_run(tmp_path / "other", 2), image, *words)
    for text, number in ((out.read_text(), 2), ("path,class\na,b", 1), ("x" * 200_000, 1), ("\n", 1)):
        out.write_text(text)
        refused = predict(run_dir, image, *words, code=2)
        assert f"line {number} of {out} is not of 'pipeline predict --csv' with" in refused.error
        assert out.read_text() == text


def test_a_row_holds_no_formula_and_no_second_line(image: Path, tmp_path: Path) -> None:
    names = ["=1+1", "@x", "+a", "-a()", "-1", "+2.5", 'a"b', "c,d", "e\nf", "\udc80"]
    found = set()
    for first in range(10):  # each class is among the five likeliest of one of the models
        run = save_run(tmp_path / f"{first}", 0, classes=names[first:] + names[:first])
        (row,) = csv.DictReader(predict(run, image, "--csv").out.splitlines())
        found |= {value for name, value in row.items() if name.startswith("class")}
    assert found == {"'=1+1", "'@x", "'+a", "'-a()", "-1", "+2.5", 'a"b', "c,d", r"e\nf", r"\udc80"}


def test_non_finite_logits_are_no_prediction(image: Path, tmp_path: Path) -> None:
    run = save_run(tmp_path, 3e39)
    assert "the model's logits for it are not finite" in predict(run, image, "--json", code=4).err
    assert "has a prediction: their rows say why" in predict(run, image, "--csv", code=4).err


def test_the_names_of_classes_are_printed_as_one_line_or_refused(image: Path, tmp_path: Path) -> None:
    names = [f"\x1b]0;title\a\nother.png  cat {i} \udc80" for i in range(10)]
    (row,) = predict(save_run(tmp_path / "foreign", classes=names), image).out.splitlines()
    assert row.isprintable()
    numbers = save_run(tmp_path / "numbers", classes=list(range(10)))
    assert "'classes' is missing or damaged" in predict(numbers, image, code=4).error
