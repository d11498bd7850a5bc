"""Faults with fsdp and stages, where no process has the full model.

They are injected in a validation, in a save and in the first step after a start.
"""

import random
import signal
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from harness import SMALL, Job, assert_each_sample_once, kill

from faults.ledger import Notes

EVERY = 6  # steps between evaluations, which take long here: 45 batches
PHASES = ("validation", "save", "first step")
INSTANTS = list(product(PHASES, (signal.SIGKILL, signal.SIGTERM)))
QUICK = [("validation", signal.SIGTERM)]  # the next start begins with that validation, before any training step


def job(folder: Path, digits: Path, parallel: str) -> Job:
    words = ["digits", f"data.root={digits}", *SMALL, f"parallel={parallel}", "train.max_steps=24", "data.workers=0",
             f"evaluate.every={EVERY} steps", "evaluate.batch=8", "checkpoint.every=4 steps"]  # fmt: skip
    return Job(folder, words, nproc=2)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Callable[[str], Job]:
    """Return a function that makes a run without faults, once for each value of `parallel`."""
    runs: dict[str, Job] = {}

    def run_once(parallel: str) -> Job:
        if parallel not in runs:
            runs[parallel] = job(tmp_path_factory.mktemp(parallel) / "run", digits, parallel)
            assert runs[parallel].run().code == 0, runs[parallel].log()
        return runs[parallel]

    return run_once


@pytest.mark.fault("J2", ci=1, long=20)
@pytest.mark.parametrize("parallel", ["fsdp", pytest.param("stages", marks=pytest.mark.full)])
def test_a_sharded_model_ends_with_the_same_bits_after_each_fault(
    tmp_path: Path,
    digits: Path,
    uninterrupted: Callable[[str], Job],
    parallel: str,
    seed: int,
    full: bool,
    notes: Notes,
) -> None:
    draw = random.Random(f"{parallel} {seed}")
    instants = INSTANTS if full else QUICK
    run = job(tmp_path / "run", digits, parallel).start()
    for phase, number in draw.sample(instants, len(instants)):
        _wait_for(phase, run, draw)
        victims = [draw.choice(run.ranks())] if number == signal.SIGTERM or draw.random() < 0.5 else run.ranks()
        start = time.monotonic()
        for pid in victims:
            kill(pid, number)
        code = run.wait(60).code
        assert code == (75 if number == signal.SIGTERM else 1), (phase, number, run.log())
        notes.note("J2", seconds=time.monotonic() - start)
        run.wait_gone(5)
        run.start()
    result = run.wait()
    assert result.code == 0, result.err
    expected = uninterrupted(parallel)
    assert result.out == expected.output()
    assert_each_sample_once(run.trace(), 48)
    assert run.trace() == expected.trace()
    assert run.journal("train/", "val/") == expected.journal("train/", "val/")


def _wait_for(phase: str, run: Job, draw: random.Random) -> None:
    """Wait until this start of the run is in the phase."""
    run.wait_for_start()
    match phase:
        case "validation":
            run.wait_for_step((run.starts()[-1]["step"] // EVERY + 1) * EVERY)
            time.sleep(draw.uniform(0.02, 0.2))
        case "save":
            run.wait_until(run.is_saving, "save", pause=0.0005)
            time.sleep(draw.uniform(0, 0.05))
        case "first step":
            time.sleep(draw.uniform(0, 0.5))
