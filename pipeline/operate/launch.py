"""From a request to running processes: what can be wrong is found first, then as many processes as asked for are started.

Promise: an error in the request costs seconds, one line and exit code 2, and is found before torch is imported, a process
group formed or a GPU taken. Starting leans on torch's own elastic agent, with no restarts; nothing here polls a child.
"""

import gc
import logging
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import errors, supervision, world
from pipeline.config.load import from_yaml, load, refuse_another_model
from pipeline.config.schema import Config
from pipeline.data import sources
from pipeline.data.sources import Source
from pipeline.errors import RequestError, TemporaryError
from pipeline.guards.signals import StopRequest
from pipeline.plan import Plan
from pipeline.preflight import request as checks
from pipeline.record.folder import RunFolder
from pipeline.record.journal import read
from pipeline.record.terminal import make_terminal
from pipeline.world import World

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from pipeline.train.session import Prepared


@dataclass
class Cleared:
    """A request that has passed its preflight."""

    source: Source
    plan: Plan
    folder: RunFolder


def train(recipe: str, overrides: list[str], nproc: int | None, stop: StopRequest) -> str | int:
    """`pipeline train`: the line that says the result, or the exit code of the processes that were started."""
    config = load(recipe, overrides)
    here = _place(nproc)
    if nproc and nproc > 1:
        folder = preflight(config, here.resized(nproc)).folder
        folder.hold()  # whoever else holds it is named at once
        folder.release()  # rank 0 holds it from now on
        return start_processes(nproc, ["train", recipe, *overrides])
    cleared = None
    folder = RunFolder(config.run_dir)
    if here.is_main:
        config = _restarted(config)
        cleared = preflight(config, here)
        folder = cleared.folder
        folder.hold()
        if config.run.resume == "never":
            aside = folder.set_aside()
            print(f"what was in {folder.path} is now in {aside}" if aside else "a fresh start", file=sys.stderr)
        make_terminal(is_main=True).show(f"{config.recipe} in {folder.path}\n{cleared.plan.table()}")
    elif here.local_rank == 0 and config.data.source == "digits":
        sources.open_source(config)  # each machine of several makes its own, unless they share a disk

    with _importing():
        from pipeline.train.session import run_training

    return run_training(config, here, folder, partial(_prepare, config, cleared) if cleared else None, stop)


def _prepare(config: Config, cleared: Cleared) -> "Prepared":
    """Make the checks of a start that need torch; return what they find."""
    from pipeline.train.session import Prepared

    found = checks.resumption(config, cleared.folder, cleared.source, make_terminal(is_main=True).log)
    return Prepared(cleared.source, found, checks.model(config, cleared.plan, is_resumed=found is not None))


def _restarted(config: Config) -> Config:
    """Return what a restart by the launcher trains: run.resume is for its first start, once that has saved something."""
    if not supervision.restart_count():
        return config
    folder = RunFolder(config.run_dir)
    starts = [row for row, _ in read(folder.journal) if row.get("event") == "started"]
    if not starts or starts[-1].get("launch") != supervision.launch_id():
        return config
    resume, used = "auto", starts[-1].get("checkpoint")
    if config.run.resume not in ("auto", "never") and used:
        from pipeline.train.resume import at_restart

        resume = at_restart(config.run.resume, used, folder)
    return config.model_copy(update={"run": config.run.model_copy(update={"resume": resume})})


def preflight(config: Config, here: World) -> Cleared:
    """Everything that can be wrong with a request and needs no torch. Raises a Verdict."""
    folder = checks.run_folder(config)
    checks.previous_failure(config, here, folder)
    checks.device(config, here)
    source = checks.data(config, folder)
    plan = checks.plan(config, here, source)
    checks.changes(config, folder)
    return Cleared(source, plan, folder)


def evaluate(target: str, overrides: list[str], nproc: int | None) -> str | int:
    """`pipeline evaluate`: the line that says the result, or the exit code of the processes that were started."""
    here = _place(nproc)
    if nproc and nproc > 1:
        return start_processes(nproc, ["evaluate", target, *overrides])

    with _importing():
        from pipeline.record import checkpoint
        from pipeline.train.session import run_evaluation

    path = checkpoint.find(Path(target))
    contents = checkpoint.read_model(path)
    trained = from_yaml(contents["config"], str(path))
    config = from_yaml(contents["config"], str(path), overrides)
    refuse_another_model(trained, config, str(path))
    source = None
    if here.is_main:
        source, what = sources.open_validation(config, contents, trained, overrides)
        print(f"evaluating {path} on {what}", file=sys.stderr, flush=True)

    return run_evaluation(config, here, contents, source)


@contextmanager
def _importing() -> Iterator[None]:
    """What is imported here stays, so nobody looks for garbage in it: neither now, again and again (a tenth of a start's
    time), nor in the midst of training, where one rank's second is everyone's, nor in a forked worker, which would then
    need a copy of every page it looks at."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _place(nproc: int | None) -> World:
    if nproc is not None and world.is_launched():
        raise RequestError(f"--nproc {nproc} inside a launcher's group: give --nproc, or start with torchrun, not both")
    return world.from_environment()


def start_processes(nproc: int, arguments: list[str]) -> int:
    """Start `nproc` processes of this command on this machine and wait for them: the exit code of the first to leave."""
    with _importing():
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # one line says why a run ended; the agent's account of its children would bury it
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",  # a machine's own name need not resolve, in a container without a network say
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "pipeline", *arguments)
    except ChildFailedError as failure:
        return _exit_code(failure)
    except SignalException:
        return TemporaryError.code
    return errors.OK


def _exit_code(failure: "ChildFailedError") -> int:
    """The first failed process's own code, if it is one of ours; a crash otherwise."""
    rank, first = failure.get_first_failure()
    if first.exitcode in (*errors.PERMANENT, TemporaryError.code):
        return first.exitcode
    account = first.error_file_data.get("message")  # what the rank itself has left, see supervision.report_to_agent
    # while it waited for the others, see StopRequest; one with an account was already leaving when the agent stopped it
    if first.exitcode in (-signal.SIGTERM, -signal.SIGINT) and not isinstance(account, dict):
        print("pipeline: asked to stop before a step was made: the same command starts again", file=sys.stderr)
        return TemporaryError.code
    how = f"was killed by signal {-first.exitcode}" if first.exitcode < 0 else f"exited with code {first.exitcode}"
    why = account["message"] if isinstance(account, dict) else f"rank {rank} {how}"
    print(f"pipeline: {why}; the others were stopped, the same command goes on", file=sys.stderr)
    return errors.CRASH
