"""`predict` returns the model's predictions, names images that it cannot read, and continues."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import save_checkpoint
from torch.nn.functional import softmax
from torchvision.models import get_model
from torchvision.transforms.functional import normalize, resize

from pipeline.cli.main import main
from pipeline.config.load import load
from pipeline.data.images import decode

ARCH = "shufflenet_v2_x0_5"
CLASSES = [f"digit {label}" for label in range(10)]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run's folder with a checkpoint of random weights, enough to compare predictions."""
    return save_run(tmp_path_factory.mktemp("run"))


def save_run(folder: Path, scale: float = 1, classes: list[Any] = CLASSES) -> Path:
    """Save a checkpoint and return `folder`; `scale` multiplies the weights of the last layer."""
    (folder / "checkpoints").mkdir()
    torch.manual_seed(0)
    config = load("digits", [f"model.arch={ARCH}", "run.device=cpu", "data.workers=0"])
    model = get_model(ARCH, num_classes=10)
    model.fc.weight.data.mul_(scale)
    contents = {"model": model.state_dict(), "average": None, "config": config.to_yaml(), "classes": classes}
    save_checkpoint(folder, contents, 7)
    return folder


def test_the_predictions_are_those_of_the_model(
    run_dir: Path, digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(run_dir), str(digits / "val"), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["bad"] == []
    files = sorted((digits / "val").glob("*/*.png"))
    assert [row["image"] for row in output["predictions"]] == [str(file) for file in files]

    model = get_model(ARCH, num_classes=10).eval()
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])
    images = torch.stack(
        [resize(decode(file.read_bytes()), [32, 32], antialias=True) for file in files]
    ).float()
    with torch.inference_mode():
        expected = softmax(
            model(normalize(images / 255, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])), 1
        ).topk(5)
    for row, labels, probabilities in zip(output["predictions"], *expected[::-1], strict=True):
        assert [prediction["class"] for prediction in row["top"]] == [CLASSES[label] for label in labels]
        torch.testing.assert_close(
            torch.tensor([prediction["probability"] for prediction in row["top"]]),
            probabilities,
            atol=1e-5,
            rtol=1e-4,
        )


def test_a_bad_image_is_named_and_the_others_are_predicted(
    run_dir: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = next((digits / "val" / "3").iterdir())
    (tmp_path / "torn.png").write_bytes(good.read_bytes()[:40])
    (tmp_path / "good.png").write_bytes(good.read_bytes())
    (tmp_path / "notes.txt").write_text("not an image")
    sheet = tmp_path / "sheet.png"
    assert main(["predict", str(run_dir), str(tmp_path), "--sheet", str(sheet)]) == 0
    captured = capsys.readouterr()
    (row,) = captured.out.splitlines()
    assert row.startswith(str(tmp_path / "good.png"))
    assert row.count("digit ") == 5
    assert f"bad image {tmp_path / 'torn.png'}: " in captured.err
    assert decode(sheet.read_bytes()).shape[0] == 3


def test_non_finite_logits_are_no_prediction(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(save_run(tmp_path, 3e39)), str(digits / "val" / "3"), "--json"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "are not finite for any image: use another checkpoint" in captured.err


def test_the_names_of_classes_are_printed_as_one_line_or_refused(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = str(next((digits / "val" / "3").iterdir()))
    for name in ("foreign", "numbers"):
        (tmp_path / name).mkdir()
    foreign = save_run(
        tmp_path / "foreign", classes=[f"\x1b]0;title\a\nother.png  cat {i} \udc80" for i in range(10)]
    )
    assert main(["predict", str(foreign), image]) == 0
    (row,) = capsys.readouterr().out.splitlines()
    assert row.isprintable()
    assert row.count(r"\x1b]0;title\x07\nother.png  cat ") == 5
    assert main(["predict", str(save_run(tmp_path / "numbers", classes=list(range(10)))), image]) == 4
    assert "its part 'classes' is missing or damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "image", "code", "says"),
    [
        ("{run}", "{empty}", 2, "no image in"),
        ("{empty}", "{digits}", 4, "holds no checkpoint"),
        ("{run}", "gone.png", 2, "pipeline: gone.png does not exist: give image files"),
        ("nowhere", "{digits}", 2, "pipeline: nowhere does not exist: give a run's folder"),
        ("models:/digits@best", "{digits}", 2, "set MLFLOW_TRACKING_URI"),
    ],
)
def test_a_request_that_cannot_work_is_one_line(
    run_dir: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], target: str, image: str, code: int, says: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "empty").mkdir()
    words = [word.format(run=run_dir, digits=digits, empty=tmp_path / "empty") for word in (target, image)]
    assert main(["predict", *words]) == code
    assert says in capsys.readouterr().err
