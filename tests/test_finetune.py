"""First weights from elsewhere: what fits is taken over, the head is new, and what fits nowhere is refused."""

from pathlib import Path

import pytest
import torch
from harness import SMALL, Job, pipeline

from pipeline.record.checkpoint import decode, read_verified


@pytest.mark.full
def test_a_run_begins_with_the_weights_of_another(tmp_path: Path, digits: Path) -> None:
    words = ["digits", f"data.root={digits}", *SMALL, "data.workers=0", "train.max_steps=4"]
    first = Job(tmp_path / "first", words)
    assert first.run().code == 0
    patterns = [*SMALL, "data.source=synthetic", "data.num_classes=7", "data.num_images=96", "data.workers=0"]
    still = ["train.max_steps=1", "optimizer.lr=1e-12", "optimizer.weight_decay=0", "schedule.warmup=0"]
    second = Job(tmp_path / "second", ["digits", *patterns, *still, f"model.init={first.folder}"], nproc=2)
    result = second.run()
    assert result.code == 0, result.err
    assert f"first weights from {first.folder}; fc.weight, fc.bias anew" in result.err
    before, after = (decode(read_verified(run.checkpoints()[-1]), run.folder)["model"] for run in (first, second))
    assert after["fc.weight"].shape[0] == 7
    weights = [name for name in before if not name.startswith("fc.") and "running" not in name and "num_" not in name]
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in weights)


def test_what_fits_nowhere_is_refused_in_one_line(tmp_path: Path, digits: Path) -> None:
    words = ["digits", f"data.root={digits}", *SMALL, "data.workers=0", "train.max_steps=1"]
    result = pipeline("train", *words, "model.init=IMAGENET1K_V9", f"run.dir={tmp_path / 'run'}")
    assert result.code == 2
    assert "did you mean IMAGENET1K_V1?" in result.error
