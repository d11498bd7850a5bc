"""fsdp and stages, hurt where no process has the whole model: in a validation, in a save, in the first step of a start."""

import random
import signal
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from harness import SMALL, Job, assert_each_sample_once, kill, read_rows

from faults.ledger import Notes

EVERY = 6  # steps between evaluations, which are long here: 45 batches
PHASES = ("validation", "save", "first step")
INSTANTS = list(product(PHASES, (signal.SIGKILL, signal.SIGTERM)))
QUICK = [("validation", signal.SIGTERM)]  # the next start begins with that validation, before any training step


def job(folder: Path, digits: Path, parallel: str) -> Job:
    words = ["digits", f"data.root={digits}", *SMALL, f"parallel={parallel}", "train.max_steps=24", "data.workers=0",
             f"evaluate.every={EVERY} steps", "evaluate.batch=8", "checkpoint.every=4 steps"]  # fmt: skip
    return Job(folder, words, nproc=2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Callable[[str], Job]:
    """The run that nobody touches, made once for each way of taking a model apart."""
    made: dict[str, Job] = {}

    def once(parallel: str) -> Job:
        if parallel not in made:
            made[parallel] = job(tmp_path_factory.mktemp(parallel) / "run", digits, parallel)
            assert made[parallel].run().code == 0, made[parallel].log()
        return made[parallel]

    return once


@pytest.mark.fault("J2", ci=1, long=20)
@pytest.mark.parametrize("parallel", ["fsdp", pytest.param("stages", marks=pytest.mark.full)])
def test_a_model_in_parts_that_is_hurt_ends_with_the_same_bits(
    tmp_path: Path, digits: Path, whole: Callable[[str], Job], parallel: str, seed: int, full: bool, notes: Notes
) -> None:
    draw = random.Random(f"{parallel} {seed}")
    instants = INSTANTS if full else QUICK
    run = job(tmp_path / "run", digits, parallel).start()
    for phase, number in draw.sample(instants, len(instants)):
        _wait_for(phase, run, draw)
        victims = [draw.choice(run.ranks())] if number == signal.SIGTERM or draw.random() < 0.5 else run.ranks()
        hurt = time.monotonic()
        for pid in victims:
            kill(pid, number)
        code = run.wait(60).code
        assert code == (75 if number == signal.SIGTERM else 1), (phase, number, run.log())
        notes.note("J2", seconds=time.monotonic() - hurt)
        run.wait_gone(5)
        run.start()
    result = run.wait()
    assert result.code == 0, result.err
    undisturbed = whole(parallel)
    assert result.out == undisturbed.folder.with_suffix(".out").read_text()
    trace = read_rows(run.folder / "trace.jsonl")
    assert_each_sample_once(trace, 48)
    assert trace == read_rows(undisturbed.folder / "trace.jsonl")
    assert run.journal("train/", "val/") == undisturbed.journal("train/", "val/")


def _wait_for(phase: str, run: Job, draw: random.Random) -> None:
    """Until this start of the run is in the midst of it."""
    run.wait_for_start()
    started = [row["step"] for row in read_rows(run.folder / "journal.jsonl") if row.get("event") == "started"][-1]
    match phase:
        case "validation":
            run.wait_for_step((started // EVERY + 1) * EVERY)
            time.sleep(draw.uniform(0.02, 0.2))
        case "save":
            run.wait_until(run.saving, "save", pause=0.0005)
            time.sleep(draw.uniform(0, 0.05))
        case "first step":
            time.sleep(draw.uniform(0, 0.5))
