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

from pipeline.addons.datasets.images import decode
from pipeline.cli.main import main
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
    assert main(["predict", str(run_dir), str(digits / "val"), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["bad"] == []
    files = sorted((digits / "val").glob("*/*.png"))
    assert [row["image"] for row in output["predictions"]] == [str(file) for file in files]
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    for row, expected in zip(output["predictions"], predict_probabilities(checkpoint, files), strict=True):
        found = {answer["class"]: answer["probability"] for answer in row["top"]}
        shares, labels = expected.topk(5)
        assert list(found) == [CLASSES[label] for label in labels]
        assert list(found.values()) == pytest.approx(shares.tolist(), abs=1e-5, rel=1e-4)


def test_a_bad_image_is_named_and_the_others_are_predicted(
    run_dir: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = next((digits / "val" / "3").iterdir()).read_bytes()
    (tmp_path / "torn.png").write_bytes(good[:40])
    (tmp_path / "good.png").write_bytes(good)
    (tmp_path / "notes.txt").write_text("not an image")
    assert main(["predict", str(run_dir), str(tmp_path)]) == 0
    captured = capsys.readouterr()
    (row,) = captured.out.splitlines()
    assert row.startswith(str(tmp_path / "good.png"))
    assert row.count("digit ") == 5
    assert f"bad image {tmp_path / 'torn.png'}: " in captured.err
    assert "left out: 1 .txt" in captured.err


def test_two_files_with_one_printed_name_are_both_predicted(
    run_dir: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = next((digits / "val" / "3").iterdir()).read_bytes()
    for name in ("a\n.png", r"a\n.png"):
        (tmp_path / name).write_bytes(good)
    assert main(["predict", str(run_dir), str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_non_finite_logits_are_no_prediction(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(save_run(tmp_path, 3e39)), str(digits / "val" / "3"), "--json"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "are not finite for any image" in captured.err


def test_the_names_of_classes_are_printed_as_one_line_or_refused(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = str(next((digits / "val" / "3").iterdir()))
    names = [f"\x1b]0;title\a\nother.png  cat {i} \udc80" for i in range(10)]
    assert main(["predict", str(save_run(tmp_path / "foreign", classes=names)), image]) == 0
    (row,) = capsys.readouterr().out.splitlines()
    assert row.isprintable()
    assert main(["predict", str(save_run(tmp_path / "numbers", classes=list(range(10)))), image]) == 4
    assert "'classes' is missing or damaged" in capsys.readouterr().err


def test_a_request_that_cannot_work_is_one_line(
    run_dir: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "empty").mkdir()
    for target, image, code, says in (
        (str(run_dir), "empty", 2, "no image in"),
        ("empty", str(digits), 4, "holds no checkpoint"),
        ("models:/digits@best", str(digits), 2, "set MLFLOW_TRACKING_URI"),
    ):
        assert main(["predict", target, image]) == code
        assert says in capsys.readouterr().err
