"""A moving average of the weights is what is judged, digested and served; a resumption does not
disturb it. Batch norm's running statistics are, where that is asked for, the mean over the
processes.
"""

from pathlib import Path

import pytest
import torch
from harness import SMALL, Job, assert_resumes, free_port, pipeline
from torch import nn

from pipeline.group import ProcessGroup
from pipeline.model.ema import make_ema, update_ema
from pipeline.record.checkpoint import decode, read_verified, weights_digest
from pipeline.world import World


def test_it_moves_by_its_rate_and_faster_at_first() -> None:
    model = nn.BatchNorm1d(3)
    average = make_ema(model)
    expected = [tensor.double() for tensor in average.state_dict().values()]
    for step in range(1, 101):
        for tensor in model.state_dict().values():
            tensor.add_(1)
        update_ema(average, model, step, 0.9)
        rate = 1 - min(0.9, (1 + step) / (10 + step))
        expected = [
            mine + rate * (their - mine) for mine, their in zip(expected, model.state_dict().values(), strict=True)
        ]
    for mine, wanted in zip(average.state_dict().values(), expected, strict=True):
        if mine.is_floating_point():
            torch.testing.assert_close(mine.double(), wanted, rtol=1e-5, atol=0)
        else:
            assert mine == 100, "what counts is taken over"


@pytest.mark.long
def test_it_is_what_is_judged_and_it_resumes_to_the_bit(tmp_path: Path, digits: Path) -> None:
    words = ["digits", f"data.root={digits}", *SMALL, "train.epochs=1", "train.ema=0.8", "data.workers=0"]
    whole = assert_resumes(tmp_path, words, 13)
    contents = decode(read_verified(whole.checkpoints()[-1]), whole.folder)
    done = pipeline("evaluate", str(whole.folder)).done
    assert f"weights=sha256:{done['weights']}" in whole.folder.with_suffix(".out").read_text()
    assert done["weights"] == weights_digest(contents["average"]) != weights_digest(contents["model"])


def test_a_model_without_statistics_has_nothing_to_average() -> None:
    group = ProcessGroup(World(init_method=f"tcp://127.0.0.1:{free_port()}"), torch.device("cpu"), 30)
    try:
        group.all_reduce_mean([])
    finally:
        group.shutdown()


@pytest.mark.full
def test_averaged_statistics_are_those_of_the_whole_batch(tmp_path: Path, digits: Path) -> None:
    words = ["digits", f"data.root={digits}", *SMALL, "train.max_steps=2", "data.workers=0", "run.deterministic=false",
             "train.ema=0.5", "checkpoint.every=1 steps"]  # fmt: skip
    runs = {
        name: Job(tmp_path / name, [*words, f"model.batchnorm={kind}"], nproc=nproc)
        for name, nproc, kind in (("whole", 1, "local"), ("average", 2, "average"), ("local", 2, "local"))
    }
    means = {}
    for name, run in runs.items():
        assert run.run().code == 0
        path = run.checkpoints()[0]  # of step 1, which no evaluation came before
        contents = decode(read_verified(path), path)
        for part in ("model", "average"):
            weights = contents[part]
            # of the first layer: no other came before it
            means[name, part] = next(tensor for key, tensor in weights.items() if key.endswith("running_mean"))
    for part in ("model", "average"):
        torch.testing.assert_close(means["average", part], means["whole", part], rtol=0, atol=1e-6)
        assert (means["local", part] - means["whole", part]).abs().max() > 1e-4
