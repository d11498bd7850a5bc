"""The launcher of a rank: the place that it gives it, the torchrun agent, the other local ranks."""

import json
import os
import re
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pipeline.errors import CRASH, RequestError
from pipeline.machine import available_cpus, has_gpu
from pipeline.orphan import die_with_parent
from pipeline.world import ALONE, VARIABLES, World, is_launched

NO_LAUNCH_ID = "none"
"""torchrun's id of every job on several nodes that is started without --rdzv-id."""


def this_world() -> World:
    """Return this process's world. Raises RequestError if a launcher's variables are invalid."""
    alone = World(cpus=available_cpus(), has_gpu=has_gpu())
    if not is_launched():
        return alone
    given = {name: os.environ.get(name, default) or "" for name, default in VARIABLES.items()}
    if all(text.isdecimal() for text in given.values()):
        rank, size, local_rank, local_size = map(int, given.values())
        if rank < size and local_rank < local_size <= size:
            address = _init_method() if size > 1 else None
            return replace(alone, size=size, local_size=local_size, rank=rank, local_rank=local_rank,
                           init_method=address)  # fmt: skip
    text = " ".join(f"{name}={value}" for name, value in given.items())
    raise RequestError(
        f"{text} in the environment is no place in a group", f"{ALONE}, or start with torchrun or --nproc"
    )


def _init_method() -> str | None:
    """Return INIT_METHOD, or None if it is not set and MASTER_ADDR and MASTER_PORT are."""
    given, port = os.environ.get("INIT_METHOD"), os.environ.get("MASTER_PORT")
    address = given if port is None or given else f"tcp://{os.environ.get('MASTER_ADDR', '')}:{port}"
    match = re.fullmatch(r"tcp://[^/\s]+:(\d{1,5})", address or "", re.ASCII)
    if match and 0 < int(match[1]) < 1 << 16:
        return given or None
    raise RequestError(
        f"RANK and WORLD_SIZE are set, but no address of rank 0: INIT_METHOD={given} MASTER_PORT={port}",
        f"set INIT_METHOD=tcp://HOST:PORT of rank 0's machine, or MASTER_ADDR and MASTER_PORT, or {ALONE},"
        " or start with torchrun or --nproc",
    )


def launch_id() -> str | None:
    """Return torchrun's id of the job, which stays the same at restarts; None without torchrun."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


def stop_restarts() -> None:
    """Stop the torchrun agent of this rank if it would restart ranks that can only fail again."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if is_launched() and restarts < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        os.kill(os.getppid(), signal.SIGTERM)


def report_to_agent(line: str, *, is_secondary: bool) -> None:
    """Tell the torchrun agent why this rank failed.

    The agent shows the error with the earliest timestamp, in whole seconds. So a secondary failure,
    which is the consequence of another rank's, gets a later timestamp.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        timestamp = int(time.time()) + (2 if is_secondary else 0)
        details = {"py_callstack": line, "timestamp": str(timestamp)}
        text = json.dumps({"message": {"message": line, "extraInfo": details}})
        with suppress(OSError):
            Path(path).write_text(text, encoding="utf-8")


def kill_frozen_peers(pids: list[int]) -> None:
    """Send SIGKILL to stopped local ranks (SIGSTOP): the agent would wait 30 s for each of them."""
    for pid in pids:
        with suppress(OSError, IndexError):
            if process_stat(pid)[0] in "Tt":
                os.kill(pid, signal.SIGKILL)


def signal_children(number: int) -> None:
    """Send a signal to each child of this process."""
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError, IndexError):
            if process_stat(int(pid))[1] == str(os.getpid()):
                os.kill(int(pid), number)


def process_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on: the second may contain spaces."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used."""
    user, system = process_stat(pid)[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def die_with_agent() -> None:
    """Have the kernel send SIGKILL to this rank when its torchrun agent ends.

    The agent may have died before this call. If no ancestor is a Python or torchrun process (there
    may be a script between a rank and its agent), our agent died, and the rank exits here.
    """
    die_with_parent(os.getppid())
    ancestor = os.getppid()
    if not ancestor:
        return  # the parent is outside our PID namespace
    try:
        while ancestor and not re.search(rb"python|torchrun", Path(f"/proc/{ancestor}/cmdline").read_bytes()):
            ancestor = int(process_stat(ancestor)[1])
    except OSError:
        return  # /proc does not show other processes
    if not ancestor:
        print("pipeline: the torchrun agent of this rank has died", file=sys.stderr, flush=True)
        os._exit(CRASH)
