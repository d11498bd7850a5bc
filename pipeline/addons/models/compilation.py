"""torch.compile: decide if a model is compiled, and tell one that cannot be from a bad machine.

torch is imported where it is used: the plan is made without it.
"""

import os
import re
import shutil
import sysconfig
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.schema import Config
from pipeline.errors import RequestError, one_line
from pipeline.guards.signals import StopRequest
from pipeline.machine import has_gpu
from pipeline.operate import early_stop
from pipeline.plan import Plan
from pipeline.world import World

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pipeline.group import Group

_COST_S, _SAVED = 60, 0.15
"""Seconds of a compilation for each image size; share of a pass that it saves (estimates)."""

_RECOMPILES_PER_SIZE = 8  # torch's own limit, which torch 2.14 applies to all sizes together
_FAULTS = (OSError, MemoryError, BrokenExecutor)
# a compiler's worker process reports its errors as text
_FAULTS_IN_TEXT = re.compile(
    r"\[Errno|No space left|Killed|SIGKILL|out of memory|MemoryError|CUDA error|\[CUDA\]"
    r"|BrokenProcessPool|exited unexpectedly"
)


def compilation(config: Config, world: World) -> tuple[bool, str]:
    """Return True if the model is compiled, and the reason."""
    mode, missing, has_gpu = config.train.compile, world.missing_to_compile, world.uses_gpu(config.run.device)
    syncs = config.model.batchnorm == "sync" and world.size > 1
    if mode == "off":
        return False, "train.compile=off"
    if mode != "auto":
        # a CUDA graph of several processes would hold NCCL's work, too: not tested
        needs_one_gpu = mode == "reduce-overhead" and not (has_gpu and world.size == 1)
        needs = "model.batchnorm=local or average" if syncs else missing
        needs = "one process with a GPU" if needs_one_gpu else needs
        if needs:
            raise RequestError(f"train.compile={mode} needs {needs}", "add it, or set train.compile=auto")
        return True, f"train.compile={mode}"
    reasons_not_to = {
        "model.batchnorm=sync splits the compiled graph in each layer": syncs,
        f"parallel={config.parallel} runs parts of a model, which are not compiled": config.parallel != "ddp",
        "no GPU; train.compile=on compiles for the CPU": not has_gpu,
        "the run is deterministic, and compiled kernels may change bits": config.is_deterministic_on_gpus,
        f"torch.compile needs {missing}, which is missing": missing,
    }
    reason = next((reason for reason, holds in reasons_not_to.items() if holds), "")
    return not reason, reason or "there is a GPU, unless timed passes say that it does not repay"


def missing_to_compile() -> str:
    """Return a missing prerequisite of torch.compile, or ""."""
    # Triton needs a C compiler, Inductor on a CPU one for C++
    variable, *names = ("CC", "gcc", "clang") if has_gpu() else ("CXX", "g++", "clang++")
    if not any(shutil.which(name) for name in (os.environ.get(variable, names[0]), *names)):
        return f"a compiler ({names[0]}, or {variable} in the environment)"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.exists() else f"Python's headers ({header})"


def compiled_model(module: "nn.Module", plan: Plan, world: World) -> "Callable[[Tensor], Tensor]":
    """Return `module`, to be compiled at its first call with each image size."""
    import torch
    from torch._dynamo import config  # takes a second to import
    from torch._inductor import config as inductor

    # above its limit torch runs a size uncompiled, and a resumed run would compile other sizes
    limit = _RECOMPILES_PER_SIZE * len(plan.image_sizes)
    config.recompile_limit = max(config.recompile_limit, limit)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, limit)
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        # torch counts the affinity mask in every process, not the cgroup's limit (torch 2.14)
        share = max(1, world.cpus // world.local_size)
        inductor.compile_threads = min(inductor.compile_threads or 1, share)
    return torch.compile(module, dynamic=False)


def compile_if_it_repays(
    plan: Plan, group: "Group", model: "nn.Module", run_pass: Callable[[], None], log: Callable[[str], None]
) -> Plan:
    """Return the plan. It no longer compiles if passes, which are timed on a GPU, say so.

    All processes decide the same, by the slowest of them.
    """
    import torch

    buffers = [buffer.clone() for buffer in model.buffers()]  # running statistics
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run_pass()
        queued_s = time.perf_counter() - start
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start, queued_s))
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    torch.cuda.empty_cache()  # NCCL needs memory beside torch's
    reason = reason_not_to(plan, *max(group.all_gather(min(times))))  # the first passes choose kernels
    if not reason:
        return plan
    log(f"the model is not compiled: {reason}")
    return replace(plan, compiles=False, compile_reason=reason)


def reason_not_to(plan: Plan, pass_s: float, queued_s: float) -> str:
    """Return why a compilation does not repay, or "".

    pass_s: seconds of a pass; for the first `queued_s` of them the host starts kernels.
    """
    if queued_s > 0.9 * pass_s:  # compiled, too: a small ResNet was slower on an H100
        is_simple = plan.world == plan.accumulate == len(plan.image_sizes) == 1
        hint = "; try train.compile=reduce-overhead" if is_simple else ""
        return f"the GPU waits for Python, which starts the kernels{hint}"
    saved_s = _SAVED * pass_s * plan.accumulate * plan.total_steps
    cost_s = _COST_S * len(plan.image_sizes)
    return f"it would save about {saved_s:.0f} s and take {cost_s} s" if saved_s < cost_s else ""


def compile_model(arch: str, run_pass: Callable[[], None], stop: StopRequest) -> RequestError | None:
    """Run the first pass. Return an error if the model cannot be compiled; raise any other."""
    from torch._dynamo.exc import TorchDynamoException  # takes a second to import

    try:
        run_pass()
    except TorchDynamoException as error:
        if is_fault_of_machine(error):
            raise
        early_stop.check(stop)  # a signal may have ended the compiler
        return RequestError(f"{arch} cannot be compiled", f"train with train.compile=off ({one_line(error)})")
    return None


def is_fault_of_machine(error: BaseException | None) -> bool:
    """Return True if a compilation failed for a reason that another start may not meet."""
    while error is not None:
        if isinstance(error, _FAULTS) or _FAULTS_IN_TEXT.search(str(error)):
            return True
        # torch raises its own errors `from None`: the cause is a field, or only the context
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return False
