"""Each kind of work of a portable run gives the same bits on this model of CPU and on others."""

import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from kinds_list import KINDS
from kinds_page import Page, software, this_machine
from torch import Tensor

from pipeline import portable

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/portable.md"
MODELS = ("Haswell", "EPYC-Rome", "Skylake-Client-noTSX-IBRS")
needs_qemu = pytest.mark.skipif(
    shutil.which("qemu-x86_64") is None, reason="qemu-x86_64 is not installed (Debian: qemu-user)"
)


def check(*options: str) -> None:
    """Compare digests with the page, in a new interpreter. Other software may have other bits."""
    command = [sys.executable, "tests/kinds.py", "--check", "docs/portable.md", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 1 and software() != Page(PAGE).software:
        pytest.skip(f"the constants are those of {Page(PAGE).software}, here is {software()}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_every_kind_has_the_bits_of_the_page_on_this_machine() -> None:
    assert Page(PAGE).constants.keys() == KINDS.keys(), "python tests/kinds.py --write docs/portable.md --new"
    check()
    if not Page(PAGE).knows(machine := this_machine()):
        warnings.warn(f"new: {machine.name}: python tests/kinds.py --write docs/portable.md adds it", stacklevel=1)


@needs_qemu
@pytest.mark.full
def test_quick_kinds_have_the_same_bits_on_an_emulated_cpu() -> None:
    check("--cpu", MODELS[0], "--quick")


@needs_qemu
@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_all_kinds_have_the_same_bits_on_each_emulated_cpu(model: str) -> None:
    check("--cpu", model)


@pytest.fixture
def _exact_roots() -> Iterator[None]:
    library = portable.use_exact_roots.__wrapped__()
    yield
    library._destroy()


VALUES = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 1e4
IN_PLACE: list[Callable[[Tensor], Tensor]] = [
    torch.sqrt,
    lambda values: values.clone().sqrt_(),
    lambda values: torch.sqrt(values, out=torch.empty_like(values)),
    lambda values: torch._foreach_sqrt([values, values])[1],
    lambda values: values.view(2, -1).t().sqrt().t().reshape(-1),
]


@pytest.mark.usefixtures("_exact_roots")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("root", IN_PLACE, ids=["plain", "in place", "out", "foreach", "transposed"])
def test_a_root_is_that_of_ieee_754(root: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    values = VALUES.to(dtype)
    wide = values if dtype in (torch.float32, torch.float64) else values.float()
    expected = torch.from_numpy(np.sqrt(wide.numpy())).to(dtype)
    assert torch.equal(root(values), expected)


@pytest.mark.usefixtures("_exact_roots")
def test_gradients_pass_through_a_root() -> None:
    values = torch.tensor([4.0, 9.0], requires_grad=True)
    values.sqrt().sum().backward()
    assert torch.equal(values.grad, torch.tensor([0.25, 1 / 6]))
    assert torch.autograd.gradcheck(torch.sqrt, torch.rand(5, dtype=torch.float64, requires_grad=True) + 1)
    assert torch.isnan(torch.tensor(-1.0).sqrt())
    assert torch.equal(torch.tensor([4, 9]).sqrt(), torch.tensor([2.0, 3.0]))
