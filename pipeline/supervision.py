"""Processes above and beside a rank: the torchrun agent that started it, its parent, its local peers."""

import contextlib
import ctypes
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

from pipeline.errors import CRASH
from pipeline.world import is_launched

PR_SET_PDEATHSIG = 1


def launch_id() -> str | None:
    """What a torchrun agent calls its group: the same after each of its restarts."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


def restart_count() -> int:
    """How often a torchrun agent has started this group anew."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def stop_restarts() -> None:
    """Tell the torchrun agent above this rank to give up, where it would start a group anew that can only end the same way.

    An agent knows success and failure, and burns its restarts on either kind of failure. Ours never restarts.
    """
    if is_launched() and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > restart_count():
        os.kill(os.getppid(), signal.SIGTERM)


def report_to_agent(line: str, *, is_echo: bool) -> None:
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
            if process_stat(pid)[0] in "Tt":
                os.kill(pid, signal.SIGKILL)


def process_stat(pid: int) -> list[str]:
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
            above = int(process_stat(above)[1])  # a script may stand between a rank and its agent
    except OSError:
        return  # /proc does not show them
    if not above:
        print("pipeline: the agent above this rank is gone", file=sys.stderr, flush=True)
        os._exit(CRASH)
