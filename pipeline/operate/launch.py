"""Start training or evaluation: check the request, then run in this process or start several.

Promise: an error in the request costs seconds, one line and exit code 2. It is found before torch
is imported, a process group is formed or a GPU is taken.
"""

import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import launcher, machine, portable, world
from pipeline.config.load import MAX_YAML_BYTES, for_evaluation, from_yaml, load
from pipeline.data import sources
from pipeline.errors import RequestError, RunError, TemporaryError
from pipeline.files import read_limited
from pipeline.guards.signals import EarlyStopError, StopRequest
from pipeline.lazy import part
from pipeline.operate import request, restart
from pipeline.operate.processes import freeze_imports, start_processes
from pipeline.record.folder import RunFolder
from pipeline.record.journal import last_event
from pipeline.world import World

if TYPE_CHECKING:
    from pipeline.train.listener import Mirror


def train(recipe: str, overrides: list[str], nproc: int | None, stop: StopRequest) -> str | int:
    """Run `pipeline train`; return the done line, or the exit code of the processes started."""
    config = load(recipe, overrides)
    here = _read_world(nproc)
    folder = RunFolder(config.run_dir)
    if nproc and nproc > 1:
        if not config.checkpoint.mirror:  # else rank 0 checks, once it has restored what the run has there
            request.check(config, here.resized(nproc), folder)
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
    checked: request.Checked | None = None
    try:
        portable.prepare(config, here)
        if here.is_main:
            checked = request.check(restart.config_after_restart(config), here, folder)
            if not mirror:  # which holds the folder
                folder.hold()
        elif here.local_rank == 0 and config.data.source == "digits":
            sources.open_source(config)  # makes the digits on each machine, unless they share a disk
        with freeze_imports():
            from pipeline.operate.start import run_rank
        return run_rank(config, here, folder, stop, checked, mirror)
    except RunError:
        if mirror and checked:  # it is still open after an error before the first step
            mirror.start()
        if mirror:
            mirror.close(stop.seconds_left)
        folder.release()
        raise


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
        portable.prepare(from_yaml(text, str(folder.config), overrides), here)

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
    return launcher.this_world()
