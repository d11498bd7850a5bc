"""A rank whose weights diverge is found before the next save, and a slow rank is named."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from fake_cuda import GLOO_FOR_NCCL
from harness import MakeJob, assert_same, before_each, free_port, in_ranks

from pipeline.group import Group, is_peer_failure
from pipeline.world import World

SHORT = ("data.workers=0", "train.max_steps=24", "checkpoint.every=4 steps", "evaluate.every=24 steps")
OFTEN = ("at step 12 rank 1 on ", "than 2 of 3 processes, first in blocks.0.0.conv.weight (equal at step 9)")
TWO = ("at step 10 rank 1 on ", "held other weights than rank 0 (either may be right)")
SAVE = ("at step 12 rank 2 on ",)


@pytest.mark.parametrize(
    ("nproc", "rank", "words", "says"),
    [(3, 1, ("run.watch=3 steps",), OFTEN),
     pytest.param(2, 0, ("run.watch=5 steps",), TWO, marks=pytest.mark.full),
     pytest.param(3, 2, ("run.watch=1000 steps",), SAVE, marks=pytest.mark.full),
     pytest.param(3, 2, ("run.watch=1000 steps", "run.exact=true"), SAVE, marks=pytest.mark.long)],
    ids=["often", "two ranks", "before a save", "exact"],
)  # fmt: skip
def test_a_flipped_bit_ends_the_run_and_names_its_rank_before_the_next_save(
    job: MakeJob, nproc: int, rank: int, words: tuple[str, ...], says: tuple[str, ...]
) -> None:
    lowest_bit = "words[0].param_groups[0]['params'][1].data.view(torch.int32).view(-1)[3]"
    flip = f"if (os.environ['RANK'], calls) == ('{rank}', 10): {lowest_bit} ^= 1"
    run = job(*SHORT, *words, nproc=nproc)
    run.prelude = before_each("torch.optim.SGD.step", "import torch", flip)
    result = run.run(code=1)
    assert "Traceback" not in result.err
    last = result.err.splitlines()[-1]
    assert all(part in last for part in says), last
    assert [path.name[:13] for path in run.checkpoints()] == ["step-00000004", "step-00000008"]


def test_a_slow_rank_is_named_once(job: MakeJob) -> None:
    run = job(*SHORT, "train.max_steps=6", "track.every=2 steps", nproc=2)
    slow = "time.sleep(0.3 * int(os.environ['RANK']))"
    run.prelude = before_each("torch.nn.functional.cross_entropy", slow)
    result = run.run(code=0)
    assert result.err.count(" is slow: ") == result.err.count("rank 1 is slow") == 1, result.err
    slowest = [value for _, key, value in run.journal("time/") if key == "time/slowest_rank"]
    assert slowest == [1.0] * 3


GPU_GUARD = """\
from pipeline.guards import nonfinite
from pipeline.train import session
session.make_loss_guard = nonfinite.DeviceLossGuard
"""
"""The ranks agree as on GPUs."""


def _ask(rank: int, address: str) -> None:
    """Rank 1 answers once rank 0 has asked, and dies."""
    group = Group(World(2, 2, rank, rank, init_method=address), torch.device("cpu"), 60)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["asked"])
        os._exit(0 if group.ask_ranks(False)() == (True,) else 9)
    answer = group.ask_ranks(True)
    store.set("asked", "")
    assert answer() == (True,)
    with pytest.raises(RuntimeError) as failure:
        group.ask_ranks(False)()
    os._exit(0 if is_peer_failure(failure.value) else 9)


def test_a_rank_that_asks_the_others_goes_on_and_learns_of_a_death_at_once() -> None:
    assert in_ranks(_ask, 2) == [0, 0]


def test_gpus_agree_on_a_stop_a_step_later(job: MakeJob) -> None:
    run = job(*SHORT, nproc=2)
    stop = "if (os.environ['RANK'], calls) == ('1', 10): os.kill(os.getpid(), signal.SIGTERM)"
    run.prelude = GPU_GUARD + before_each("torch.nn.functional.cross_entropy", stop)
    stopped = run.run()
    assert (stopped.code, "step 10 is saved" in stopped.error) == (75, True), stopped.err
    run.prelude = GPU_GUARD
    assert run.run().code == 0
    assert_same(run, job(*SHORT, nproc=2).finished())


def _join(rank: int, address: str) -> None:
    """Join a group of two whose collectives may take 2 s, rank 0 after 4 s."""
    time.sleep(4 * (rank == 0))
    group = Group(World(2, 2, rank, rank, init_method=address), torch.device("cpu"), 2, restore_s=100)
    if rank == 0:
        time.sleep(6)
        os._exit(0)
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        group.any_rank(False)
    os._exit(0 if time.monotonic() - start < 5 else 9)


def test_rank_0_may_join_later_than_a_collective_may_take() -> None:
    """It may have to download the run from its mirror."""
    assert in_ranks(_join, 2) == [0, 0]


def test_a_path_that_names_gloo_is_not_the_failure_of_another_rank() -> None:
    for error, is_peers in (
        (RuntimeError("[/build/gloo/transport/tcp/pair.cc:545] Read error"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (dist.DistNetworkError("connection lost"), True),
        (RuntimeError("PytorchStreamReader failed reading /data/gloo/weights.pt"), False),
        (FileNotFoundError(2, "No such file or directory", "/data/gloo/a.jpg"), False),
    ):
        assert is_peer_failure(error) == is_peers, error


def test_nccl_waits_longer_than_the_watchdog_and_gloo_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def timeouts() -> list[float]:
        backends = [dist.group.WORLD._get_backend(torch.device(name)) for name in ("cpu", "cuda")]
        return [backend.options._timeout.total_seconds() for backend in backends]

    monkeypatch.setitem(dist.Backend._plugins, "NCCL", GLOO_FOR_NCCL)
    group = Group(World(init_method=f"tcp://127.0.0.1:{free_port()}"), torch.device("cuda"), 300)
    try:
        group.set_device_timeout(2000)
        assert timeouts() == [300, 2000]
        with group.extended_timeout(1800):
            assert timeouts() == [2100, 2000]
        assert timeouts() == [300, 2000]
        assert group.device_timeout == timedelta(seconds=2000), "for subgroups"
    finally:
        dist.destroy_process_group()
