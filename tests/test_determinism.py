"""The same seed gives the same weights with any environment and number of workers.

The weights are constants, because they are the same on every x86-64 CPU with AVX2.
"""

from pathlib import Path

import pytest
from harness import SMALL, Job

SHORT = ("train.max_steps=12", "evaluate.every=12 steps", "data.workers=2")
WEIGHTS = {1: "2998ac8f76090e3b", 2: "0a23028d4bc37f41", 3: "8dba439ac8062dc1"}
"""The first 16 digits of the weights, by the number of processes."""


def weights(folder: Path, digits: Path, *more: str, nproc: int = 1, prelude: str = "", **env: str) -> str:
    # This model has dropout in addition to batch norm, which tests the network's own randomness.
    arguments = ["digits", f"data.root={digits}", *SMALL, "model.arch=mobilenet_v3_small", *SHORT, *more]
    job = Job(folder, arguments, nproc=nproc, prelude=prelude, env=env)
    return (job.run() if env else job.run_in_forks()).done["weights"][:16]


@pytest.mark.fault("I3")
@pytest.mark.parametrize("nproc", [2, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 3))])
def test_the_same_command_gives_the_same_weights(tmp_path: Path, digits: Path, nproc: int) -> None:
    assert weights(tmp_path / "run", digits, nproc=nproc) == WEIGHTS[nproc]


@pytest.mark.full
def test_gradients_copied_together_as_on_a_gpu_give_the_same_weights(tmp_path: Path, digits: Path) -> None:
    prelude = (
        "from pipeline.parallel import ddp\n"
        "plain = ddp.DistributedDataParallel\n"
        "options = {ddp._BATCHED_COPY: True} if ddp._BATCHED_COPY in ddp._OPTIONS else {}\n"
        "ddp.DistributedDataParallel = lambda model, **others: plain(model, **others, **options)\n"
    )
    assert weights(tmp_path / "run", digits, nproc=2, prelude=prelude) == WEIGHTS[2]


@pytest.mark.fault("F3")
@pytest.mark.full
def test_threads_workers_prefetch_and_tracing_change_nothing(tmp_path: Path, digits: Path) -> None:
    one, seven = ({"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count} for count in "17")
    assert weights(tmp_path / "0", digits, "data.workers=0", **one) == WEIGHTS[1]
    assert weights(tmp_path / "1", digits, "data.workers=3", "data.prefetch=5", **seven) == WEIGHTS[1]
    assert weights(tmp_path / "2", digits, "run.trace=false", "checkpoint.every=5 steps") == WEIGHTS[1]
