"""The processes of `--nproc N`, started by torch's own elastic agent, with no restarts."""

import logging
import os
import re
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import errors
from pipeline.errors import TemporaryError
from pipeline.guards.signals import SIGNALS, StopRequest
from pipeline.lazy import freeze_imports
from pipeline.operate.early_stop import LAUNCHER_REPORTS, EarlyStopError, raise_on_signal
from pipeline.supervision import die_with_parent, process_stat

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def start_processes(
    nproc: int, arguments: list[str], stop: StopRequest, advice: str = "give the same command again"
) -> int:
    """Start `nproc` processes on this machine; return the exit code of the first failure, or 0.

    At a signal, stop them and raise EarlyStopError. They get the signals after that one, too.
    advice: what to do after a crash.
    """
    with raise_on_signal(stop), freeze_imports():
        from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        from pipeline.addons.deploy.local_rendezvous import LocalRendezvous

    # one line says why a run ended; the agent's own report would bury it
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    rendezvous_handler_registry.register("local", LocalRendezvous)
    os.environ[LAUNCHER_REPORTS] = "1"
    with tempfile.TemporaryDirectory(prefix="pipeline-ranks-", ignore_cleanup_errors=True) as reports:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=nproc, max_restarts=0,
            run_id="local", rdzv_backend="local",
            logs_specs=DefaultLogsSpecs(reports),  # torch would not remove its own folder
            signals_to_handle="",  # it takes SIGHUP even if ignored, and kills ranks at a second signal
        )  # fmt: skip
        try:
            with raise_on_signal(stop, signal_children):
                elastic_launch(config, sys.executable)("-m", "pipeline", *arguments)
        except ChildFailedError as failure:
            return _exit_code(failure, advice)
        finally:
            del os.environ[LAUNCHER_REPORTS]
    return errors.OK


def _exit_code(failure: "ChildFailedError", advice: str) -> int:
    """Return the exit code of the first rank that failed if it is one of ours, otherwise CRASH."""
    rank, first = failure.get_first_failure()
    if first.exitcode in (*errors.PERMANENT, TemporaryError.code):
        return first.exitcode
    details = first.error_file_data.get("message")
    reported = details["message"] if isinstance(details, dict) else None  # by `supervision.report_to_agent`
    # stopped before its first step; one that left a report had failed before the agent stopped it
    if -first.exitcode in SIGNALS and reported is None:
        print(f"pipeline: {EarlyStopError()}", file=sys.stderr)
        return TemporaryError.code
    end = f"exited with code {first.exitcode}"
    if first.exitcode < 0:
        end = f"was killed by signal {-first.exitcode}"
    reason = reported or f"rank {rank} {end}"
    print(f"pipeline: {reason}; the other ranks were stopped, {advice}", file=sys.stderr)
    return errors.CRASH


def signal_children(number: int) -> None:
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError, IndexError):
            if process_stat(int(pid))[1] == str(os.getpid()):
                os.kill(int(pid), number)


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
        os._exit(errors.CRASH)
