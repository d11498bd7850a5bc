"""An exported model predicts what the checkpoint predicts; anything else is refused in one line."""

import io
import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import onnxruntime
import pytest
import torch
from harness import SMALL, Job, free_port, quick, save_checkpoint
from PIL import Image

from pipeline.addons.mlflow.model import export_model
from pipeline.addons.models.picture import PictureModel
from pipeline.cli.main import main
from pipeline.config.load import from_yaml
from pipeline.config.sections import Model
from pipeline.data.augment import center_crop
from pipeline.record.checkpoint_contents import decode
from pipeline.record.checkpoint_files import read_verified

FORMATS = (("torch.export",), ("onnx",), ("safetensors",), ("torch.export", "--pixels"), ("onnx", "--pixels"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    words = ["digits", f"data.root={digits}", *SMALL, "data.workers=0", "train.max_steps=1", "train.ema=0.9"]
    return Job(tmp_path_factory.mktemp("runs") / "run", words).finished().folder


@pytest.fixture
def contents(run: Path) -> dict[str, Any]:
    """Return the contents of the run's checkpoint, which a test may change."""
    (path,) = (run / "checkpoints").iterdir()
    return decode(read_verified(path), path)


@pytest.mark.parametrize("form", FORMATS, ids=" ".join)
def test_an_exported_model_makes_the_same_predictions(
    run: Path, tmp_path: Path, form: tuple[str, ...]
) -> None:
    result = quick("export", str(run), "--to", *form, "--out", str(tmp_path / "model"))
    assert result.code == 0, result.err
    found = re.fullmatch(
        r"(\S+): .* step 1; on 8 validation images and 4 of noise, .* more than (\S+)\n", result.out
    )
    assert found, result.out
    assert float(found[2]) <= 1e-4
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


class _Pixels(torch.nn.Module):
    """A model whose probabilities tell its pixels."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return (pixels.flatten(1) + 1).log()


@pytest.mark.parametrize(("size", "resize"), [(32, 37), (32, 32), (224, 256), (65, 30)])
def test_an_exported_model_sees_the_pixels_of_validation(size: int, resize: int) -> None:
    draw = torch.Generator().manual_seed(size)
    model = PictureModel(_Pixels(), (size, resize), Model()).eval()
    model.mean, model.std = torch.zeros(1), torch.ones(1)
    sides = ((1, 1), (1, 300), (300, 1), (2, 9), (8, 8), (37, 33), (size, size), (500, 31), (900, 1201))
    for height, width in sides:
        picture = torch.randint(256, (3, height, width), dtype=torch.uint8, generator=draw)
        expected = center_crop(picture, size, resize).float().flatten() + 1
        found = model(picture.permute(1, 2, 0))
        levels = found * expected.sum() - expected
        assert levels.abs().max() < 1.1, (height, width)
        assert (levels.abs() > 0.1).float().mean() < 0.005, (height, width)


def answer_of(page: str, file: str, *words: str, cwd: Path) -> str:
    """Return the output of the program that a page of the documentation writes to `file`."""
    text = (Path(__file__).parent.parent / "docs" / page).read_text()
    found = re.search(rf"^cat > {re.escape(file)} <<'EOF'\n(.*?)^EOF$", text, re.MULTILINE | re.DOTALL)
    assert found
    assert len(found[1].splitlines()) <= 15
    imported = set(re.findall(r"^(?:from|import) (\w+)", found[1], re.MULTILINE))
    assert imported - sys.stdlib_module_names <= {"numpy", "onnxruntime", "PIL"}
    command = [sys.executable, "-c", found[1], *words]
    return subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, text=True, check=True).stdout


def make_photos(folder: Path, count: int) -> None:
    """Write JPEGs of many sizes, also turned by EXIF, progressive, in grey and in CMYK."""
    draw = random.Random(0)
    sides = (1, 2, 5, 17, 31, 32, 33, 40, 64, 100, 224, 500)
    for number in range(count):
        few = [Image.effect_noise((draw.randint(1, 9), draw.randint(1, 9)), 150) for _ in "RGB"]
        small = Image.merge("RGB", [band.resize(few[0].size) for band in few])
        size = (2600, 2000) if number == 0 else (draw.choice(sides), draw.choice(sides))
        photo = small.resize(size, Image.Resampling.BICUBIC).convert(draw.choice(["RGB", "RGB", "L", "CMYK"]))
        exif = Image.Exif()
        exif[0x112] = draw.randint(1, 8)
        target = folder / f"{number % 3}" / f"{number:03}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        photo.save(target, quality=draw.choice([40, 90]), progressive=draw.random() < 0.2, exif=exif)


def test_the_lines_of_the_page_classify_a_folder_as_predict_does(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_photos(tmp_path / "photos", 300)
    assert main(["export", str(run), "--to", "onnx", "--out", str(tmp_path / "model.onnx")]) == 0
    capsys.readouterr()
    found = {}
    for line in answer_of("your-data.md", "classify.py", "model.onnx", "photos", cwd=tmp_path).splitlines():
        path, name, share = line.split("\t")
        found[str(tmp_path / path)] = (name, float(share))
    assert main(["predict", str(run), str(tmp_path / "photos"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["predictions"]
    assert len(rows) == len(found) == 300
    for row in rows:
        name, share = found[row["image"]]
        assert name == row["top"][0]["class"], row
        assert share == pytest.approx(row["top"][0]["probability"], abs=5e-3)


def test_a_file_says_which_model_it_holds(run: Path, tmp_path: Path, contents: dict[str, Any]) -> None:
    weights = json.loads((run / "receipt.json").read_text())["done"].rpartition("weights=")[2]
    expected = {
        "classes": json.dumps(list("0123456789")), "data": contents["data"], "side": "32", "step": "1",
        "thresholds": "null", "weights": weights,
    }  # fmt: skip
    for form, name in (("torch.export", "a.pt2"), ("onnx", "a.onnx")):
        assert quick("export", str(run), "--to", form, "--out", str(tmp_path / name)).code == 0
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    found = session.get_modelmeta().custom_metadata_map
    assert expected.items() <= found.items()
    (given,), (answer,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.type, given.shape) == ("picture", "tensor(uint8)", ["height", "width", 3])
    assert (answer.name, answer.shape) == ("probabilities", [10])
    extra = {"metadata.json": ""}
    program = torch.export.load(io.BytesIO((tmp_path / "a.pt2").read_bytes()), extra_files=extra).module()
    assert json.loads(extra["metadata.json"]) == found
    picture = torch.randint(256, (3, 70, 50), dtype=torch.uint8)
    ours = session.run(None, {"picture": picture.permute(1, 2, 0).numpy()})[0]
    assert program(picture.permute(1, 2, 0)).tolist() == pytest.approx(ours.tolist(), abs=1e-5)


def test_a_missing_library_is_named(run: Path, tmp_path: Path) -> None:
    words = ("export", str(run), "--to", "onnx", "--out", str(tmp_path / "out"))
    result = quick(*words, prelude="import sys; sys.modules['onnxscript'] = None")
    assert result.code == 2
    assert result.error.endswith("pip install onnxscript")
    assert not (tmp_path / "out").exists()


def test_a_model_whose_logits_are_not_finite_is_not_exported(
    tmp_path: Path, contents: dict[str, Any]
) -> None:
    contents["average"]["fc.bias"].fill_(math.nan)
    save_checkpoint(tmp_path / "broken", contents, 1)
    result = quick("export", str(tmp_path / "broken"), "--to", "torch.export")
    assert result.code == 3, result.err
    assert "are not finite on 8 validation images" in result.error
    assert not (tmp_path / "broken/export").exists()


def test_a_run_on_a_store_that_does_not_answer_is_compared_on_noise(
    tmp_path: Path, contents: dict[str, Any]
) -> None:
    """A store that the command names is needed: then its outage ends the command."""
    env = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}", "AWS_ACCESS_KEY_ID": "x",
           "AWS_SECRET_ACCESS_KEY": "x"}  # fmt: skip
    data = ("data.source=pack", "data.root=s3://bucket/pack")
    contents["config"] = from_yaml(contents["config"], "test", [*data]).to_yaml()
    save_checkpoint(tmp_path / "stored", contents, 1)
    words = ["export", str(tmp_path / "stored"), "--to", "safetensors"]
    assert "on 4 images of noise" in quick(*words, **env).out
    refused = quick(*words, *data, **env)
    assert (refused.code, "the store is out of reach" in refused.error) == (75, True)


def test_the_request_of_the_page_works_as_printed_on_the_logged_model(
    run: Path, tmp_path: Path, contents: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    export_model(contents, from_yaml(contents["config"], "test"), tmp_path / "model")
    make_photos(tmp_path / "photos", 9)
    photo = str(tmp_path / "photos/2/005.jpg")
    request = answer_of("mlflow.md", "request.py", photo, cwd=tmp_path)
    served = mlflow.pyfunc.load_model(str(tmp_path / "model"))
    (found,) = served.predict(np.array(json.loads(request)["inputs"], np.uint8))
    assert main(["predict", str(run), photo, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["predictions"]
    for top in row["top"]:
        share = found[contents["classes"].index(top["class"])]
        assert share == pytest.approx(top["probability"], abs=5e-3)
