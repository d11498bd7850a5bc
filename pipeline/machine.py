"""What this machine offers: CPUs, memory, /dev/shm, a compiler, GPUs. Read without torch.

CPUs and memory are those that this process may use: the affinity mask and the cgroup's limits, not the host's counts.
"""

import os
import shutil
import sysconfig
from pathlib import Path

from pipeline.errors import RequestError


def available_cpus() -> int:
    """CPUs that affinity and cgroup (v2, else v1) leave us; at least 1."""
    cpus = len(os.sched_getaffinity(0))
    quota = _cgroup_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return max(1, min(cpus, int(quota))) if quota else cpus


def available_memory() -> int | None:
    """Bytes that the machine has and the cgroup (v2, else v1) leaves us; None where that is not known."""
    limits = []
    try:
        inside = next(
            (line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line[:3] == "0::"), "/"
        )
        root = Path("/sys/fs/cgroup")
        folder = root / inside.strip("/")
        files = [level / "memory.max" for level in (folder, *folder.parents) if level.is_relative_to(root)]
        for file in (*files, root / "memory/memory.limit_in_bytes"):
            if file.exists() and (text := file.read_text().strip()) != "max":
                limits.append(int(text))
        total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
        return min([*limits, 1024 * int(total.split()[1])])
    except (OSError, ValueError, StopIteration):
        return None


def shared_memory_bytes() -> int | None:
    # what is free just now says less: a run that was killed a moment ago may still hold some
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def missing_to_compile() -> str:
    """What torch.compile wants on this machine and does not find; empty where it has all."""
    compilers = {"CC": ("gcc", "clang"), "CXX": ("g++", "clang++")}  # Triton's for a GPU, Inductor's for a CPU
    kind, names = next(iter(compilers.items())) if has_gpu() else ("CXX", compilers["CXX"])
    if not any(shutil.which(name) for name in (os.environ.get(kind, names[0]), *names)):
        return f"a compiler ({names[0]}, or {kind} in the environment)"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.exists() else f"Python's headers ({header})"


def has_gpu() -> bool:
    """Whether this machine has a GPU, usable or not."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def no_gpu_error() -> RequestError:
    return RequestError(
        "run.device=cuda but this machine shows no GPU: cpu trains without one, auto takes what there is"
    )


def _cgroup_quota(root: Path, own: Path) -> float | None:
    try:
        lines = own.read_text().splitlines()
        inside = next((line[3:] for line in lines if line.startswith("0::")), "/").strip("/")
        folder = root / inside
        limits = []
        for level in (folder, *folder.parents):  # any level above may be the one that limits
            if (level / "cpu.max").exists():
                quota, period = (level / "cpu.max").read_text().split()
                limits += [int(quota) / int(period)] if quota != "max" else []
            if level == root:
                break
        if limits:
            return min(limits)
        quota_us = int((root / "cpu/cpu.cfs_quota_us").read_text())
        return quota_us / int((root / "cpu/cpu.cfs_period_us").read_text()) if quota_us > 0 else None
    except (OSError, ValueError):
        return None
