"""Faults with fsdp and stages, where no process has the full model.

They are injected in a validation, in a save and in the first step after a resume.
"""

import random
import signal
from itertools import product
from pathlib import Path

import pytest
from harness import SMALL, Job, assert_same, before_each

from faults.ledger import Notes

PHASES = {"validation": "evaluate", "save": "save", "first step": "update_once"}
"""Each phase -> its function of the loop."""
INSTANTS = list(product(PHASES, (signal.SIGKILL, signal.SIGTERM)))
# the next start begins with that validation, before any training step
QUICK = [("validation", signal.SIGTERM)]


def job(folder: Path, digits: Path, parallel: str, steps: int) -> Job:
    # 45 batches are evaluated, which takes long
    words = ["digits", f"data.root={digits}", *SMALL, f"parallel={parallel}", f"train.max_steps={steps}",
             "data.workers=0", "evaluate.every=6 steps", "evaluate.batch=8",
             "checkpoint.every=4 steps"]  # fmt: skip
    return Job(folder, words, nproc=2)


@pytest.mark.fault("J2", ci=1, long=20)
@pytest.mark.parametrize("parallel", ["fsdp", pytest.param("stages", marks=pytest.mark.full)])
def test_a_sharded_model_ends_with_the_same_bits_after_each_fault(
    tmp_path: Path, digits: Path, parallel: str, seed: int, full: bool, notes: Notes
) -> None:
    steps = 36 if full else 12
    undisturbed = job(tmp_path / "undisturbed", digits, parallel, steps).finished()
    draw = random.Random(f"{parallel} {seed}")
    instants = INSTANTS if full else QUICK
    order = draw.sample(instants, len(instants))
    order.sort(key=lambda instant: instant[0] == "first step")  # the first start is no resume
    run = job(tmp_path / "run", digits, parallel, steps)
    for phase, number in order:
        is_for_all = number == signal.SIGKILL and draw.random() < 0.5
        ranks = "01" if is_for_all else draw.choice("01")
        timer = f"threading.Timer({draw.uniform(0, 0.1)}, os.kill, (os.getpid(), {number:d}))"
        fault = f"if os.environ['RANK'] in {ranks!r}: {timer}.start()"
        run.prelude = before_each(f"pipeline.train.loop.{PHASES[phase]}", fault)
        result = run.start().wait()
        assert result.code == (75 if number == signal.SIGTERM else 1), (phase, number, result.err)
        run.wait_gone(5)
        notes.note("J2")
    run.prelude = ""
    assert run.start().wait().code == 0, run.log()
    assert_same(run, undisturbed)
