"""An exported model predicts what the checkpoint predicts; anything else is refused in one line."""

import math
import os
import re
from pathlib import Path

import pytest
from harness import SMALL, Job, free_port, quick, save_checkpoint

from pipeline.cli.main import main
from pipeline.config.load import from_yaml
from pipeline.record.checkpoint_contents import decode
from pipeline.record.checkpoint_files import read_verified

FORMATS = ("torch.export", "onnx", "safetensors")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    words = ["digits", f"data.root={digits}", *SMALL, "data.workers=0", "train.max_steps=1", "train.ema=0.9"]
    return Job(tmp_path_factory.mktemp("runs") / "run", words).finished().folder


@pytest.mark.parametrize("form", FORMATS)
def test_an_exported_model_makes_the_same_predictions(
    run: Path, tmp_path: Path, small_disk: Path, form: str
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "ordinary").touch()
    result = quick("export", str(run), "--to", form, "--out", str(tmp_path / "link"))
    assert result.code == 0, result.err
    found = re.fullmatch(r"(\S+): .* step 1; on 8 validation images, .* more than (\S+)\n", result.out)
    assert found, result.out
    assert float(found[2]) <= 1e-4
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").stat().st_mode == (tmp_path / "ordinary").stat().st_mode, "that of the umask"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]

    full = quick("export", str(run), "--to", form, "--out", str(small_disk / "model"))
    assert full.code == 4
    assert full.error.startswith(f"{small_disk / 'model'} cannot be written: ")
    assert list(small_disk.iterdir()) == []


def test_only_a_regular_file_is_written_by_default_in_the_folder_of_the_run(
    run: Path, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    result = quick("export", str(run), "--to", "safetensors", "--out", str(tmp_path / "pipe"))
    assert result.code == 2
    assert f"--out {tmp_path / 'pipe'} cannot be written: " in result.error
    assert quick("export", str(run), "--to", "safetensors").code == 0
    assert (run / "export/step-00000001.safetensors").is_file()


def test_a_missing_library_is_named(run: Path, tmp_path: Path) -> None:
    words = ("export", str(run), "--to", "onnx", "--out", str(tmp_path / "out"))
    result = quick(*words, prelude="import sys; sys.modules['onnxscript'] = None")
    assert result.code == 2
    assert result.error.endswith("pip install onnxscript")
    assert not (tmp_path / "out").exists()


def test_a_model_whose_logits_are_not_finite_is_not_exported(run: Path, tmp_path: Path) -> None:
    (path,) = (run / "checkpoints").iterdir()
    contents = decode(read_verified(path), path)
    contents["average"]["fc.bias"].fill_(math.nan)
    save_checkpoint(tmp_path / "broken", contents, 1)
    result = quick("export", str(tmp_path / "broken"), "--to", "torch.export")
    assert result.code == 3, result.err
    assert "are not finite on 8 validation images" in result.error
    assert not (tmp_path / "broken/export").exists()


def test_a_run_on_a_store_that_does_not_answer_is_compared_on_noise(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store that the command names is needed: then its outage ends the command."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    (path,) = (run / "checkpoints").iterdir()
    contents = decode(read_verified(path), path)
    data = ("data.source=pack", "data.root=s3://bucket/pack")
    contents["config"] = from_yaml(contents["config"], "test", [*data]).to_yaml()
    save_checkpoint(tmp_path / "stored", contents, 1)
    words = ["export", str(tmp_path / "stored"), "--to", "safetensors"]
    assert main(words) == 0
    assert "on 8 images of noise" in capsys.readouterr().out
    assert main([*words, *data]) == 75
    assert "the store is out of reach" in capsys.readouterr().err
