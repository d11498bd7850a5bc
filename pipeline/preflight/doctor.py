"""`pipeline doctor`: report what would go wrong here, without training.

By hand it checks the request and the machine, and with --sanity the recipe. As the preflight of a
node, in a rehearsal or on a cluster, it runs only the checks of a start, because the other nodes
wait for a node that is replaced. A problem that training can work around is reported but does not
fail.
"""

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from pipeline import errors, world
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.data.sources import Source
from pipeline.data.store import Store, is_store
from pipeline.errors import RequestError, RunError, TemporaryError
from pipeline.plan import Plan, make_plan
from pipeline.preflight import machine, request, store, tracker
from pipeline.record import mirror
from pipeline.record.folder import RunFolder

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Finding:
    check: str
    ok: bool
    line: str
    remedy: str = ""


class _Report:
    """Findings so far, printed as they are made, and the most severe fatal error."""

    def __init__(self, *, as_json: bool) -> None:
        self.findings: list[Finding] = []
        self.error: RunError | None = None
        self._as_json = as_json
        self._is_live = sys.stderr.isatty() and not as_json
        self._live_line = ""

    def run(
        self, name: str, check: Callable[[], _Result], describe: Callable[[_Result], str] = str, *, fatal: bool = True
    ) -> _Result | None:
        """Run a check and add its finding; return its result, or None if it raised a RunError."""
        if self._is_live:
            self._live_line = f"… {name}"
            print(self._live_line, end="", file=sys.stderr, flush=True)
        try:
            result = check()
        except RunError as error:
            self._add(Finding(name, False, error.problem, error.remedy))
            if fatal and (self.error is None or isinstance(self.error, TemporaryError)):
                self.error = error  # a permanent error outweighs a temporary one
            return None
        except KeyboardInterrupt:
            self.log(f"stopped during: {name}")
            raise
        self._add(Finding(name, True, describe(result)))
        return result

    def log(self, text: str) -> None:
        """Print a line; on a terminal, it replaces the name of the check that is running."""
        erase = f"\r{' ' * len(self._live_line)}\r" if self._live_line else ""
        self._live_line = ""
        print(f"{erase}{text}", file=sys.stderr, flush=True)

    def finish(self, result: str) -> str | int:
        """Return the result, or with --json print the findings. Raises the most severe error."""
        if self._as_json:
            print(json.dumps({"findings": [asdict(finding) for finding in self.findings]}))
        if self.error:
            raise self.error
        return errors.OK if self._as_json else result

    def _add(self, finding: Finding) -> None:
        self.findings.append(finding)
        if not self._as_json:
            mark, remedy = "ok " if finding.ok else "BAD", f": {finding.remedy}" if finding.remedy else ""
            self.log(f"{mark} {finding.check:<12} {finding.line}{remedy}")


def examine(
    recipe: str, overrides: list[str], num_processes: int | None, num_nodes: int | None, *,
    as_json: bool, sanity: bool, gpu_images_per_s: int | None = None,
) -> str | int:  # fmt: skip
    """Run all checks, print a line after each; raise the error that a start here would end with.

    Changes nothing, except that it makes the digits if they are missing. It takes no lock, so it
    can run during training. Sizes not given come from the node's environment (`deploy.node`); the
    default is one process on one node. gpu_images_per_s: see `machine.check_loader_feeds_gpus`.
    """
    nodes = num_nodes or _nodes_from_environment()
    processes = num_processes or nodes * _size_from_environment("PET_NPROC_PER_NODE")
    here = world.from_environment().resized(processes, nodes)
    is_node = "PET_NPROC_PER_NODE" in os.environ  # set in every node of a job
    report = _Report(as_json=as_json)
    config = report.run("recipe", lambda: load(recipe, overrides), lambda config: config.recipe)
    if config:
        folder = RunFolder(config.run_dir)
        report.run("run folder", lambda: request.check_run_folder_is_writable(config, folder))
        scratch = tempfile.TemporaryDirectory()
        run = _folder_to_resume(report, config, folder, Path(scratch.name))
        report.run("last start", lambda: request.check_previous_start_did_not_fail(config, here, run))
        report.run("device", lambda: request.check_device(config, here))
        uncached = config.replacing("data", cache=None)  # a check must not write to it
        source = report.run("data", lambda: request.open_data(uncached, run), lambda source: source.size.describe())
        _check_stores(report, config, source)
        plan, resume = None, None
        if source:
            plan = report.run("plan", lambda: make_plan(config, here, source.size), lambda plan: f"\n{plan.table()}")
            resume = report.run(
                "resume", lambda: _check_resume(config, folder, run, source, report.log), lambda resume: resume.line
            )
        if plan and resume:
            build = partial(request.check_model_builds, config, plan, here, is_resumed=resume.is_resumed)
            report.run("model", build, lambda _: config.model.arch)
        report.run("GPUs", lambda: request.check_gpus_are_supported(config, here))
        done_line = request.finished_line(plan, run) if is_node and plan and report.error is None else None
        if nodes > 1 and (endpoint := os.environ.get("PET_RDZV_ENDPOINT")) and not done_line:
            report.run("names", lambda: request.check_names_resolve(endpoint))
        answer = report.run("MLflow", lambda: _check_tracker(config, folder, is_node), fatal=config.track.required)
        if is_node and report.error is None:
            _tell_the_rendezvous(done_line)
        if not is_node:
            report.run("CPUs", lambda: machine.check_cpu_per_process(here), fatal=False)
            report.run("docker", machine.check_docker, fatal=False)
        if not is_node and report.error is None and source and plan:  # errors in the request come first
            _check_machine(report, config, plan, source, folder, here, gpu_images_per_s)
            if answer is not None:
                report.run("artifacts", lambda: tracker.check_server_stores_files(config, folder), fatal=False)
        if sanity and report.error is None and source and plan:
            _check_that_it_learns(report, config, plan, source, here)
    return report.finish(f"{recipe} can run here")


def _check_machine(
    report: _Report, config: Config, plan: Plan, source: Source, folder: RunFolder, here: world.World,
    gpu_images_per_s: int | None,
) -> None:  # fmt: skip
    report.run("memory", lambda: machine.check_memory(plan), fatal=False)
    report.run("/dev/shm", lambda: machine.check_shared_memory_exists(plan, here))
    report.run("disk speed", lambda: machine.check_disk_speed(folder), fatal=False)
    report.run("shared disk", lambda: machine.check_run_folder_is_shared(config, folder, here), fatal=False)
    report.run("disk space", lambda: machine.check_disk_space(config, plan, folder))
    report.run("decoding", lambda: machine.check_images_decode(source), fatal=False)
    if gpu_images_per_s or here.uses_gpu(config.run.device):
        feeds = partial(machine.check_loader_feeds_gpus, config, plan, source, here, gpu_images_per_s)
        report.run("loader", feeds, fatal=False)
    report.run("all-reduce", lambda: machine.check_all_reduce(config, here), fatal=False)


def _check_stores(report: _Report, config: Config, source: Source | None) -> None:
    """Check the buckets that the request names."""
    if source and is_store(config.data.root):
        report.run("data store", lambda: store.check_reads(source.train))
    if mirror := config.checkpoint.mirror:
        report.run("mirror", lambda: store.check_mirror(Store(mirror)))


def _check_that_it_learns(report: _Report, config: Config, plan: Plan, source: Source, here: world.World) -> None:
    from pipeline.preflight.sanity import SanityChecks

    checks = SanityChecks(config, plan, source, here)
    report.run("initial loss", checks.check_initial_loss, fatal=False)
    report.run("one batch", checks.check_one_batch_overfits, fatal=False)
    report.run("shuffled", checks.check_shuffled_labels_give_chance, fatal=False)


def _tell_the_rendezvous(done_line: str | None) -> None:
    """Write the `done` line for the rendezvous of this node, which then waits for no other node."""
    file = os.environ.get("PIPELINE_FINISHED")
    if file and done_line:
        print(f"the run is finished: {done_line}", file=sys.stderr, flush=True)
        Path(file).write_text(done_line, encoding="utf-8")


class _Resume(NamedTuple):
    line: str
    is_resumed: bool


def _folder_to_resume(report: _Report, config: Config, folder: RunFolder, scratch: Path) -> RunFolder:
    """Return the run's folder, or `scratch` with what a start would take from its mirror."""
    place = config.checkpoint.mirror
    if not place:
        return folder

    def look() -> RunFolder:
        return mirror.view(Store(place), folder, config.run.resume, scratch / "run", report.log)

    def describe(run: RunFolder) -> str:
        return f"{place} has nothing newer than {folder.path}" if run is folder else f"{place} has the newest state"

    return report.run("mirrored run", look, describe) or folder


def _check_resume(
    config: Config, folder: RunFolder, run: RunFolder, source: Source, log: Callable[[str], None]
) -> _Resume:
    """Return what a start here resumes from, after checking that it can.

    run: `folder`, or what a start would take from its mirror.
    """
    request.check_config_is_compatible(config, run)
    if run is folder and folder.is_held():
        return _Resume("config is compatible with the run in training now", is_resumed=True)
    from pipeline.train.resume import find  # imports torch

    if run is not folder:  # a start restores it, and then resumes from `folder`
        config = config.replacing("run", resume="auto")
    found = find(config, run, source, log)
    if found is None:
        return _Resume("a fresh start", is_resumed=False)
    place = "existing run" if run is folder else f"run in {config.checkpoint.mirror}"
    origin = found.path if run is folder else found.path.name
    return _Resume(f"config is compatible with the {place}; resumes from {origin}", is_resumed=True)


def _check_tracker(config: Config, folder: RunFolder, is_node: bool) -> str:
    try:
        return tracker.check_server_answers(config, folder)
    except TemporaryError as error:
        if config.track.required and not is_node:  # a node is retried: its server may still be starting
            raise RequestError(f"track.required=true, and {error.problem}", error.remedy) from None
        raise


def _nodes_from_environment() -> int:
    """Return the largest number of nodes that may form a round (`deploy.node.environment`)."""
    allowed = re.search(r"allowed_nodes=([\d+]+)", os.environ.get("PET_RDZV_CONF", ""))
    if allowed:
        return int(allowed[1].split("+")[-1])
    return _size_from_environment("PET_NNODES")


def _size_from_environment(name: str) -> int:
    text = os.environ.get(name, "1")
    if not text.isdecimal() or int(text) < 1:
        problem = f"{name}={text!r} in the environment is not a whole number of at least 1"
        raise RequestError(problem, "give --world and --nodes")
    return int(text)
