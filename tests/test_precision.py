"""fp16: the loss is scaled, an overflow is skipped by all together, and a resumption has the scale too."""

from pathlib import Path

import pytest
import torch
from harness import SMALL, assert_resumes, pipeline

from pipeline.record.checkpoint import decode, read_verified


@pytest.mark.full
def test_fp16_skips_overflows_together_and_resumes_to_the_bit(tmp_path: Path) -> None:
    words = ["digits", *SMALL, "data.source=synthetic", "data.num_images=480", "data.workers=0", "train.precision=fp16",
             "train.clip=1", "train.epochs=1", "run.watch=1 steps"]  # fmt: skip
    whole = assert_resumes(tmp_path, words, 5)
    contents = decode(read_verified(whole.checkpoints()[-1]), whole.folder)
    assert 0 < contents["scaler"]["scale"] < 2.0**16, "it has overflowed, and was lowered for it"
    assert all(bool(torch.isfinite(one).all()) for one in contents["model"].values() if one.is_floating_point())


def test_what_exact_mode_cannot_keep_is_refused_by_name(tmp_path: Path) -> None:
    for word in ("train.precision=fp16", "model.batchnorm=sync", "model.batchnorm=average"):
        result = pipeline("train", "digits", "run.exact=true", word, f"run.dir={tmp_path / 'run'}")
        assert result.code == 2
        assert word in result.error
