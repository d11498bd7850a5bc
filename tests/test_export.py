"""An exported model predicts what the checkpoint predicts; anything else is refused in one line."""

import math
import os
import re
import stat
from pathlib import Path

import pytest
from harness import SMALL, Job, free_port, pipeline, quick, save_checkpoint

from pipeline.cli.main import main
from pipeline.config.load import from_yaml
from pipeline.record.checkpoint import decode
from pipeline.record.checkpoint_files import read_verified


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = ["digits", f"data.root={digits}", *SMALL, "data.workers=0", "train.max_steps=1", "train.ema=0.9"]
    assert Job(folder, words).run().code == 0
    return folder


@pytest.mark.parametrize("form", ["torch.export", "onnx", "safetensors"])
def test_an_exported_model_makes_the_same_predictions(run: Path, form: str) -> None:
    result = quick("export", str(run), "--to", form)
    assert result.code == 0, result.err
    found = re.fullmatch(r"(\S+): the model of step 1; on 8 validation images, .* more than (\S+)\n", result.out)
    assert found, result.out
    assert float(found[2]) <= 1e-4
    assert Path(found[1]).is_file()
    assert [path.name[:1] for path in (run / "export").iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("form", ["torch.export", "onnx", "safetensors"])
def test_a_file_to_write_is_a_regular_file_with_the_permissions_of_the_umask(
    run: Path, tmp_path: Path, form: str
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to("/dev/null")
    (tmp_path / "ordinary").touch()
    result = quick("export", str(run), "--to", form, "--out", str(tmp_path / "link"))
    assert result.code == 0, result.err
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").stat().st_mode == (tmp_path / "ordinary").stat().st_mode
    for name in ("pipe", "null"):
        result = quick("export", str(run), "--to", form, "--out", str(tmp_path / name))
        assert result.code == 2
        assert f"--out {tmp_path / name} cannot be written: it is not a regular file" in result.error
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


@pytest.mark.parametrize("form", ["torch.export", "onnx", "safetensors"])
def test_a_full_disk_is_one_line(run: Path, small_disk: Path, form: str) -> None:
    result = quick("export", str(run), "--to", form, "--out", str(small_disk / "model"))
    assert result.code == 4
    assert result.error == f"{small_disk / 'model'} cannot be written: No space left on device"
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize(("form", "library"), [("onnx", "onnxscript"), ("safetensors", "safetensors")])
def test_a_missing_library_is_named(run: Path, tmp_path: Path, form: str, library: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{library!r}] = None\n")
    result = pipeline("export", str(run), "--to", form, "--out", str(tmp_path / "out"), PYTHONPATH=str(tmp_path))
    assert result.code == 2
    assert result.error.endswith(f"not part of the lock file: pip install {library}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["torch.export", "safetensors"])
def test_a_model_whose_logits_are_not_finite_is_not_exported(tmp_path: Path, digits: Path, form: str) -> None:
    words = ["digits", f"data.root={digits}", *SMALL, "data.workers=0", "train.max_steps=1"]
    assert Job(tmp_path / "run", words).run().code == 0
    (path,) = (tmp_path / "run/checkpoints").iterdir()
    contents = decode(read_verified(path), path)
    contents["model"]["fc.bias"].fill_(math.nan)
    save_checkpoint(tmp_path / "broken", contents, 1)
    result = quick("export", str(tmp_path / "broken"), "--to", form)
    assert result.code == 3, result.err
    assert re.search(r"/broken/checkpoints/step-\S+ are not finite on 8 validation images", result.error)
    assert not (tmp_path / "broken/export").exists()


@pytest.mark.full
def test_a_run_without_a_checkpoint_has_nothing_to_export(tmp_path: Path) -> None:
    result = quick("export", str(tmp_path), "--to", "torch.export")
    assert result.code == 4
    assert "holds no checkpoint" in result.error


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
