"""`pipeline doctor`: report what would go wrong here, without training.

By hand it checks the request and the machine. As the preflight of a node, in a rehearsal or on a
cluster, it runs only the checks of a start, because the other nodes wait for a node that is
replaced. A problem that training can work around is reported but does not fail.
"""

import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from pipeline import errors, launcher
from pipeline.addons.datasets.place import open_data
from pipeline.addons.deploy.takeover import REFRESH_S
from pipeline.addons.mlflow import tracker
from pipeline.addons.ops import machine
from pipeline.addons.ops.plan_table import table
from pipeline.addons.store import lease, restore
from pipeline.addons.store.bucket import Store
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.data.interface import Source
from pipeline.errors import RequestError, RunError, TemporaryError
from pipeline.lazy import addon
from pipeline.operate import request
from pipeline.plan import Plan
from pipeline.planning import make_plan
from pipeline.record.folder import RunFolder
from pipeline.record.journal import last_event
from pipeline.streams import log
from pipeline.world import World

_NAMES_TIMEOUT_S = 60
_LOG_EVERY_S = 30
_FRESH_START = "a fresh start"
T = TypeVar("T")


def examine(
    recipe: str, overrides: list[str], num_processes: int | None, num_nodes: int | None, *, as_json: bool
) -> str | int:
    """Run all checks, print a line after each; raise the error that a start here would end with.

    Changes nothing, except that it makes the digits if they are missing. It takes no lock, so it
    can run during training. Sizes not given come from the node's environment (`deploy.node`); the
    default is one process on one node.
    """
    nodes = num_nodes
    if nodes is None:  # the largest number that may form a round
        allowed = re.search(r"allowed_nodes=([\d+]+)", os.environ.get("PET_RDZV_CONF", ""))
        nodes = int(allowed[1].split("+")[-1]) if allowed else _size_from_environment("PET_NNODES")
    processes = num_processes or nodes * _size_from_environment("PET_NPROC_PER_NODE")
    here = launcher.this_world().resized(processes, nodes)
    findings = Findings(is_quiet=as_json)
    config = findings.check("recipe", lambda: load(recipe, overrides), lambda config: config.recipe)
    if config:
        with tempfile.TemporaryDirectory() as scratch:
            _check_request(findings, config, here, Path(scratch))
    if as_json:
        print(json.dumps({"findings": findings.rows}))
    if findings.error:
        raise findings.error
    return errors.OK if as_json else f"{recipe} can run here"


class Findings:
    """The findings of the checks so far, and the error that they end with."""

    def __init__(self, *, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self.rows: list[dict[str, object]] = []
        self.error: RunError | None = None  # the most severe one that ends a start

    def check(
        self, name: str, check: Callable[[], T], text: Callable[[T], str] = str, *, is_warning: bool = False
    ) -> T | None:
        """Run a check; return its result, or None if it raised a RunError.

        text: makes a line for the user of the result. is_warning: a failure ends no start.
        """
        result, failure = None, None
        try:
            result = check()
            line = text(result)
        except RunError as error:
            failure, line = error, error.problem
            if not is_warning and (self.error is None or isinstance(self.error, TemporaryError)):
                self.error = error  # a permanent error outweighs a temporary one
        remedy = failure.remedy if failure else ""
        self.rows.append({"check": name, "ok": not failure, "line": line, "remedy": remedy})
        if not self._is_quiet:
            log(f"{'BAD' if failure else 'ok '} {name:<12} {failure or line}")
        return result


def _check_request(findings: Findings, config: Config, here: World, scratch: Path) -> None:
    """Run the checks of a start in their order, then those of a node or a machine.

    A check that needs what another has found is left out if that failed.
    """
    check, mirror = findings.check, config.checkpoint.mirror
    folder = run_folder = RunFolder(config.run_dir)
    check("run folder", lambda: request.check_run_folder_is_writable(config, folder))
    if _is_node_0():
        _wait_for_former_node_0(folder)
    if mirror:
        newest = check(
            "mirrored run",
            lambda: restore.view(Store(mirror), folder, config.run.resume, scratch / "run"),
            lambda found: f"the newest state is in {folder.path if found is folder else mirror}",
        )
        run_folder = newest or folder
    check("last start", lambda: request.check_previous_start_did_not_fail(config, here, run_folder))
    check("device", lambda: request.check_device(config, here))
    uncached = config.replacing("data", cache=None)  # a check must not write to it
    source = check("data", lambda: open_data(uncached, run_folder), lambda found: found.size.describe())
    if mirror:
        check("mirror", lambda: lease.check_mirror(Store(mirror)))
    plan = resume = None
    if source:
        plan = check("plan", lambda: make_plan(config, here, source.size), lambda found: f"\n{table(found)}")
        resume = check("resume", lambda: _check_resume(config, folder, run_folder, source))
    if source and plan and resume:
        settings = {"is_resumed": resume != _FRESH_START, "classes": source.classes}
        builds = addon("ops.model").check_model_builds  # imports torch
        check("model", lambda: builds(config, plan, here, **settings), lambda _: config.model.arch)
    check("GPUs", lambda: _check_gpus(config, here))
    if "PET_NPROC_PER_NODE" in os.environ:  # set in every node of a job
        _check_node(findings, config, here, run_folder.journal, plan)
        return
    has_tracker = _check_tracker(findings, config, is_started=True)
    check("CPUs", lambda: machine.check_cpu_per_process(here), is_warning=True)
    if source and plan and not findings.error:
        _check_machine(findings, config, here, source, plan)
        if has_tracker:
            check("artifacts", lambda: tracker.check_server_stores_files(config, folder), is_warning=True)


def _check_node(findings: Findings, config: Config, here: World, journal: Path, plan: Plan | None) -> None:
    """Check the other nodes' names, and the tracker, which may still start."""
    end = last_event(journal)
    best = (end.get("best") or {"step": end.get("step")})["step"]
    is_finished = plan and end.get("status") == "FINISHED" and plan.is_over(end["step"], best)
    done_line = end["line"] if is_finished and not findings.error else ""
    endpoint = os.environ.get("PET_RDZV_ENDPOINT")
    if here.size > here.local_size and endpoint and not done_line:
        findings.check("names", lambda: check_names_resolve(endpoint))
    _check_tracker(findings, config)
    file = os.environ.get("PIPELINE_FINISHED")
    if file and done_line and not findings.error:  # the rendezvous of this node then waits for no other
        log(f"the run is finished: {done_line}")
        if _is_node_0():  # the node that finished it may have been lost before it had sent all
            from pipeline.addons.mlflow.sender import send_due  # imports torch

            send_due(config, RunFolder(config.run_dir), log, lambda: None)
        Path(file).write_text(done_line, encoding="utf-8")


def _is_node_0() -> bool:
    host, _, port = os.environ.get("PET_RDZV_ENDPOINT", "").rpartition(":")
    return bool(port) and host.partition(".")[0] == socket.gethostname().partition(".")[0]


def _wait_for_former_node_0(folder: RunFolder) -> None:
    """Wait while the node that this one replaces trains on: it may have lost only its API server.

    The other nodes are with it. It ends the run, or releases its lock, or is lost, too, and no
    longer refreshes the lock.
    """
    last = 0.0
    while folder.lock.is_held() and folder.lock.is_fresh():
        if time.monotonic() > last + _LOG_EVERY_S:
            log(f"{folder.lock.subject} is held by {folder.lock.holder()}: waiting for its end")
            last = time.monotonic()
        time.sleep(REFRESH_S)


def _check_machine(findings: Findings, config: Config, here: World, source: Source, plan: Plan) -> None:
    warn = partial(findings.check, is_warning=True)
    folder, on_gpu = RunFolder(config.run_dir), here.uses_gpu(config.run.device)
    warn("memory", lambda: machine.check_memory(plan, on_gpu=on_gpu))
    warn("shared disk", lambda: machine.check_run_folder_is_shared(config, folder, here))
    findings.check("disk space", lambda: machine.check_disk_space(config, plan, folder))
    warn("decoding", lambda: machine.check_images_decode(config, source, plan, here))
    warn("all-reduce", lambda: machine.check_all_reduce(config, here))


def _check_resume(config: Config, folder: RunFolder, run_folder: RunFolder, source: Source) -> str:
    """Check that a start here can resume, and return what it resumes from."""
    request.check_config_is_compatible(config, run_folder)
    if run_folder.lock.is_held():
        return "config is compatible with the run in training now"
    from pipeline.operate.resume import find  # imports torch

    place = str(folder.path)
    if run_folder is not folder:  # a start restores it, and then resumes from the folder
        place, config = str(config.checkpoint.mirror), config.replacing("run", resume="auto")
    found = find(config, run_folder, source, log)
    if not found:
        return _FRESH_START
    return f"config is compatible with the run in {place}; resumes from {found.path.name}"


def _check_gpus(config: Config, here: World) -> str:
    if not here.has_gpu:
        return "no GPU is visible; training on CPU"
    from pipeline.device import choose_device  # imports torch

    return f"torch can use {choose_device(config, here)}"


def _check_tracker(findings: Findings, config: Config, *, is_started: bool = False) -> bool:
    """Check the MLflow server; return True if it answers. is_started: it should be there by now."""

    def check() -> str:
        try:
            return tracker.check_server_answers(config, RunFolder(config.run_dir))
        except TemporaryError as error:
            if is_started and config.track.required:  # as `train` does
                raise RequestError(f"track.required=true, and {error.problem}", error.remedy) from None
            raise

    return findings.check("MLflow", check, is_warning=not config.track.required) is not None


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
    deadline = time.monotonic() + _NAMES_TIMEOUT_S
    names = (socket.getfqdn(), endpoint.rpartition(":")[0] or endpoint)
    while True:
        try:
            found = []
            for name in names:
                found.append(f"{name} is {socket.gethostbyname(name)}")
            return ", ".join(found)
        except OSError as error:
            if time.monotonic() > deadline:
                problem = f"the host name {name} does not resolve ({error.strerror})"
                remedy = "look at the Service (publishNotReadyAddresses, selector) and the pod's subdomain"
                raise TemporaryError(problem, remedy) from None
            time.sleep(1)
