"""Who takes part and with what: read from the environment that a launcher leaves, before torch is imported.

A process started by torchrun (or by our own `--nproc`, which is the same agent) finds its place in RANK, WORLD_SIZE,
LOCAL_RANK, LOCAL_WORLD_SIZE, which may as well be given by hand; without them it is alone. CPUs are those that this process
may use: the affinity mask cut by the cgroup's quota, since in a container the host's count is a promise nobody keeps.
"""

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import sys
import sysconfig
import time
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.verdict import CRASH, RequestError

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class World:
    size: int = 1
    """Processes in the whole job."""
    local_size: int = 1
    """Processes on this machine."""
    rank: int = 0
    local_rank: int = 0
    cpus: int = 1
    """CPUs that the processes of this machine may use together."""
    shared_memory: int | None = None
    """Bytes of /dev/shm, all of it; None where that is not known."""
    init_method: str | None = None
    """Where processes meet: tcp://HOST:PORT; None: at MASTER_ADDR and MASTER_PORT, as launchers set them."""
    has_gpu: bool = False
    lacks_to_compile: str = ""
    """What torch.compile wants and this machine has not; empty where it has all."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def resized(self, size: int, nodes: int = 1) -> "World":
        """The same machine with another number of processes, seen from rank 0. RequestError if nodes do not divide it."""
        if size % nodes:
            raise RequestError(f"--world {size} does not divide by --nodes {nodes}: give the same number to each")
        return replace(self, size=size, local_size=size // nodes, rank=0, local_rank=0)


def launched() -> bool:
    """Whether a launcher gave this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def here() -> World:
    """This process's place. RequestError if a launcher's variables make no sense."""
    if not launched():
        return World(
            cpus=allowed_cpus(),
            shared_memory=_shared_memory(),
            has_gpu=shows_gpu(),
            lacks_to_compile=lacks_to_compile(),
        )
    values = {}
    for name, default in (("RANK", ""), ("WORLD_SIZE", ""), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")):
        text = os.environ.get(name, default)
        if not text.isdecimal():
            raise RequestError(
                f"{name}={text!r} in the environment is not a whole number: start with torchrun or --nproc"
            )
        values[name] = int(text)
    rank, size, local_rank, local_size = values.values()
    if not (rank < size and local_rank < local_size <= size):
        given = " ".join(f"{name}={value}" for name, value in values.items())
        raise RequestError(f"{given} in the environment make no group of processes: start with torchrun or --nproc")
    meet = _meeting_place() if size > 1 else None
    return World(
        size, local_size, rank, local_rank, allowed_cpus(), _shared_memory(), meet, shows_gpu(), lacks_to_compile()
    )


def _meeting_place() -> str | None:
    given = os.environ.get("INIT_METHOD")
    if given is None and "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        port = os.environ["MASTER_PORT"]
        if not _is_port(port):
            raise RequestError(
                f"MASTER_PORT={port!r} in the environment is not a port: a number from 1 to 65535, which rank 0's machine"
                " has free, or start with torchrun or --nproc"
            )
        return None
    if given is None or not re.fullmatch(r"tcp://[^/\s]+:\d+", given) or not _is_port(given.rpartition(":")[2]):
        raise RequestError(
            (
                f"INIT_METHOD={given!r} is not tcp://HOST:PORT, with a port from 1 to 65535"
                if given
                else "RANK and WORLD_SIZE are set, but no place to meet"
            )
            + ": set INIT_METHOD=tcp://HOST:PORT, an address of rank 0's machine, or MASTER_ADDR and MASTER_PORT, or start"
            " with torchrun or --nproc"
        )
    return given


def _is_port(text: str) -> bool:
    return bool(re.fullmatch(r"\d{1,5}", text, re.ASCII)) and 0 < int(text) < 1 << 16


def allowed_cpus() -> int:
    """CPUs that affinity and cgroup (v2, else v1) leave us; at least 1."""
    cpus = len(os.sched_getaffinity(0))
    quota = _cgroup_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return max(1, min(cpus, int(quota))) if quota else cpus


def allowed_memory() -> int | None:
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


def _shared_memory() -> int | None:
    # what is free just now says less: a run that was killed a moment ago may still hold some
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def lacks_to_compile() -> str:
    """What torch.compile wants on this machine and does not find; empty where it has all."""
    compilers = {"CC": ("gcc", "clang"), "CXX": ("g++", "clang++")}  # Triton's for a GPU, Inductor's for a CPU
    kind, names = next(iter(compilers.items())) if shows_gpu() else ("CXX", compilers["CXX"])
    if not any(shutil.which(name) for name in (os.environ.get(kind, names[0]), *names)):
        return f"a compiler ({names[0]}, or {kind} in the environment)"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.exists() else f"Python's headers ({header})"


def shows_gpu() -> bool:
    """Whether this machine has a GPU, usable or not."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def no_gpu() -> RequestError:
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


def launch_name() -> str | None:
    """What a torchrun agent calls its group: the same after each of its restarts."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


def restarts() -> int:
    """How often a torchrun agent has started this group anew."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def stop_restarts() -> None:
    """Tell the torchrun agent above this rank to give up, where it would start a group anew that can only end the same way.

    An agent knows success and failure, and burns its restarts on either kind of failure. Ours never restarts.
    """
    if launched() and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > restarts():
        os.kill(os.getppid(), signal.SIGTERM)


def leave_account(line: str, *, is_echo: bool) -> None:
    """Tell the torchrun agent above this rank why it failed. is_echo: because another did.

    Of several accounts the agent tells the first, by their whole seconds: an echo bears a later one.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        details = {"py_callstack": line, "timestamp": str(int(time.time()) + 2 * is_echo)}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": details}}))


def kill_stopped(peers: list[int]) -> None:
    """SIGKILL those ranks of this machine that are stopped (SIGSTOP): an agent would wait 30 s for each of them."""
    for pid in peers:
        with contextlib.suppress(OSError, IndexError):
            if process_status(pid)[0] in "Tt":
                os.kill(pid, signal.SIGKILL)


def process_status(pid: int) -> list[str]:
    """Fields 3 and on of /proc/PID/stat, numbered in proc_pid_stat(5); the second is the name, which may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def die_with_parent(parent: int) -> None:
    """Have the kernel SIGKILL this process when the thread that made it (in process `parent`) is gone.

    An orphaned rank would train on and write checkpoints, and an orphaned loader worker hold memory. The signal is not
    inherited over fork, so each process asks for itself; `parent` is compared afterwards for the instant before.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(CRASH)


def die_with_agent() -> None:
    """The same for a rank, whose agent may have died before the rank could ask who that is: its pid is told nowhere.

    But an agent is Python, torchrun as PID 1 too, and above an orphan stand init or a shim, and what they were started by.
    """
    die_with_parent(os.getppid())
    above = os.getppid()
    if not above:
        return  # it is beyond our PID namespace
    try:
        while above and not re.search(rb"python|torchrun", Path(f"/proc/{above}/cmdline").read_bytes()):
            above = int(process_status(above)[1])  # a script may stand between a rank and its agent
    except OSError:
        return  # /proc does not show them
    if not above:
        print("pipeline: the agent above this rank is gone", file=sys.stderr, flush=True)
        os._exit(CRASH)
