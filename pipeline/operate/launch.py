"""Start training or evaluation: check the request, then run in this process or start several.

Promise: an error in the request costs seconds, one line and exit code 2. It is found before torch
is imported, a process group is formed or a GPU is taken. `--nproc` uses torch's own elastic agent,
with no restarts.
"""

import gc
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import errors, machine, portable, supervision, world
from pipeline.config.load import MAX_YAML_BYTES, for_evaluation, from_yaml, load
from pipeline.config.schema import Config
from pipeline.data import sources
from pipeline.data.sources import Source
from pipeline.errors import RequestError, RunError, TemporaryError
from pipeline.guards.signals import LAUNCHER_REPORTS, SIGNALS, EarlyStopError, StopRequest
from pipeline.lazy import part
from pipeline.plan import Plan
from pipeline.planning import make_plan
from pipeline.preflight import request
from pipeline.record.folder import RunFolder
from pipeline.record.journal import last_event
from pipeline.record.terminal import make_terminal
from pipeline.world import World

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from pipeline.train.listener import Mirror
    from pipeline.train.session import Prepared


def train(
    recipe: str, overrides: list[str], nproc: int | None, stop: StopRequest, numa_binding: str | None = None
) -> str | int:
    """Run `pipeline train`; return the done line, or the exit code of the processes started.

    numa_binding: see `start_processes`.
    """
    config = load(recipe, overrides)
    here = _read_world(nproc)
    if numa_binding:
        _check_numa_binding(numa_binding, nproc, here)
    folder = RunFolder(config.run_dir)
    if nproc and nproc > 1:
        if not config.checkpoint.mirror:  # with one, rank 0 checks, once it has restored what the run has there
            check_request(config, here.resized(nproc), folder)
        folder.hold()  # if another process holds the folder, fail now and name it
        folder.release()  # rank 0 takes the lock
        start, advice = last_event(folder.journal, "started"), f"{config.same_command} resumes the run"
        try:
            return start_processes(nproc, ["train", recipe, *overrides], stop, numa_binding, advice)
        except EarlyStopError:
            if last_event(folder.journal, "started") == start:
                raise
            return TemporaryError.code  # rank 0 has said which step it saved
    prepare: Callable[[], Prepared] | None = None
    mirror: Mirror | None = None
    if here.is_main:
        _check_launch_has_id(config)
        if config.checkpoint.mirror:
            mirror = stop.run(partial(part("mirror"), config, folder, partial(_has_applied_resume, config)))
        if mirror:
            config = load(recipe, overrides)  # the run that it restored may be of an earlier version
        portable.prepare(config, here)
        try:
            resumed = _config_after_restart(config)
            source, plan = check_request(resumed, here, folder)
            if not mirror:
                folder.hold()
        except RunError:
            _release(folder, mirror)
            raise
        prepare = partial(_prepare, resumed, here, folder, source, plan, mirror)
    else:
        portable.prepare(config, here)
        if here.local_rank == 0 and config.data.source == "digits":
            sources.open_source(config)  # makes the digits on each machine, unless they share a disk

    with _freeze_imports():
        from pipeline.train.session import run_training

    try:
        return run_training(config, here, folder, prepare, stop)
    except RunError:
        if mirror:  # it is still open after an error before the first step
            mirror.start()
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


def _release(folder: RunFolder, mirror: "Mirror | None") -> None:
    if mirror:
        mirror.close()
    folder.release()


def _prepare(
    config: Config, here: World, folder: RunFolder, source: Source, plan: Plan, mirror: "Mirror | None" = None
) -> "Prepared":
    """Run the checks that need torch; return what they loaded. A wrong request leaves no folder."""
    from pipeline.train.resume import find
    from pipeline.train.session import Prepared

    try:
        log = make_terminal(is_main=True).log
        request.check_gpus_are_supported(config, here)
        found = find(config, folder, source, log)
        weights = part("check model")(config, plan, here, is_resumed=found is not None)
    except BaseException:  # at a signal, too
        _release(folder, mirror)
        raise
    return Prepared(source, part("plan table")(plan), found, weights, mirror, config.run.resume)


def _applies_once(config: Config) -> bool:
    """Return True if run.resume would discard steps when it is applied again to the same run."""
    return config.run.resume != "auto" and Path(config.run.resume).absolute() != config.run_dir.absolute()


def _check_launch_has_id(config: Config) -> None:
    """Raise RequestError if a restart of this job could not be told from a later job."""
    if _applies_once(config) and supervision.launch_id() == supervision.NO_LAUNCH_ID:
        raise RequestError(
            f"run.resume={config.run.resume} would apply again whenever torchrun restarts the ranks of a job without"
            " an id: name this job with torchrun's --rdzv-id NAME, or leave run.resume out"
        )


def _has_applied_resume(config: Config, journal: Path) -> bool:
    """Return True if this job has applied its run.resume, by the last start in a run's journal.

    torchrun's count of restarts says less: it leaves out nodes that come and go, and a node that
    replaces a lost one counts from 0.
    """
    job = supervision.launch_id()
    if job is None or not _applies_once(config):
        return False
    start = last_event(journal, "started")
    return (start.get("launch"), start.get("resume")) == (job, config.run.resume)


def _config_after_restart(config: Config) -> Config:
    """Return the configuration, with run.resume changed if it was applied earlier in this job.

    A restart resumes from what the run has saved since.
    """
    folder = RunFolder(config.run_dir)
    if not _has_applied_resume(config, folder.journal):
        return config
    resume, used = "auto", last_event(folder.journal, "started")["checkpoint"]
    if config.run.resume != "never" and used:
        from pipeline.train.resume import resume_value_at_restart

        resume = resume_value_at_restart(config.run.resume, used, folder)
    make_terminal(is_main=True).log(
        f"an earlier start of job {supervision.launch_id()} applied run.resume={config.run.resume}: continuing with"
        f" run.resume={resume} (another torchrun --rdzv-id applies it again)"
    )
    return config.replacing("run", resume=resume)


def evaluate(target: str, overrides: list[str], nproc: int | None) -> str | int:
    """Run `pipeline evaluate`; return the done line, or the exit code of the processes started."""
    here = _read_world(nproc)
    part("check target")(target)
    if nproc and nproc > 1:
        return start_processes(nproc, ["evaluate", target, *overrides])
    _prepare_evaluation(Path(target), overrides, here)

    with _freeze_imports():
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


def _prepare_evaluation(target: Path, overrides: list[str], here: World) -> None:
    """Set the variables of a portable run. What a checkpoint says is known only with torch."""
    folder = RunFolder(target if target.is_dir() else target.parent.parent)
    with suppress(OSError, ValueError, RequestError):
        with open(folder.config, encoding="utf-8") as file:
            text = file.read(MAX_YAML_BYTES)
        portable.prepare(from_yaml(text, str(folder.config), overrides), here)


@contextmanager
def _freeze_imports() -> Iterator[None]:
    """Freeze the objects that the block imports, so that the garbage collector never scans them.

    Scanning takes a tenth of a start's time. During training a collection on one rank delays all
    ranks, and in a forked worker it copies every page that it touches.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _read_world(nproc: int | None) -> World:
    """Return this process's place in the job. Raises RequestError for --nproc under a launcher."""
    if nproc is not None and world.is_launched():
        raise RequestError(
            f"--nproc {nproc} with RANK and WORLD_SIZE in the environment: unset them, or leave --nproc out: give"
            " --nproc, or start with torchrun, not both"
        )
    return world.from_environment()


def _check_numa_binding(mode: str, nproc: int | None, here: World) -> None:
    """Raise RequestError if torch could not bind processes: it would end in a traceback."""
    if not nproc or nproc < 2:
        problem, remedy = "is for --nproc N", "give it to torchrun, which has it too, or add --nproc"
    elif not here.has_gpu:
        problem, remedy = "binds to the CPUs next to a GPU, and there is none", "leave it out"
    elif not shutil.which("numactl"):
        problem, remedy = "needs the program numactl", "install it, or leave the option out"
    else:
        return
    raise RequestError(f"--numa-binding {mode} {problem}: {remedy}")


def start_processes(
    nproc: int, arguments: list[str], stop: StopRequest | None = None, numa_binding: str | None = None,
    advice: str = "give the same command again",
) -> int:  # fmt: skip
    """Start `nproc` processes on this machine; return the exit code of the first failure, or 0.

    At a signal, stop them and raise EarlyStopError. They get the signals after that one, too.

    numa_binding: torch's AffinityMode by which a process is bound to CPUs next to its GPU. If torch
    cannot bind it, it logs why, and the process starts unbound. advice: what to do after a crash.
    """
    if stop is None:
        stop = StopRequest()
        stop.listen()
    with stop.raise_on_signal(), _freeze_imports():
        from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch
        from torch.numa.binding import AffinityMode, NumaOptions

    # one line says why a run ended; the agent's own report would bury it
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    rendezvous_handler_registry.register("local", part("local rendezvous"))
    os.environ[LAUNCHER_REPORTS] = "1"
    with tempfile.TemporaryDirectory(prefix="pipeline-ranks-", ignore_cleanup_errors=True) as reports:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=nproc, run_id="local", max_restarts=0, rdzv_backend="local",
            numa_options=NumaOptions(AffinityMode(numa_binding), True) if numa_binding else None,
            logs_specs=DefaultLogsSpecs(reports),  # torch would not remove its own folder
            signals_to_handle="",  # it would take SIGHUP if that is ignored, and kill the ranks at a second signal
        )  # fmt: skip
        try:
            with stop.raise_on_signal(supervision.signal_children):
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
    details = first.error_file_data.get("message")  # a dict if the rank wrote it (supervision.report_to_agent)
    reported = details["message"] if isinstance(details, dict) else None
    # Stopped before its first step (see StopRequest). A rank that left a report had failed before
    # the agent stopped it.
    if -first.exitcode in SIGNALS and reported is None:
        print(f"pipeline: {EarlyStopError()}", file=sys.stderr)
        return TemporaryError.code
    end = f"was killed by signal {-first.exitcode}" if first.exitcode < 0 else f"exited with code {first.exitcode}"
    reason = f"rank {rank} {end}" if reported is None else reported
    print(f"pipeline: {reason}; the other ranks were stopped, {advice}", file=sys.stderr)
    return errors.CRASH
