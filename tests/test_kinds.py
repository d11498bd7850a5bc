"""Each kind of work of a portable run gives the same bits on this model of CPU and on others."""

import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from kinds import KINDS, constants, software, this_machine

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/receipts/kinds.md"
needs_qemu = pytest.mark.skipif(
    shutil.which("qemu-x86_64") is None, reason="qemu-x86_64 is not installed (Debian: qemu-user)"
)


@pytest.mark.parametrize(
    "options",
    [
        "",
        pytest.param("--cpu Haswell --quick", marks=[needs_qemu, pytest.mark.full]),
        *(
            pytest.param(f"--cpu {model}", marks=[needs_qemu, pytest.mark.long])
            for model in ("Haswell", "EPYC-Rome", "Skylake-Client-noTSX-IBRS")
        ),
    ],
)
def test_every_kind_has_the_bits_of_the_page_on_this_machine_and_on_emulated_ones(options: str) -> None:
    assert constants(PAGE).keys() == KINDS.keys()
    command = [sys.executable, "tests/kinds.py", "--check", "docs/receipts/kinds.md", *options.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1800)
    if done.returncode == 1 and software() not in PAGE.read_text():
        pytest.skip(f"here are other versions than the page's: {software()}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    if not options and this_machine() not in PAGE.read_text():
        warnings.warn(f"add to the machines of {PAGE}: {this_machine()}", stacklevel=1)
