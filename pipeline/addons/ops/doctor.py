"""`pipeline doctor`: report what would go wrong here, without training.

By hand it checks the request and the machine, and with --sanity the recipe. As the preflight of a
node, in a rehearsal or on a cluster, it runs only the checks of a start, because the other nodes
wait for a node that is replaced. A problem that training can work around is reported but does not
fail.
"""

import json
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from pipeline import errors, world
from pipeline.addons.mlflow import tracker
from pipeline.addons.ops import machine
from pipeline.addons.ops.model import check_model_builds
from pipeline.addons.ops.plan_table import table
from pipeline.addons.store import check as store
from pipeline.addons.store import restore
from pipeline.addons.store.bucket import Store
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.data.access import is_bucket
from pipeline.data.sources import Source
from pipeline.errors import RequestError, RunError, TemporaryError
from pipeline.plan import Plan
from pipeline.planning import make_plan
from pipeline.preflight import request
from pipeline.record.folder import RunFolder
from pipeline.world import World

_Result = TypeVar("_Result")
_NAMES_TIMEOUT_S = 60


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

    def run(
        self, name: str, check: Callable[[], _Result], describe: Callable[[_Result], str] = str, *, fatal: bool = True
    ) -> _Result | None:
        """Run a check and add its finding; return its result, or None if it raised a RunError."""
        try:
            result = check()
        except RunError as error:
            self._add(Finding(name, False, error.problem, error.remedy))
            if fatal and (self.error is None or isinstance(self.error, TemporaryError)):
                self.error = error  # a permanent error outweighs a temporary one
            return None
        self._add(Finding(name, True, describe(result)))
        return result

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
            _log(f"{mark} {finding.check:<12} {finding.line}{remedy}")


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
    report = _Report(as_json=as_json)
    config = report.run("recipe", lambda: load(recipe, overrides), lambda config: config.recipe)
    if not config:
        return report.finish("")
    folder, scratch = RunFolder(config.run_dir), tempfile.TemporaryDirectory()
    run, source, plan = _check_request(report, config, folder, here, Path(scratch.name))
    if "PET_NPROC_PER_NODE" in os.environ:  # set in every node of a job
        _check_node(report, config, folder, run, plan, nodes)
    else:
        _check_machine(report, config, folder, here, source, plan, gpu_images_per_s)
    if sanity and report.error is None and source and plan:
        _check_that_it_learns(report, config, plan, source, here)
    return report.finish(f"{recipe} can run here")


def _check_request(
    report: _Report, config: Config, folder: RunFolder, here: World, scratch: Path
) -> tuple[RunFolder, Source | None, Plan | None]:
    """Run the checks of a start. Return the folder that it resumes from, the data and the plan."""
    report.run("run folder", lambda: request.check_run_folder_is_writable(config, folder))
    run = _folder_to_resume(report, config, folder, scratch)
    report.run("last start", lambda: request.check_previous_start_did_not_fail(config, here, run))
    report.run("device", lambda: request.check_device(config, here))
    uncached = config.replacing("data", cache=None)  # a check must not write to it
    source = report.run("data", lambda: request.open_data(uncached, run), lambda source: source.size.describe())
    if source and is_bucket(config.data.root):
        report.run("data store", lambda: store.check_reads(source.train))
    if mirror_place := config.checkpoint.mirror:
        report.run("mirror", lambda: store.check_mirror(Store(mirror_place)))
    plan, resume = None, None
    if source:
        plan = report.run("plan", lambda: make_plan(config, here, source.size), lambda plan: f"\n{table(plan)}")
        resume = report.run("resume", lambda: _check_resume(config, folder, run, source), lambda resume: resume[0])
    if plan and resume:
        build = partial(check_model_builds, config, plan, here, is_resumed=resume[1])
        report.run("model", build, lambda _: config.model.arch)
    report.run("GPUs", lambda: request.check_gpus_are_supported(config, here))
    return run, source, plan


def _check_node(
    report: _Report, config: Config, folder: RunFolder, run: RunFolder, plan: Plan | None, nodes: int
) -> None:
    """Check what a node of a job needs: the others' names, and a tracker, which may still start."""
    done_line = request.finished_line(plan, run) if plan and report.error is None else None
    if nodes > 1 and (endpoint := os.environ.get("PET_RDZV_ENDPOINT")) and not done_line:
        report.run("names", lambda: check_names_resolve(endpoint))
    report.run("MLflow", lambda: tracker.check_server_answers(config, folder), fatal=config.track.required)
    file = os.environ.get("PIPELINE_FINISHED")
    if file and done_line and report.error is None:  # the rendezvous of this node then waits for no other
        _log(f"the run is finished: {done_line}")
        Path(file).write_text(done_line, encoding="utf-8")


def _check_machine(
    report: _Report, config: Config, folder: RunFolder, here: World, source: Source | None, plan: Plan | None,
    gpu_images_per_s: int | None,
) -> None:  # fmt: skip
    """Check the tracker and this machine. Errors in the request come first, and end the checks."""
    answer = report.run("MLflow", lambda: _check_tracker(config, folder), fatal=config.track.required)
    report.run("CPUs", lambda: machine.check_cpu_per_process(here), fatal=False)
    if report.error or not source or not plan:
        return
    report.run("memory", lambda: machine.check_memory(plan), fatal=False)
    report.run("disk speed", lambda: machine.check_disk_speed(folder), fatal=False)
    report.run("shared disk", lambda: machine.check_run_folder_is_shared(config, folder, here), fatal=False)
    report.run("disk space", lambda: machine.check_disk_space(config, plan, folder))
    report.run("decoding", lambda: machine.check_images_decode(source), fatal=False)
    if gpu_images_per_s or here.uses_gpu(config.run.device):
        feeds = partial(machine.check_loader_feeds_gpus, config, plan, source, here, gpu_images_per_s)
        report.run("loader", feeds, fatal=False)
    report.run("all-reduce", lambda: machine.check_all_reduce(config, here), fatal=False)
    if answer is not None:
        report.run("artifacts", lambda: tracker.check_server_stores_files(config, folder), fatal=False)


def _check_that_it_learns(report: _Report, config: Config, plan: Plan, source: Source, here: World) -> None:
    from pipeline.addons.ops.sanity import SanityChecks

    checks = SanityChecks(config, plan, source, here)
    report.run("initial loss", checks.check_initial_loss, fatal=False)
    report.run("one batch", checks.check_one_batch_overfits, fatal=False)
    report.run("shuffled", checks.check_shuffled_labels_give_chance, fatal=False)


def _folder_to_resume(report: _Report, config: Config, folder: RunFolder, scratch: Path) -> RunFolder:
    """Return the run's folder, or `scratch` with what a start would take from its mirror."""
    place = config.checkpoint.mirror
    if not place:
        return folder

    def look() -> RunFolder:
        return restore.view(Store(place), folder, config.run.resume, scratch / "run", _log)

    def describe(run: RunFolder) -> str:
        return f"{place} has nothing newer than {folder.path}" if run is folder else f"{place} has the newest state"

    return report.run("mirrored run", look, describe) or folder


def _check_resume(config: Config, folder: RunFolder, run: RunFolder, source: Source) -> tuple[str, bool]:
    """Return what a start here resumes from, after checking that it can, and if it resumes.

    run: `folder`, or what a start would take from its mirror.
    """
    request.check_config_is_compatible(config, run)
    if run is folder and folder.lock.is_held():
        return "config is compatible with the run in training now", True
    from pipeline.train.resume import find  # imports torch

    if run is not folder:  # a start restores it, and then resumes from `folder`
        config = config.replacing("run", resume="auto")
    found = find(config, run, source, _log)
    if found is None:
        return "a fresh start", False
    if run is folder:
        return f"config is compatible with the existing run; resumes from {found.path}", True
    place = config.checkpoint.mirror
    return f"config is compatible with the run in {place}; resumes from {found.path.name}", True


def _check_tracker(config: Config, folder: RunFolder) -> str:
    try:
        return tracker.check_server_answers(config, folder)
    except TemporaryError as error:
        if config.track.required:  # as `train` does
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


def check_names_resolve(endpoint: str) -> str:
    """Check that this node's host name and that of the rendezvous `endpoint` (HOST:PORT) resolve.

    Waits up to a minute: Kubernetes gives pods their names one after another.
    """
    rendezvous = endpoint.rpartition(":")[0] or endpoint
    deadline = time.monotonic() + _NAMES_TIMEOUT_S
    addresses: dict[str, str] = {}
    for name in (socket.getfqdn(), rendezvous):
        while name not in addresses:
            try:
                addresses[name] = socket.gethostbyname(name)
            except OSError as error:
                if time.monotonic() > deadline:
                    problem = f"the host name {name} does not resolve after {_NAMES_TIMEOUT_S} s ({error.strerror})"
                    remedy = "look at the Service (publishNotReadyAddresses, selector) and at the pod's subdomain"
                    raise TemporaryError(problem, remedy) from None
                time.sleep(1)
    return ", ".join(f"{name} is {address}" for name, address in addresses.items())
