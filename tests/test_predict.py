"""`predict` returns the model's predictions, names images that it cannot read, and continues."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import save_checkpoint
from torch.nn.functional import softmax
from torchvision.models import get_model
from torchvision.transforms.functional import normalize, resize

from pipeline.addons.datasets.images import decode
from pipeline.cli.main import main
from pipeline.config.load import load

ARCH = "shufflenet_v2_x0_5"
CLASSES = [f"digit {label}" for label in range(10)]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run's folder with a checkpoint of random weights, enough to compare predictions."""
    return save_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def threes(digits: Path) -> Path:
    return digits / "val" / "3"


@pytest.fixture(scope="module")
def image(threes: Path) -> Path:
    return next(threes.iterdir())


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


def predict_probabilities(checkpoint: Path, files: list[Path]) -> torch.Tensor:
    """Return the probabilities, [N, 10], of torchvision's model with a checkpoint's weights."""
    model = get_model(ARCH, num_classes=10).eval()
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])
    images = torch.stack([resize(decode(file.read_bytes()), [32, 32], antialias=True) for file in files])
    with torch.inference_mode():
        return softmax(
            model(normalize(images.float() / 255, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])), 1
        )


def test_the_predictions_are_those_of_the_model(
    run_dir: Path, digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = predict_json(capsys, run_dir, digits / "val")
    assert output["bad"] == []
    files = sorted((digits / "val").glob("*/*.png"))
    assert [row["image"] for row in output["predictions"]] == [str(file) for file in files]
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    for row, expected in zip(output["predictions"], predict_probabilities(checkpoint, files), strict=True):
        found = {answer["class"]: answer["probability"] for answer in row["top"]}
        shares, labels = expected.topk(5)
        assert list(found) == [CLASSES[label] for label in labels]
        assert list(found.values()) == pytest.approx(shares.tolist(), abs=1e-5, rel=1e-4)


def predict_json(capsys: pytest.CaptureFixture[str], run: Path, images: Path) -> Any:
    capsys.readouterr()
    assert main(["predict", str(run), str(images), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_bad_image_is_named_and_a_killed_command_continues_its_file(
    run_dir: Path, threes: Path, image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos, out = tmp_path / "photos", tmp_path / "out.csv"
    shutil.copytree(threes, photos / "a, b")
    (photos / "torn.png").write_bytes(image.read_bytes()[:40])
    (photos / "notes.txt").write_text("not an image")
    words = ["predict", str(run_dir), str(photos)]
    assert main(words) == 0
    captured = capsys.readouterr()
    first, *_ = captured.out.splitlines()
    assert first.startswith(str(photos / "a, b"))
    assert first.count("digit ") == 5
    assert f"bad image {photos / 'torn.png'}: " in captured.err
    assert "left out: 1 .txt" in captured.err

    output = predict_json(capsys, run_dir, photos)
    assert main([*words, "--csv"]) == 0
    shown = capsys.readouterr().out
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

    command = [*words, "--csv", "--out", str(out)]
    assert main(command) == 0
    assert out.read_text() == shown
    for cut in (3, len(shown) // 2, len(shown) - 1):  # in the header, in a row, before the last line's end
        out.write_text(shown[:cut])
        assert main(command) == 0
        assert sorted(out.read_text().splitlines()) == sorted(shown.splitlines())
    capsys.readouterr()
    assert main(command) == 0
    assert capsys.readouterr().out == f"{out}: 0 rows, 0 of them of bad images; it had {len(rows)}\n"
    assert out.read_text().startswith(shown.splitlines()[0])


def test_a_file_of_another_model_or_program_is_refused_and_kept(
    run_dir: Path, image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, words = tmp_path / "out.csv", [str(image), "--csv", "--out", str(tmp_path / "out.csv")]
    assert main(["predict", str(save_run(tmp_path / "other", 2)), *words]) == 0
    for text, number in ((out.read_text(), 2), ("path,class\na,b", 1), ("x" * 200_000, 1), ("\n", 1)):
        out.write_text(text)
        assert main(["predict", str(run_dir), *words]) == 2
        assert f"line {number} of {out} is not of 'pipeline predict --csv' with" in capsys.readouterr().err
        assert out.read_text() == text


def test_a_row_holds_no_formula_and_no_second_line(
    image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["=1+1", "@x", "+a", "-a()", "-1", "+2.5", 'a"b', "c,d", "e\nf", "\udc80"]
    found = set()
    for first in range(10):  # each class is among the five likeliest of one of the models
        run = save_run(tmp_path / f"{first}", 0, classes=names[first:] + names[:first])
        assert main(["predict", str(run), str(image), "--csv"]) == 0
        (row,) = csv.DictReader(capsys.readouterr().out.splitlines())
        found |= {value for name, value in row.items() if name.startswith("class")}
    assert found == {"'=1+1", "'@x", "'+a", "'-a()", "-1", "+2.5", 'a"b', "c,d", r"e\nf", r"\udc80"}


def test_non_finite_logits_are_no_prediction(
    threes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["predict", str(save_run(tmp_path, 3e39)), str(threes)]
    for form, says in (("--json", "logits for it are not finite"), ("--csv", "their rows say why")):
        assert main([*words, form]) == 4
        assert says in capsys.readouterr().err


def test_the_names_of_classes_are_printed_as_one_line_or_refused(
    image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"\x1b]0;title\a\nother.png  cat {i} \udc80" for i in range(10)]
    assert main(["predict", str(save_run(tmp_path / "foreign", classes=names)), str(image)]) == 0
    (row,) = capsys.readouterr().out.splitlines()
    assert row.isprintable()
    numbers = save_run(tmp_path / "numbers", classes=list(range(10)))
    assert main(["predict", str(numbers), str(image)]) == 4
    assert "'classes' is missing or damaged" in capsys.readouterr().err
