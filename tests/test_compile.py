"""What is compiled resumes to the bit; where it cannot be compiled, that is said before anything starts."""

from pathlib import Path

import pytest
from harness import SMALL, assert_resumes, pipeline

from pipeline.world import lacks_to_compile

SMALLER = [*SMALL, "model.arch=squeezenet1_1", "augment.size=48", "optimizer.lr=0.01", "data.workers=0"]


@pytest.mark.full
@pytest.mark.skipif(bool(lacks_to_compile()), reason=f"torch.compile wants {lacks_to_compile()}")
def test_a_compiled_run_resumes_to_the_bit(tmp_path: Path, digits: Path) -> None:
    words = ["digits", f"data.root={digits}", *SMALLER]
    whole = assert_resumes(tmp_path, [*words, "train.epochs=1", "train.compile=on"], 5, nproc=1)
    assert "compiled       yes: train.compile=on" in whole.log()


@pytest.mark.full
def test_without_a_compiler_it_is_refused_before_anything_starts(tmp_path: Path) -> None:
    words = ("digits", f"run.dir={tmp_path / 'run'}", "train.compile=on", f"data.root={tmp_path / 'digits'}")
    result = pipeline("train", *words, PATH=str(tmp_path), CXX="", CC="")
    assert result.code == 2
    assert result.error.startswith("train.compile=on: torch.compile wants a compiler (g")
    assert not (tmp_path / "run" / "checkpoints").exists()
