"""The same bits on every x86-64 CPU with AVX2, whatever its model: `run.portable`.

Promise: a portable run on CPUs ends with the same weights on any such machine, given the request,
the data, the software and the number of processes. On GPUs the promise is for what the CPU makes:
initial weights and pixels.

Why this holds: ATen, oneDNN and MKL choose kernels by the CPU's model, and these add in different
orders. Three variables, read when they are loaded, choose kernels that all these CPUs have. (MKL
ignores MKL_CBWR=AVX2, which is faster, on AMD's CPUs.) Each process has one thread, because threads
divide sums. One operation of a run still depends on the CPU: torch takes square roots from MKL,
which starts from the approximate instruction `rsqrtps`. NumPy uses the exact one. Of NumPy a run
uses only arithmetic, `sqrt` and sorts of arrays: with AVX-512 even `exp` gives other bits.
"""

import os
import platform
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.config.schema import Config
from pipeline.world import World

if TYPE_CHECKING:  # torch is imported where it is used: the variables must be set before
    import torch
    from torch import Tensor

VARIABLES = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"}


def portability(config: Config, world: World) -> tuple[bool, str]:
    """Return True if a run's bits do not depend on the model of CPU, and the reason, if any.

    After torch was imported, the result is True only if `prepare` was called before.
    """
    if not config.is_portable:
        return False, "run.portable=false" if config.is_deterministic else ""
    if why := _obstacle(config, on_gpu=world.uses_gpu(config.run.device)):
        return False, why
    if world.uses_gpu(config.run.device):
        return True, "initial weights and pixels; the rest depends on the model of GPU"
    if ":" in config.model.arch:
        operations = "operation that docs/reproducibility.md names as different"
        return True, f"if {config.model.arch} uses no {operations}"
    return True, "any x86-64 CPU with AVX2 computes the same bits; run.portable=false may be faster"


def _obstacle(config: Config, *, on_gpu: bool) -> str:
    train, given = config.train, {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if lacks := {"avx2", "fma"} - _cpu_flags():
        return f"this CPU is not an x86-64 with {' and '.join(sorted(lacks)).upper()}"
    if other := " ".join(f"{name}={value}" for name, value in given.items() if value != VARIABLES[name]):
        return f"the environment has {other}: unset it"
    if "torch" in sys.modules and given != VARIABLES:
        return "torch was imported before the variables that it reads were set"
    if not config.is_deterministic:
        return "model.batchnorm=average rounds differently after a resume: use local"
    if on_gpu:
        return ""
    if config.run.threads not in (None, 1):
        return f"run.threads={config.run.threads} divides sums: leave it out"
    if train.compile in ("on", "reduce-overhead"):
        return f"train.compile={train.compile} makes kernels for this model of CPU"
    if train.precision in ("bf16", "fp16"):
        return f"train.precision={train.precision} needs instructions that few CPUs have: use fp32"
    return ""


def prepare(config: Config, world: World) -> None:
    """Set the variables of a portable run, and of its children. Comes before torch's import."""
    if portability(config, world)[0]:
        os.environ.update(VARIABLES)


@cache
def use_exact_roots() -> "torch.library.Library":
    """Replace torch's square root on CPUs, in this process and in those forked from it.

    Return what holds the replacement; it ends with that object.
    """
    import torch

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, function in {
        "sqrt": _sqrt,
        "sqrt_": lambda x: x.copy_(_sqrt(x)),
        "sqrt.out": lambda x, *, out: out.resize_(x.shape).copy_(_sqrt(x)),
    }.items():
        library.impl(name, function, "CPU", allow_override=True)  # type: ignore[no-untyped-call]
    return library


def _sqrt(x: "Tensor") -> "Tensor":
    import torch

    given = x.detach() if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    wide = given.float() if given.dtype in (torch.bfloat16, torch.float16) else given
    roots = torch.empty_like(wide)
    with np.errstate(invalid="ignore"):  # the root of a negative number is NaN, as torch's
        np.sqrt(wide.numpy(), out=roots.numpy())
    return roots.to(given.dtype)


def _cpu_flags() -> set[str]:
    """Return the instruction sets of this CPU, as Linux names them; none if it is no x86-64."""
    with suppress(OSError, StopIteration):
        if platform.machine() == "x86_64":
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            return set(next(line for line in lines if line.startswith("flags")).split())
    return set()
