"""An exported model predicts what the checkpoint predicts; anything else is refused in one line."""

import re
from pathlib import Path

import pytest
from harness import SMALL, Job, pipeline


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = ["digits", f"data.root={digits}", *SMALL, "data.workers=0", "train.max_steps=1", "train.ema=0.9"]
    assert Job(folder, words).run().code == 0
    return folder


@pytest.mark.parametrize("form", ["torch.export", "onnx", "safetensors"])
def test_an_exported_model_makes_the_same_predictions(run: Path, form: str) -> None:
    result = pipeline("export", str(run), "--to", form)
    assert result.code == 0, result.err
    found = re.fullmatch(r"(\S+): the model of step 1; on 8 validation images, .* more than (\S+)\n", result.out)
    assert found, result.out
    assert float(found[2]) <= 1e-4
    assert Path(found[1]).is_file()
    assert [path.name[:1] for path in (run / "export").iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(("form", "library"), [("onnx", "onnxscript"), ("safetensors", "safetensors")])
def test_a_missing_library_is_named(run: Path, tmp_path: Path, form: str, library: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{library!r}] = None\n")
    result = pipeline("export", str(run), "--to", form, "--out", str(tmp_path / "out"), PYTHONPATH=str(tmp_path))
    assert result.code == 2
    assert result.error.endswith(f"not part of the lock file: pip install {library}")
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_a_run_without_a_checkpoint_has_nothing_to_export(tmp_path: Path) -> None:
    result = pipeline("export", str(tmp_path), "--to", "torch.export")
    assert result.code == 4
    assert "holds no checkpoint" in result.error
