"""Every recipe, precision and strategy trains on a fake CUDA device, one step behind its host."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import fake_cuda
import pytest
from dry_run import CASES, UPDATES, Result

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None, reason="the fake CUDA device needs a C compiler (cc)"
)


QUICK = {
    "recipe digits", "recipe resnet50-90", "precision fp16", "compilation that does not repay", "mixed",
    "frozen", "ddp", "fsdp", "resident", "exact", "muon",
}  # fmt: skip
"""The cases that run without --full: each strategy, and each way in which an update may differ."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, full: bool) -> dict[str, Result]:
    """Run the cases in one process, which has the library loaded before torch."""
    library = fake_cuda.build_library(tmp_path_factory.mktemp("library"))
    env = {**os.environ, "LD_PRELOAD": str(library), "CUDA_VISIBLE_DEVICES": ""}
    names = [name for name in CASES if full or name in QUICK]
    command = [sys.executable, str(Path(__file__).with_name("dry_run.py")), *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [Result(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
    return {result.name: result for result in found}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in CASES]
)
def test_an_update_waits_only_for_the_loss_of_the_one_before(results: dict[str, Result], name: str) -> None:
    assert results[name].error == ""
    assert results[name].updates == ["DeviceLossGuard._was_bad"] * UPDATES
    assert results[name].evaluation == ["Group.all_reduce"], "once at the end"
