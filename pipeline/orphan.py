"""The end of a process whose parent has ended."""

import ctypes
import os
import signal

from pipeline.errors import CRASH

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel send SIGKILL to this process when the thread that started it ends.

    An orphaned rank would keep training and writing checkpoints. A forked process does not inherit
    this, so each calls this function. If `parent_pid` died before the call, the process exits here.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(CRASH)
