"""Each kind of work of a portable run gives the same bits on this model of CPU and on others."""

import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from kinds import constants, software, this_machine
from kinds_list import KINDS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/receipts/kinds.md"
MODELS = ("Haswell", "EPYC-Rome", "Skylake-Client-noTSX-IBRS")
needs_qemu = pytest.mark.skipif(
    shutil.which("qemu-x86_64") is None, reason="qemu-x86_64 is not installed (Debian: qemu-user)"
)


def check(*options: str) -> None:
    """Compare digests with the page, in a new interpreter. Other software may have other bits."""
    command = [sys.executable, "tests/kinds.py", "--check", "docs/receipts/kinds.md", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1800)
    if done.returncode == 1 and software() not in PAGE.read_text():
        pytest.skip(f"here are other versions than the page's: {software()}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_every_kind_has_the_bits_of_the_page_on_this_machine() -> None:
    assert constants(PAGE).keys() == KINDS.keys()
    check()
    if this_machine() not in PAGE.read_text():
        warnings.warn(f"add to the machines of {PAGE}: {this_machine()}", stacklevel=1)


@needs_qemu
@pytest.mark.full
def test_quick_kinds_have_the_same_bits_on_an_emulated_cpu() -> None:
    check("--cpu", MODELS[0], "--quick")


@needs_qemu
@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_all_kinds_have_the_same_bits_on_each_emulated_cpu(model: str) -> None:
    check("--cpu", model)
