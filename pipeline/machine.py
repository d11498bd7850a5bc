"""The resources of this machine: CPUs, memory, GPUs. Read without torch.

CPUs and memory are those that this process may use, by its affinity mask and its cgroup's limits.
"""

import os
import re
from contextlib import suppress
from pathlib import Path

from pipeline.errors import RequestError

_DEVICES = Path("/dev")
_WSL_CUDA = Path("/usr/lib/wsl/lib/libcuda.so.1")
_CGROUPS, _OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_cpus() -> int:
    """Return the CPUs that the affinity mask and the cgroup allow, at least 1."""
    # torchrun's --numa-binding binds each rank to some of the CPUs, and the ranks of a machine
    # divide all of them: those of the agent. 0 is this process.
    agent_pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
    quotas = [quota // period for quota, period in _cgroup_limits("cpu.max")]
    return max(1, min([len(os.sched_getaffinity(agent_pid)), *quotas]))


def available_memory() -> int:
    """Return the bytes of memory that this machine has, or that the cgroup allows."""
    limits = [limit for (limit,) in _cgroup_limits("memory.max")]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits])


def has_gpu() -> bool:
    """Return True if this machine has a GPU, usable or not, that the environment does not hide."""
    # CUDA stops at a word that is neither an index nor a UUID: -1, or NoDevFiles from Slurm
    is_visible = re.match(r"\s*(\d|GPU-|MIG-)", os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
    return bool(is_visible) and (any(_DEVICES.glob("nvidia[0-9]*")) or _WSL_CUDA.exists())


def no_gpu_error() -> RequestError:
    return RequestError(
        "run.device=cuda, but no GPU is visible here",
        "use run.device=cpu, or auto, look at CUDA_VISIBLE_DEVICES, or render with --runtime-class nvidia",
    )


def _cgroup_limits(file: str) -> list[list[int]]:
    """Return the numbers in a file of this process's cgroup (v2) and of each one above it.

    A level without a limit says "max", and is left out.
    """
    with suppress(OSError, ValueError):
        own = re.search("^0::(.*)$", _OWN_CGROUP.read_text(encoding="utf-8"), re.MULTILINE)
        folder = _CGROUPS / (own[1] if own else "").strip("/")
        files = [level / file for level in (folder, *folder.parents) if level.is_relative_to(_CGROUPS)]
        texts = [path.read_text(encoding="utf-8") for path in files if path.exists()]
        return [[int(word) for word in text.split()] for text in texts if "max" not in text]
    return []
