"""A rank whose weights diverge is found before the next save, and a slow rank is named."""

import os
import time
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_cuda import GLOO_FOR_NCCL
from harness import SMALL, Job, Result, before_each, free_port

from pipeline.group import Group, is_peer_failure
from pipeline.world import World


def job(folder: Path, digits: Path, nproc: int, *more: str) -> Job:
    words = ["digits", f"data.root={digits}", *SMALL, "data.workers=0", "train.max_steps=24",
             "checkpoint.every=4 steps", "evaluate.every=24 steps"]  # fmt: skip
    return Job(folder, [*words, *more], nproc=nproc)


FLIP = """
import os, torch
original, calls = torch.optim.SGD.step, []

def flipping(self, *arguments, **options):
    result = original(self, *arguments, **options)
    calls.append(1)
    if (os.environ["RANK"], len(calls)) == ("{rank}", 10):  # the lowest bit of one weight
        self.param_groups[0]["params"][1].data.view(torch.int32).view(-1)[3] ^= 1
    return result

torch.optim.SGD.step = flipping
"""


def diverged(tmp_path: Path, digits: Path, nproc: int, rank: int, *more: str) -> tuple[Job, Result]:
    """Run a job in which `rank` has a flipped bit after step 10."""
    run = job(tmp_path / "run", digits, nproc, *more)
    run.prelude = FLIP.format(rank=rank)
    return run, run.run()


def test_a_flipped_bit_ends_the_run_and_names_its_rank_before_the_next_save(
    tmp_path: Path, digits: Path, full: bool
) -> None:
    run, result = diverged(tmp_path, digits, 3, 1, "run.watch=3 steps")
    assert result.code == 1, result.err
    last = result.err.splitlines()[-1]
    assert "at step 12 rank 1 on " in last
    assert "than 2 of 3 processes, first in stage2.0.branch1.0.weight (equal at step 9)" in last
    assert [path.name[:13] for path in run.checkpoints()] == ["step-00000004", "step-00000008"]
    assert "Traceback" not in result.err
    if full:
        run.prelude = ""
        assert run.run().done == job(tmp_path / "uninterrupted", digits, 3).run_in_forks().done, (
            "the same command resumes"
        )


@pytest.mark.full
def test_of_two_different_ranks_the_error_calls_neither_right(tmp_path: Path, digits: Path) -> None:
    _, result = diverged(tmp_path, digits, 2, 0, "run.watch=5 steps")
    last = result.err.splitlines()[-1]
    assert "at step 10 rank 1 on " in last
    assert "held other weights than rank 0 (either may be right)" in last


@pytest.mark.full
@pytest.mark.parametrize("exact", ["false", pytest.param("true", marks=pytest.mark.long)])
def test_weights_are_compared_before_every_save(tmp_path: Path, digits: Path, exact: str) -> None:
    run, result = diverged(tmp_path, digits, 3, 2, f"run.exact={exact}", "run.watch=1000 steps")
    assert "at step 12 rank 2 on " in result.err.splitlines()[-1]
    assert [path.name[:13] for path in run.checkpoints()] == ["step-00000004", "step-00000008"]


def test_a_slow_rank_is_named_once(tmp_path: Path, digits: Path) -> None:
    run = job(tmp_path / "run", digits, 2, "train.max_steps=6", "track.every=2 steps")
    slow = "time.sleep(0.3 * int(os.environ['RANK']))"
    run.prelude = before_each("torch.nn.functional.cross_entropy", slow)
    result = run.run()
    assert result.code == 0, result.err
    assert result.err.count(" is slow: ") == result.err.count("rank 1 is slow") == 1, result.err
    slowest = [value for _, key, value in run.journal("time/") if key == "time/slowest_rank"]
    assert slowest == [1.0] * 3


def join(rank: int, place: str, answers: Any) -> None:
    """Join a group of two whose collectives may take 2 s, rank 0 after 4 s."""
    time.sleep(4 * (rank == 0))
    world = World(rank=rank, size=2, local_rank=rank, local_size=2, init_method=place)
    group = Group(world, torch.device("cpu"), 2, restore_s=100)
    answers.put("joined")
    if rank == 0:
        time.sleep(60)
    with pytest.raises(RuntimeError):
        group.any_rank(False)
    answers.put("the collective timed out")
    os._exit(0)


def test_rank_0_may_join_later_than_a_collective_may_take() -> None:
    """It may have to download the run from its mirror."""
    forks, place, found = get_context("fork"), f"tcp://127.0.0.1:{free_port()}", []
    answers = forks.SimpleQueue()
    late, early = (forks.Process(target=join, args=(rank, place, answers)) for rank in (0, 1))
    late.start()
    early.start()
    early.join(60)
    late.kill()
    while not answers.empty():
        found.append(answers.get())
    assert found == ["joined", "joined", "the collective timed out"]


def test_a_path_that_names_gloo_is_not_the_failure_of_another_rank() -> None:
    for line in (
        "[/build/gloo/transport/tcp/pair.cc:545] Read error",
        "Application timeout caused pair closure",
    ):
        assert is_peer_failure(RuntimeError(line))
    assert is_peer_failure(dist.DistNetworkError("connection lost"))
    assert not is_peer_failure(RuntimeError("PytorchStreamReader failed reading /data/gloo/weights.pt"))
    assert not is_peer_failure(FileNotFoundError(2, "No such file or directory", "/data/gloo/a.jpg"))


def test_nccl_waits_longer_than_the_watchdog_and_gloo_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def timeouts() -> list[float]:
        assert dist.group.WORLD
        backends = [dist.group.WORLD._get_backend(torch.device(name)) for name in ("cpu", "cuda")]
        return [backend.options._timeout.total_seconds() for backend in backends]

    monkeypatch.setitem(dist.Backend._plugins, "NCCL", GLOO_FOR_NCCL)
    world = World(init_method=f"tcp://127.0.0.1:{free_port()}")
    group = Group(world, torch.device("cuda"), 300)
    try:
        group.set_device_timeout(2000)
        assert timeouts() == [300, 2000]
        with group.extended_timeout(1800):
            assert timeouts() == [2100, 2000]
        assert timeouts() == [300, 2000]
        assert group.device_timeout == timedelta(seconds=2000), "for subgroups"
    finally:
        dist.destroy_process_group()
