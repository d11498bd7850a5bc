"""An exported model predicts what the checkpoint predicts; anything else is refused in one line."""

import io
import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path

import mlflow
import numpy as np
import onnxruntime
import pytest
import torch
from harness import Job, MakeJob, free_port, quick, save_checkpoint
from PIL import Image

from pipeline.addons.mlflow.model import export_model
from pipeline.addons.models.picture import PictureModel
from pipeline.config.load import from_yaml
from pipeline.config.sections import Model
from pipeline.data.augment import center_crop


@pytest.fixture(scope="module")
def run(job: MakeJob) -> Job:
    return job("data.workers=0", "train.max_steps=1", "train.ema=0.9").finished()


@pytest.fixture(scope="module")
def exported(run: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the model in each format."""
    folder = tmp_path_factory.mktemp("exported")
    for form in ("torch.export", "onnx", "safetensors", "torch.export --pixels", "onnx --pixels"):
        result = quick("export", str(run.folder), "--to", *form.split(), "--out", str(folder / form), code=0)
        said = r".*: .* step 1; on 8 validation images and 4 of noise, .* more than (\S+)\n"
        found = re.fullmatch(said, result.out)
        assert found, result.out
        assert float(found[1]) <= 1e-4
    return folder


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
        levels = model(picture.permute(1, 2, 0)) * expected.sum() - expected
        assert levels.abs().max() < 1.1, (height, width)
        assert (levels.abs() > 0.1).float().mean() < 0.005, (height, width)


def answer_of(page: str, file: str, *words: str, cwd: Path) -> str:
    """Return the output of the program that a page of the documentation writes to `file`."""
    text = (Path(__file__).parent.parent / "docs" / page).read_text()
    found = re.search(rf"^cat > {re.escape(file)} <<'EOF'\n(.*?)^EOF$", text, re.MULTILINE | re.DOTALL)
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


def top_classes(run: Job, images: Path) -> dict[str, dict[str, float]]:
    result = quick("predict", str(run.folder), str(images), "--json", code=0)
    return {
        row["image"]: {top["class"]: top["probability"] for top in row["top"]}
        for row in json.loads(result.out)["predictions"]
    }


def test_the_lines_of_the_page_classify_as_predict_does(run: Job, exported: Path, tmp_path: Path) -> None:
    make_photos(tmp_path / "photos", 300)
    lines = answer_of("your-data.md", "classify.py", str(exported / "onnx"), "photos", cwd=tmp_path)
    expected = top_classes(run, tmp_path / "photos")
    found = {path: (name, share) for path, name, share in (line.split("\t") for line in lines.splitlines())}
    assert len(expected) == len(found) == 300
    for path, (name, share) in found.items():
        (best, probability), *_ = expected[str(tmp_path / path)].items()
        assert (name, float(share)) == (best, pytest.approx(probability, abs=5e-3)), path


def test_the_logged_model_takes_the_request_of_the_page_and_other_sizes(run: Job, tmp_path: Path) -> None:
    contents = run.contents()
    export_model(contents, from_yaml(contents["config"], "test"), tmp_path / "model")
    make_photos(tmp_path / "photos", 9)
    photo = tmp_path / "photos/2/005.jpg"
    request = answer_of("mlflow.md", "request.py", str(photo), cwd=tmp_path)
    served = mlflow.pyfunc.load_model(str(tmp_path / "model"))
    pictures = np.array(json.loads(request)["inputs"], np.uint8)
    (shares,) = served.predict(pictures)
    np.testing.assert_allclose(served.predict(np.repeat(pictures, 3, 0)), [shares] * 3, atol=1e-6)
    assert served.predict(np.zeros((1, 300, 7, 3), np.uint8)).shape == (1, 10)
    (given,) = served.metadata.signature.inputs.inputs
    assert (given.type, given.shape) == (np.uint8, (-1, -1, -1, 3))
    for name, probability in top_classes(run, photo)[str(photo)].items():
        assert shares[contents["classes"].index(name)] == pytest.approx(probability, abs=5e-3)


def test_a_file_says_which_model_it_holds(run: Job, exported: Path) -> None:
    weights = json.loads((run.folder / "receipt.json").read_text())["done"].rpartition("weights=")[2]
    expected = {
        "classes": json.dumps(list("0123456789")), "data": run.contents()["data"], "side": "16", "step": "1",
        "thresholds": "null", "weights": weights,
    }  # fmt: skip
    session = onnxruntime.InferenceSession(exported / "onnx")
    found = session.get_modelmeta().custom_metadata_map
    assert expected.items() <= found.items()
    (given,), (answer,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.type, given.shape) == ("picture", "tensor(uint8)", ["height", "width", 3])
    assert (answer.name, answer.shape) == ("probabilities", [10])
    extra = {"metadata.json": ""}
    torch.export.load(io.BytesIO((exported / "torch.export").read_bytes()), extra_files=extra)
    assert json.loads(extra["metadata.json"]) == found


def test_a_model_that_cannot_be_exported_leaves_no_file(run: Job, tmp_path: Path) -> None:
    contents = run.contents()
    contents["average"]["classifier.bias"].fill_(math.nan)
    save_checkpoint(tmp_path / "broken", contents, 1)
    words = ("export", str(tmp_path / "broken"), "--to", "onnx")
    result = quick(*words, prelude="import sys; sys.modules['onnxscript'] = None", code=2)
    assert result.error.endswith("pip install onnxscript")
    assert "are not finite on 8 validation images" in quick(*words, code=3).error
    assert not (tmp_path / "broken/export").exists()


def test_a_run_on_a_store_that_does_not_answer_is_compared_on_noise(run: Job, tmp_path: Path) -> None:
    contents = run.contents()
    env = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}", "AWS_ACCESS_KEY_ID": "x",
           "AWS_SECRET_ACCESS_KEY": "x"}  # fmt: skip
    data = ("data.source=pack", "data.root=s3://bucket/pack")
    contents["config"] = from_yaml(contents["config"], "test", [*data]).to_yaml()
    save_checkpoint(tmp_path / "stored", contents, 1)
    words = ["export", str(tmp_path / "stored"), "--to", "safetensors"]
    assert "on 4 images of noise" in quick(*words, **env).out
    needed = quick(*words, *data, code=75, **env)  # as the command names it
    assert "the store is out of reach" in needed.error
