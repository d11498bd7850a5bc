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


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Run all cases in one process, which has the library loaded before torch."""
    library = fake_cuda.build_library(tmp_path_factory.mktemp("library"))
    env = {**os.environ, "LD_PRELOAD": str(library), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(Path(__file__).with_name("dry_run.py"))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [Result(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
    return {result.name: result for result in found}


@pytest.mark.parametrize("name", CASES)
def test_an_update_waits_only_for_the_loss_of_the_one_before(results: dict[str, Result], name: str) -> None:
    assert results[name].error == ""
    assert results[name].updates == ["DeviceLossGuard._was_bad"] * UPDATES
    assert results[name].evaluation == ["Group.all_reduce"], "once at the end"
