"""Start training or evaluation: check the request, then run in this process or start several.

Promise: an error in the request costs seconds, one line and exit code 2. It is found before torch
is imported, a process group is formed or a GPU is taken.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import machine, supervision, world
from pipeline.config.load import MAX_YAML_BYTES, for_evaluation, from_yaml, load
from pipeline.config.schema import Config
from pipeline.data import sources
from pipeline.data.sources import Source
from pipeline.errors import RequestError, RunError, TemporaryError
from pipeline.files import read_limited
from pipeline.guards.signals import EarlyStopError, StopRequest
from pipeline.lazy import part
from pipeline.operate import request, restart
from pipeline.operate.processes import freeze_imports, start_processes
from pipeline.plan import Plan
from pipeline.planning import make_plan
from pipeline.record.folder import RunFolder
from pipeline.record.journal import last_event
from pipeline.record.terminal import make_terminal
from pipeline.world import World

if TYPE_CHECKING:
    from pipeline.train.listener import Mirror
    from pipeline.train.session import Prepared


def train(recipe: str, overrides: list[str], nproc: int | None, stop: StopRequest) -> str | int:
    """Run `pipeline train`; return the done line, or the exit code of the processes started."""
    config = load(recipe, overrides)
    here = _read_world(nproc)
    folder = RunFolder(config.run_dir)
    if nproc and nproc > 1:
        if not config.checkpoint.mirror:  # else rank 0 checks, once it has restored what the run has there
            check_request(config, here.resized(nproc), folder)
        folder.hold()  # if another process holds the folder, fail now and name it
        folder.release()  # rank 0 takes the lock
        start = last_event(folder.journal, "started")
        advice = f"{config.same_command} resumes the run"
        try:
            return start_processes(nproc, ["train", recipe, *overrides], stop, advice)
        except EarlyStopError:
            if last_event(folder.journal, "started") == start:
                raise
            return TemporaryError.code  # rank 0 has said which step it saved

    mirror: Mirror | None = None
    if here.is_main:
        restart.check_launch_has_id(config)
        if config.checkpoint.mirror:
            is_restart = partial(restart.has_applied_resume, config)
            mirror = stop.run(partial(part("mirror"), config, folder, is_restart))
            config = load(recipe, overrides)  # the run that it restored may be of an earlier version
    prepare: Callable[[], Prepared] | None = None
    try:
        part("set what portable runs need")(config, here)
        if here.is_main:
            resumed = restart.config_after_restart(config)
            source, plan = check_request(resumed, here, folder)
            if not mirror:  # which holds the folder
                folder.hold()
            prepare = partial(_prepare, resumed, here, folder, source, plan, mirror)
        elif here.local_rank == 0 and config.data.source == "digits":
            sources.open_source(config)  # makes the digits on each machine, unless they share a disk
        with freeze_imports():
            from pipeline.train.session import run_training
        return run_training(config, here, folder, prepare, stop)
    except RunError:
        if mirror and prepare:  # it is still open after an error before the first step
            mirror.start()
        if mirror:
            mirror.close(stop.seconds_left)
        folder.release()
        raise


def check_request(config: Config, here: World, folder: RunFolder) -> tuple[Source, Plan]:
    """Run every check of a request that needs no torch. Raises RunError if one fails."""
    request.check_run_folder_is_writable(config, folder)
    request.check_previous_start_did_not_fail(config, here, folder)
    request.check_device(config, here)
    source = request.open_data(config, folder)
    plan = make_plan(config, here, source.size)
    request.check_config_is_compatible(config, folder)
    return source, plan


def _prepare(
    config: Config, here: World, folder: RunFolder, source: Source, plan: Plan, mirror: "Mirror | None"
) -> "Prepared":
    """Run the checks that need torch; return what they loaded. A wrong request leaves no folder."""
    from pipeline.device import choose_device
    from pipeline.train.resume import find
    from pipeline.train.session import Prepared

    try:
        choose_device(config, here)
        found = find(config, folder, source, make_terminal(is_main=True).log)
        weights = part("check model")(config, plan, here, is_resumed=found is not None)
    except BaseException:  # at a signal, too
        if mirror:
            mirror.close()
        raise
    return Prepared(source, part("plan table")(plan), found, weights, mirror, config.run.resume)


def evaluate(target: str, overrides: list[str], nproc: int | None) -> str | int:
    """Run `pipeline evaluate`; return the done line, or the exit code of the processes started."""
    here = _read_world(nproc)
    part("check target")(target)
    if nproc and nproc > 1:
        stop = StopRequest()
        stop.listen()
        return start_processes(nproc, ["evaluate", target, *overrides], stop)
    # torch reads the variables of a portable run when it is imported, before it reads a checkpoint
    folder = RunFolder(Path(target) if Path(target).is_dir() else Path(target).parent.parent)
    with suppress(OSError, ValueError, RequestError):
        text = read_limited(folder.config, MAX_YAML_BYTES).decode()
        part("set what portable runs need")(from_yaml(text, str(folder.config), overrides), here)

    with freeze_imports():
        from pipeline.operate.evaluate import run_evaluation
        from pipeline.record import checkpoint, checkpoint_files

    path = checkpoint_files.find(Path(target))
    contents = checkpoint.read_model(path)
    trained, config = for_evaluation(contents["config"], str(path), overrides)
    source = None
    if here.is_main:
        if config.run.device == "cuda" and not machine.has_gpu():
            raise machine.no_gpu_error()
        source, description = part("evaluation images")(config, contents, trained, overrides)
        print(f"evaluating {path} on {description}", file=sys.stderr, flush=True)
    return run_evaluation(config, here, contents, source)


def _read_world(nproc: int | None) -> World:
    """Return this process's place in the job. Raises RequestError for --nproc under a launcher."""
    if nproc is not None and world.is_launched():
        problem = f"--nproc {nproc} with RANK and WORLD_SIZE in the environment"
        raise RequestError(problem, "give --nproc, or start with torchrun, not both")
    return supervision.this_world()
