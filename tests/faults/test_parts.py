"""Faults with fsdp and stages, where no process has the full model.

They are injected in a validation, in a save and in the first step after a resume: the ranks are
frozen first, and the fault is injected once the run's files say that they are there.
"""

import random
import signal
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from harness import SMALL, Job, assert_same, kill, read_rows

from faults.ledger import Notes
from pipeline.supervision import process_stat

EVERY = 6  # steps between evaluations, which take long here: 45 batches
MAX_TRIES = 8
PHASES = ("validation", "save", "first step")
INSTANTS = list(product(PHASES, (signal.SIGKILL, signal.SIGTERM)))
QUICK = [
    ("validation", signal.SIGTERM)
]  # the next start begins with that validation, before any training step


def job(folder: Path, digits: Path, parallel: str) -> Job:
    words = ["digits", f"data.root={digits}", *SMALL, f"parallel={parallel}", "train.max_steps=36",
             "data.workers=0", f"evaluate.every={EVERY} steps", "evaluate.batch=8",
             "checkpoint.every=4 steps"]  # fmt: skip
    return Job(folder, words, nproc=2)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Callable[[str], Job]:
    """Return a function that makes a run without faults, once for each value of `parallel`."""
    runs: dict[str, Job] = {}

    def run_once(parallel: str) -> Job:
        if parallel not in runs:
            runs[parallel] = job(tmp_path_factory.mktemp(parallel) / "run", digits, parallel)
            assert runs[parallel].run_in_forks().code == 0, runs[parallel].log()
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
    order = draw.sample(instants, len(instants))
    order.sort(key=lambda instant: instant[0] == "first step")  # the first start is no resume
    for phase, number in order:
        ranks = _freeze_inside(phase, run, draw)
        victims = [draw.choice(ranks)] if number == signal.SIGTERM or draw.random() < 0.5 else ranks
        start = time.monotonic()
        for pid in victims:
            kill(pid, number)
        for pid in ranks:
            kill(pid, signal.SIGCONT)
        code = run.wait(60).code
        assert code == (75 if number == signal.SIGTERM else 1), (phase, number, run.log())
        notes.note("J2", seconds=time.monotonic() - start)
        run.wait_gone(5)
        run.start()
    result = run.wait()
    assert result.code == 0, result.err
    assert_same(run, uninterrupted(parallel))


def _freeze_inside(phase: str, run: Job, draw: random.Random) -> list[int]:
    """Freeze the ranks inside the phase, at a random instant of it; return them."""
    for _ in range(MAX_TRIES):
        _wait_for(phase, run, draw)
        ranks = run.ranks()
        for pid in ranks:
            kill(pid, signal.SIGSTOP)
            while process_stat(pid)[0] != "T":
                time.sleep(0.001)
        if _is_inside(phase, run):
            return ranks
        for pid in ranks:
            kill(pid, signal.SIGCONT)
        if phase == "first step":  # each start has only one
            run.wait_for_step(run.starts()[-1]["step"] + 4)  # and another save
            run.clean()
            run.wait_gone(5)
            run.start()
    raise AssertionError(f"the {phase} was missed {MAX_TRIES} times")


def _wait_for(phase: str, run: Job, draw: random.Random) -> None:
    """Wait until this start of the run is probably in the phase."""
    run.wait_for_start()
    start = run.starts()[-1]["step"]
    match phase:
        case "validation":
            run.wait_for_step((max(start, run.step()) // EVERY + 1) * EVERY)
            time.sleep(draw.uniform(0, 0.2))
        case "save":
            run.wait_until(run.is_saving, "save", pause=0.0005)
            time.sleep(draw.uniform(0, 0.01))
        case "first step":
            run.wait_until(lambda: _owes_no_validation(run) or run.step() > start, "validation")
            time.sleep(draw.uniform(0, 0.1))


def _is_inside(phase: str, run: Job) -> bool:
    start, step = run.starts()[-1]["step"], run.step()
    match phase:
        case "validation":
            return step > start and step % EVERY == 0 and step not in _evaluated(run)
        case "save":
            return run.is_saving()
        case _:
            return step == start > 0 and _owes_no_validation(run)


def _owes_no_validation(run: Job) -> bool:
    """Return True if the start's step was evaluated, or was not due: training comes next."""
    start: int = run.starts()[-1]["step"]
    return start % EVERY != 0 or start in _evaluated(run)


def _evaluated(run: Job) -> set[int]:
    """Return the steps that were evaluated since the last start."""
    steps: set[int] = set()
    for row in read_rows(run.folder / "journal.jsonl"):
        if row.get("event") == "started":
            steps.clear()
        elif row.get("event") == "evaluated":
            steps.add(row["step"])
    return steps
