"""Errors of a device that end a process: a shortage of memory, and a GPU that fails again."""

import re
import socket
import time
from contextlib import suppress

import torch

from pipeline.addons.models.memory import explain_shortage, is_out_of_memory
from pipeline.errors import RunError, TemporaryError, one_line
from pipeline.group import Group
from pipeline.train.job import Job

_FIRST_STEPS = 3  # of a start: a shortage of memory in them is the request's
_OF_HARDWARE = re.compile("ECC|[Nn][Vv][Ll]ink|hardware|unspecified launch failure|unknown error|unavailable")
"""In CUDA's texts. Others, such as an illegal memory access, are mostly faults of the program."""


def explain(error: Exception, job: Job, group: Group, first_step: int, step: int) -> RunError | None:
    """Return the error that names the cause and what to do, or None if neither is known.

    first_step: that of this start; step: at which the error was raised.
    """
    if is_out_of_memory(error):
        is_early = step < first_step + _FIRST_STEPS
        return explain_shortage(error, job.config, job.plan, first_step) if is_early else None
    if not isinstance(error, torch.AcceleratorError) or not _OF_HARDWARE.search(str(error)):
        return None
    host, gpu = socket.gethostname(), torch.cuda.get_device_properties(group.device).uuid
    folder, name = job.folder.path, f"cuda-errors-rank-{group.rank}.txt"
    job.folder.check_ours()
    before = ""
    with suppress(OSError, ValueError):  # ValueError: a file that is not text
        # of all ranks: after a restart another rank may have this GPU
        before = "".join(path.read_text(encoding="utf-8") for path in folder.glob("cuda-errors-rank-*.txt"))
        with open(folder / name, "a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%F %T')} {host} {gpu}: {one_line(error)}\n")
    if f" {gpu}: " not in before:
        return None
    problem = f"the GPU {gpu} of {host}, of rank {group.rank}, had a CUDA error again ({one_line(error)})"
    remedy = f"take it out of use; {job.config.same_command} resumes; {folder / name} has all errors"
    return TemporaryError(problem, remedy)
