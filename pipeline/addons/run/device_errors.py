"""Errors of a device that end a process: a shortage of memory, and a GPU that fails again."""

import socket
import time
from contextlib import suppress

import torch

from pipeline.addons.models.memory import explain_shortage, is_out_of_memory
from pipeline.errors import RunError, TemporaryError, one_line
from pipeline.group import Group
from pipeline.train.job import Job

_FIRST_STEPS = 3  # of a start: a shortage of memory in them is the request's


def explain(error: Exception, job: Job, group: Group, first_step: int, step: int) -> RunError | None:
    """Return what an error means to the user, or None.

    first_step: that of this start; step: at which the error was raised.
    """
    if is_out_of_memory(error):
        is_early = step < first_step + _FIRST_STEPS
        return explain_shortage(error, job.config, job.plan, first_step) if is_early else None
    # an assertion of a kernel is a fault of the program, on any GPU
    if not isinstance(error, torch.AcceleratorError) or "device-side assert" in str(error):
        return None
    host, gpu = socket.gethostname(), torch.cuda.get_device_properties(group.device).uuid
    path, before = job.folder.path / f"cuda-errors-rank-{group.rank}.txt", ""
    with suppress(OSError), open(path, "a+", encoding="utf-8") as file:
        file.seek(0)
        before = file.read()
        file.write(f"{time.strftime('%F %T')} {host} {gpu}: {one_line(error)}\n")
    if f" {host} {gpu}: " not in before:
        return None
    problem = f"rank {group.rank} had a CUDA error again on the GPU {gpu} of {host} ({one_line(error)})"
    return TemporaryError(problem, f"take that GPU out of use, and give the same command again; see {path}")
