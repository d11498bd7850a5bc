"""Each kind of work of a portable run gives the same bits on this model of CPU and on others."""

import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from kinds import differing
from kinds_list import KINDS
from kinds_page import Machine, Page, software, this_machine

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
    if done.returncode == 1 and software() != Page(PAGE).software:
        pytest.skip(f"the constants are those of {Page(PAGE).software}, here is {software()}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_every_kind_has_the_bits_of_the_page_on_this_machine() -> None:
    assert Page(PAGE).constants.keys() == KINDS.keys(), (
        "python tests/kinds.py --write docs/receipts/kinds.md --new"
    )
    check()
    if not Page(PAGE).knows(machine := this_machine()):
        command = "python tests/kinds.py --write docs/receipts/kinds.md"
        warnings.warn(f"new: {machine.name}: {command} adds it", stacklevel=1)


@needs_qemu
@pytest.mark.full
def test_quick_kinds_have_the_same_bits_on_an_emulated_cpu() -> None:
    check("--cpu", MODELS[0], "--quick")


@needs_qemu
@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_all_kinds_have_the_same_bits_on_each_emulated_cpu(model: str) -> None:
    check("--cpu", model)


def test_the_page_names_what_differs_and_takes_each_machine_once(tmp_path: Path) -> None:
    path = tmp_path / "kinds.md"
    shutil.copy(PAGE, path)
    page, found, machine = Page(path), dict(Page(PAGE).constants), Machine("New", "avx2", "1 KiB, 2 KiB")
    assert differing(found | {"SGD": "0" * 16}, page) == ["SGD"]
    page.add(machine)
    assert Page(path).knows(machine)
    page.replace_constants(found | {"SGD": "0" * 16})
    assert Page(path).constants == found | {"SGD": "0" * 16}
    assert not Page(path).knows(machine), "it has not computed the new constants"
