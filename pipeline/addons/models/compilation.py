"""Decide if a compilation repays, and tell a model that cannot be compiled from a bad machine."""

import re
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from dataclasses import replace

import torch
from torch import nn

from pipeline.errors import RequestError, one_line
from pipeline.group import Group
from pipeline.guards.signals import StopRequest
from pipeline.plan import Plan

_COST_S, _SAVED = 60, 0.15
"""Seconds of a compilation for each image size; share of a pass that it saves (estimates)."""

_FAULTS = (OSError, MemoryError, BrokenExecutor)
# a compiler's worker process reports its errors as text
_FAULTS_IN_TEXT = re.compile(
    r"\[Errno|No space left|Killed|SIGKILL|out of memory|MemoryError|CUDA error|\[CUDA\]"
    r"|BrokenProcessPool|exited unexpectedly"
)


def compile_if_it_repays(
    plan: Plan, group: Group, model: nn.Module, run_pass: Callable[[], None], log: Callable[[str], None]
) -> Plan:
    """Return the plan. It no longer compiles if passes, which are timed on a GPU, say so.

    All processes decide the same, by the slowest of them.
    """
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
        return "the GPU waits for Python, which starts the kernels"
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
        stop.check()  # a signal may have ended the compiler
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
