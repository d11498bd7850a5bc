"""The resources of this machine: CPUs, memory, /dev/shm, a compiler, GPUs. Read without torch.

CPUs and memory are those that this process may use, by its affinity mask and its cgroup's limits.
"""

import errno
import os
import re
import resource
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.errors import RequestError

_DEVICES = Path("/dev")
ENLARGE_SHARED_MEMORY = "enlarge it (docker: --shm-size, k8s render: --shm)"
_WSL_CUDA = Path("/usr/lib/wsl/lib/libcuda.so.1")


def available_cpus() -> int:
    """Return the CPUs that the affinity mask and the cgroup (v2 or v1) allow, at least 1.

    The mask is that of the torchrun agent if there is one: with --numa-binding it binds each rank
    to some of the CPUs, and the ranks of a machine divide all of them.
    """
    agent_pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0  # 0: this process
    cpus = len(os.sched_getaffinity(agent_pid))
    quota = _cgroup_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return max(1, min(cpus, int(quota))) if quota else cpus


@contextmanager
def resource_limit(kind: int, limit: int) -> Iterator[None]:
    """Lower a limit of this process in the block, such as `resource.RLIMIT_FSIZE`, to `limit`."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit if soft == resource.RLIM_INFINITY else min(soft, limit), hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def available_memory() -> int | None:
    """Return the bytes of memory that the cgroup (v2 or v1) allows, or None if unknown."""
    root = Path("/sys/fs/cgroup")
    limits = []
    with suppress(OSError, ValueError, StopIteration):
        files = [level / "memory.max" for level in _cgroup_levels(root, Path("/proc/self/cgroup"))]
        for file in (*files, root / "memory/memory.limit_in_bytes"):
            if file.exists() and (text := file.read_text(encoding="utf-8").strip()) != "max":
                limits.append(int(text))
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        total = next(line for line in lines if line.startswith("MemTotal:"))
        return min([*limits, 1024 * int(total.split()[1])])
    return None


def shared_memory_bytes() -> int | None:
    """Return the size of /dev/shm in bytes, or None if unknown."""
    with suppress(OSError):  # not its free part: a run that was killed a moment ago may still hold some
        return shutil.disk_usage("/dev/shm").total
    return None


def describe_shared_memory() -> str:
    """Return how full /dev/shm is, and what to do if it is too small."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return f"/dev/shm ({error.strerror}): mount a tmpfs on it"
    room = f"{usage.free / 2**20:,.1f} of {usage.total / 2**20:,.1f} MiB free"
    return f"/dev/shm ({room}): {ENLARGE_SHARED_MEMORY}"


def start_failure(processes: str, error: OSError, otherwise: str) -> str:
    """Return why processes cannot start, and what to do. otherwise: the option that needs fewer."""
    remedy = "raise the limits on processes, memory and open files"
    if error.errno in (errno.ENOSPC, errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSYS):
        remedy = f"they keep semaphores in {describe_shared_memory()}"  # see sem_overview(7)
    return f"{processes} cannot start: {error.strerror}: {remedy}, or {otherwise}"


def missing_to_compile() -> str:
    """Return a missing prerequisite of torch.compile, or ""."""
    variable, names = ("CC", ("gcc", "clang")) if has_gpu() else ("CXX", ("g++", "clang++"))  # Triton, Inductor
    if not any(shutil.which(name) for name in (os.environ.get(variable, names[0]), *names)):
        return f"a compiler ({names[0]}, or {variable} in the environment)"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.exists() else f"Python's headers ({header})"


def has_gpu() -> bool:
    """Return True if this machine has a GPU, usable or not, that the environment does not hide."""
    return _has_gpu_device() and not hidden_gpus()


def hidden_gpus() -> str:
    """Return the setting in the environment that hides this machine's GPUs, or ""."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    # CUDA stops at a word that is neither an index nor a UUID: -1, or NoDevFiles from Slurm
    is_hidden = _has_gpu_device() and not re.match(r"\s*(\d|GPU-|MIG-)", visible)
    return f"CUDA_VISIBLE_DEVICES='{visible}'" if is_hidden else ""


def no_gpu_error() -> RequestError:
    if hidden := hidden_gpus():
        return RequestError(f"run.device=cuda, but {hidden} hides the GPUs", "unset it, or use run.device=cpu, or auto")
    if "KUBERNETES_SERVICE_HOST" in os.environ:  # set in every pod
        remedy = (
            "unless NVIDIA's container runtime is the node's default, render with --runtime-class (runtimeClassName)"
        )
        return RequestError("run.device=cuda, but this container has no GPU", f"{remedy}; for CPUs render with --cpu")
    return RequestError("run.device=cuda, but this machine has no GPU", "use run.device=cpu, or auto")


def _has_gpu_device() -> bool:
    # WSL2 has one device for GPUs of all makers; the driver of an NVIDIA GPU adds its CUDA library
    return any(_DEVICES.glob("nvidia[0-9]*")) or ((_DEVICES / "dxg").exists() and _WSL_CUDA.exists())


def _cgroup_quota(root: Path, own: Path) -> float | None:
    """Return the CPUs that the cgroup allows, or None. own: /proc/self/cgroup."""
    limits = []
    with suppress(OSError, ValueError):
        for level in _cgroup_levels(root, own):
            if (level / "cpu.max").exists():
                quota, period = (level / "cpu.max").read_text(encoding="utf-8").split()
                if quota != "max":
                    limits.append(int(quota) / int(period))
        if limits:
            return min(limits)
        quota_us = int((root / "cpu/cpu.cfs_quota_us").read_text(encoding="utf-8"))
        return quota_us / int((root / "cpu/cpu.cfs_period_us").read_text(encoding="utf-8")) if quota_us > 0 else None
    return None


def _cgroup_levels(root: Path, own: Path) -> list[Path]:
    """Return the folders of this process's cgroup and of those above it; each may have a limit."""
    lines = own.read_text(encoding="utf-8").splitlines()
    name = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/").strip("/")
    folder = root / name
    return [level for level in (folder, *folder.parents) if level.is_relative_to(root)]
