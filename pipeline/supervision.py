"""A process, its parent and its peers: who ends with whom, and what the torchrun agent is told."""

import ctypes
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from pipeline.errors import CRASH
from pipeline.world import is_launched

PR_SET_PDEATHSIG = 1


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


def process_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on: the second may contain spaces."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel send SIGKILL to this process when the thread that started it ends.

    An orphaned rank would keep training and writing checkpoints. A forked process does not inherit
    this, so each calls this function. If `parent_pid` died before the call, the process exits here.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(CRASH)
