"""With fp16 the loss is scaled, all ranks skip an overflow, and a resume restores the scale."""

from pathlib import Path

import torch
from harness import SMALL, assert_resumes

from pipeline.record.checkpoint import decode
from pipeline.record.checkpoint_files import read_verified


def test_fp16_skips_overflows_on_all_ranks_and_resumes_bit_identically(tmp_path: Path) -> None:
    words = ["digits", *SMALL, "data.source=synthetic", "data.num_images=480", "data.workers=0",
             "train.precision=fp16", "train.clip=1", "train.epochs=1", "run.watch=1 steps"]  # fmt: skip
    uninterrupted = assert_resumes(tmp_path, words, 5)
    contents = decode(read_verified(uninterrupted.checkpoints()[-1]), uninterrupted.folder)
    assert 0 < contents["scaler"]["scale"] < 2.0**16, "an overflow has lowered the scale"
    weights = [tensor for tensor in contents["model"].values() if tensor.is_floating_point()]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights)
