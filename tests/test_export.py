"""What is exported answers as the model does, for any number of images; what cannot be exported is refused in one line."""

import importlib.util
import re
from pathlib import Path

import pytest
from harness import SMALL, Job, pipeline

FORMATS = {"torch.export": (), "onnx": ("onnx", "onnxruntime", "onnxscript"), "safetensors": ("safetensors",)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = ["digits", f"data.root={digits}", *SMALL, "data.workers=0", "train.max_steps=1", "train.ema=0.9"]
    assert Job(folder, words).run().code == 0
    return folder


@pytest.mark.parametrize("form", FORMATS)
def test_a_model_is_exported_and_answers_alike_or_its_library_is_named(run: Path, form: str) -> None:
    missing = [name for name in FORMATS[form] if importlib.util.find_spec(name) is None]
    result = pipeline("export", str(run), "--to", form)
    if missing:
        assert result.code == 2
        assert result.error.endswith(f"pip install {' '.join(missing)}")
        assert not (run / "export").is_dir() or not list((run / "export").glob(f"*.{form}"))
        return
    assert result.code == 0, result.err
    found = re.fullmatch(r"(\S+): the model of step 1; on 8 validation images, .* more than (\S+)\n", result.out)
    assert found, result.out
    assert float(found[2]) <= 1e-4
    assert Path(found[1]).is_file()
    assert [path.name[:1] for path in (run / "export").iterdir() if path.name.startswith(".")] == []


@pytest.mark.full
def test_a_run_without_a_checkpoint_has_nothing_to_export(tmp_path: Path) -> None:
    result = pipeline("export", str(tmp_path), "--to", "torch.export")
    assert result.code == 4
    assert "holds no checkpoint" in result.error
