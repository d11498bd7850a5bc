"""Each kind of work of a portable run has the same bits on every model of CPU; others are named."""

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, SMALL, Job, Result, environment, quick, ranks_of, run_together
from kinds import KINDS, constants, software, this_machine

from pipeline.addons.run import portable
from pipeline.addons.run.portable import VARIABLES, portability
from pipeline.config.load import from_yaml, load
from pipeline.world import World


def train_command(folder: Path, digits: Path) -> list[str]:
    words = ["train", "digits", f"data.root={digits}", f"run.dir={folder}", *SMALL, "train.max_steps=4"]
    return [sys.executable, "-m", "pipeline", *words, "data.workers=0"]


def plan(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "plan.json").read_text())


def test_a_command_sets_what_it_needs_on_any_number_of_cores(tmp_path: Path, digits: Path) -> None:
    here, outputs = environment(), []
    for name in (*VARIABLES, "OMP_NUM_THREADS"):
        here.pop(name, None)
    for name, env in (("here", here), ("set", here | VARIABLES | {"OMP_NUM_THREADS": "8"})):
        command = train_command(tmp_path / name, digits)
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert plan(tmp_path / "here")["is_portable"]
    receipt = json.loads((tmp_path / "here" / "receipt.json").read_text())
    assert receipt["starts"][0]["portable"] == "yes"
    weights = quick("evaluate", str(tmp_path / "here")).done["weights"]
    assert f"weights=sha256:{weights}" in outputs[0]


def two_ranks(folder: Path, digits: Path, word: str = "run.seed=0", **env: str) -> Result:
    """Train with two ranks; rank 1 has another word in its command, or another variable."""
    command = train_command(folder, digits)
    first, second = ranks_of(Job(folder, [], nproc=2))
    return run_together([command, [*command, word]], [first, second | env])


def test_a_run_is_portable_only_if_it_is_on_every_rank(tmp_path: Path, digits: Path) -> None:
    assert two_ranks(tmp_path / "run", digits, ONEDNN_MAX_CPU_ISA="SSE41").code == 0
    reason = plan(tmp_path / "run")["portable_reason"]
    assert reason.startswith("on rank 1: ")
    assert "ONEDNN_MAX_CPU_ISA=SSE41" in reason
    result = two_ranks(tmp_path / "other", digits, "run.portable=false").ended_with(2)
    assert "rank 1 was started with another configuration than rank 0" in result.err


@pytest.mark.parametrize(("words", "gpu", "expected", "named"), [
    ("run.portable=auto run.exact=true", False, True, "any x86-64 CPU"),
    ("run.portable=false run.deterministic=true", False, False, "run.portable=false"),
    ("model.batchnorm=average", False, False, "model.batchnorm=average"),
    ("model.arch=mine:net", False, True, "if mine:net"),
    ("run.threads=2", False, False, "run.threads=2"),
    ("train.compile=on", False, False, "train.compile=on"),
    ("train.precision=bf16", False, False, "train.precision=bf16"),
    ("train.precision=bf16", True, True, "initial weights and pixels"),
])  # fmt: skip
def test_the_plan_says_what_is_portable(words: str, gpu: bool, expected: bool, named: str) -> None:
    is_portable, reason = portability(load("digits", words.split()), World(has_gpu=gpu))
    assert (is_portable, named in reason) == (expected, True), reason


def test_a_cpu_without_avx2_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "_cpu_flags", lambda: {"fma"})
    assert portability(load("digits", []), World()) == (False, "this CPU is not an x86-64 with AVX2")


def test_a_run_of_0_2_stays_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("recipe: digits\ndata: {source: digits}\n")
    words = [f"run.dir={tmp_path}"]
    assert load("digits", words).run.portable is False
    assert not load("digits", words).is_deterministic
    assert load("digits", [*words, "run.portable=true"]).run.portable is True, "which the resumption refuses"
    assert from_yaml("recipe: digits\ndata: {source: digits}", "a checkpoint").run.portable is False


ROOTS = """
import numpy as np, torch
from pipeline.addons.run.portable import use_exact_roots
use_exact_roots()
values = torch.rand(100_003)
exact = torch.from_numpy(np.sqrt(values.numpy()))
out = torch.empty(0)
torch.sqrt(values, out=out)
found = [values.sqrt(), values.clone().sqrt_(), out, torch._foreach_sqrt([values])[0]]
leaf = values[:100].double().requires_grad_()
assert torch.autograd.gradcheck(torch.sqrt, leaf + 0.1)
assert torch.tensor([4, 9]).sqrt().tolist() == [2, 3] and torch.tensor(4.0).sqrt().item() == 2
assert torch.tensor([-1.0]).sqrt().isnan().all()
assert torch.rand(3, 4).t().sqrt().stride() == (1, 4)
half = values.bfloat16()
assert torch.equal(half.sqrt(), half.float().sqrt().bfloat16())
print(all(torch.equal(roots, exact) for roots in found))
"""


def test_square_roots_are_the_ieee_ones() -> None:
    command = [sys.executable, "-W", "error", "-c", ROOTS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True\n", "")


PAGE = ROOT / "docs/receipts/kinds.md"
needs_qemu = pytest.mark.skipif(not shutil.which("qemu-x86_64"), reason="needs qemu (Debian: qemu-user)")


@pytest.mark.parametrize(
    "options",
    ["", pytest.param("--cpu Haswell --quick", marks=[needs_qemu, pytest.mark.full]),
     *(pytest.param(f"--cpu {model}", marks=[needs_qemu, pytest.mark.long])
       for model in ("Haswell", "EPYC-Rome", "Skylake-Client-noTSX-IBRS"))],
)  # fmt: skip
def test_every_kind_has_the_bits_of_the_page_on_this_machine_and_on_emulated_ones(options: str) -> None:
    assert constants(PAGE).keys() == KINDS.keys()
    command = [sys.executable, "tests/kinds.py", "--check", "docs/receipts/kinds.md", *options.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1800)
    if done.returncode == 1 and software() not in PAGE.read_text():
        pytest.skip(f"here are other versions than the page's: {software()}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    if not options and this_machine() not in PAGE.read_text():
        warnings.warn(f"add to the machines of {PAGE}: {this_machine()}", stacklevel=1)
