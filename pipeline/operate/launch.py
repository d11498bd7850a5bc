"""Start a training: check the request, then train in this process or start several.

Promise: an error in the request costs seconds, one line and exit code 2. It is found before torch
is imported, a process group is formed or a GPU is taken.
"""

from functools import partial
from typing import Any

from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.errors import RunError, TemporaryError
from pipeline.guards.signals import StopRequest
from pipeline.launcher import this_world
from pipeline.lazy import addon, freeze_imports
from pipeline.operate import early_stop, request
from pipeline.record.folder import RunFolder
from pipeline.record.journal import last_event
from pipeline.world import World


def train(recipe: str, overrides: list[str], nproc: int | None, stop: StopRequest) -> str | int:
    """Run `pipeline train`; return the done line, or the exit code of the processes started."""
    config, here = load(recipe, overrides), this_world(nproc)
    if nproc and nproc > 1:
        return _start_processes(config, here.resized(nproc), ["train", recipe, *overrides], stop)
    folder = RunFolder(config.run_dir)
    mirror: Any = None
    if here.is_main and config.checkpoint.mirror:
        mirror = early_stop.run(stop, partial(addon("store.mirror").open_mirror, config, folder))
        config = load(recipe, overrides)  # the run that it restored may be of an earlier version
    checked: request.Checked | None = None
    try:
        addon("run.portable").prepare(config, here)
        if here.is_main:
            checked = request.check(addon("deploy.restart").config_after_restart(config), here, folder)
            if not mirror:  # which holds the folder
                folder.hold()
        elif here.local_rank == 0 and config.data.source == "digits":
            # makes the digits on each machine, unless they share a disk
            addon("datasets.sources").open_source(config)
        with freeze_imports():
            from pipeline.operate.start import run_rank

            # before loader workers are forked; and the receipt names the decoder
            addon("datasets.images")
            addon("datasets.policies")
        return run_rank(config, here, folder, stop, checked, mirror)
    except RunError:
        if mirror and checked:  # it is still open after an error before the first step
            mirror.start()
        if mirror:
            mirror.close(stop.seconds_left)
        folder.release()
        raise


def _start_processes(config: Config, world: World, command: list[str], stop: StopRequest) -> int:
    """Start the ranks of --nproc, and return the exit code of the first that fails, or 0."""
    folder = RunFolder(config.run_dir)
    if not config.checkpoint.mirror:  # else rank 0 checks, once it has restored what the run has there
        request.check(config, world, folder)
    folder.hold()  # if another process holds the folder, fail now and name it
    folder.release()  # rank 0 takes the lock
    start = last_event(folder.journal, "started")
    try:
        advice = f"{config.same_command} resumes the run"
        return int(addon("deploy.processes").start_processes(world.size, command, stop, advice))
    except early_stop.EarlyStopError:
        if last_event(folder.journal, "started") == start:
            raise
        return TemporaryError.code  # rank 0 has said which step it saved
