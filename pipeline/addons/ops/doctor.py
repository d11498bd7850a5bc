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
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline import errors, world
from pipeline.addons.mlflow import tracker
from pipeline.addons.ops import machine
from pipeline.addons.ops.plan_table import table
from pipeline.addons.store import check as store
from pipeline.addons.store import restore
from pipeline.addons.store.bucket import Store
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.data.access import is_bucket
from pipeline.data.sources import Source
from pipeline.errors import RequestError, RunError, TemporaryError
from pipeline.operate import request
from pipeline.plan import Plan
from pipeline.planning import make_plan
from pipeline.record.folder import RunFolder
from pipeline.record.journal import last_event
from pipeline.world import World

_NAMES_TIMEOUT_S = 60
_WARNINGS = (
    "CPUs", "memory", "shared disk", "decoding", "loader", "all-reduce", "artifacts", "initial loss", "one batch",
    "shuffled",
)  # fmt: skip
"""Checks whose failure ends no start."""

Checks = Iterator[tuple[str, Callable[[], str]]]
"""Name and function of each check, which returns a line for the user or raises a RunError."""


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
    with tempfile.TemporaryDirectory() as scratch:
        doctor = Doctor(world.from_environment().resized(processes, nodes), Path(scratch), gpu_images_per_s)
        for name, check in doctor.checks(recipe, overrides, sanity=sanity):
            finding = doctor.run(name, check)
            if not as_json:
                remedy = f": {finding['remedy']}" if finding["remedy"] else ""
                _log(f"{'ok ' if finding['ok'] else 'BAD'} {name:<12} {finding['line']}{remedy}")
    if as_json:
        print(json.dumps({"findings": doctor.findings}))
    if doctor.error:
        raise doctor.error
    return errors.OK if as_json else f"{recipe} can run here"


class Doctor:
    """The checks of a request on this machine, and what they have found so far."""

    config: Config
    folder: RunFolder
    run_folder: RunFolder
    """`folder`, or the state of the run in its mirror, which a start would restore."""

    def __init__(self, here: World, scratch: Path, gpu_images_per_s: int | None) -> None:
        self.here, self.scratch, self.gpu_images_per_s = here, scratch, gpu_images_per_s
        self.source: Source | None = None
        self.plan: Plan | None = None
        self.is_resumed: bool | None = None
        self.error: RunError | None = None
        """The most severe error that ends a start."""
        self.findings: list[dict[str, object]] = []

    def run(self, name: str, check: Callable[[], str]) -> dict[str, object]:
        """Run a check, and return its finding."""
        try:
            finding = {"check": name, "ok": True, "line": check(), "remedy": ""}
        except RunError as error:
            finding = {"check": name, "ok": False, "line": error.problem, "remedy": error.remedy}
            is_warning = name in _WARNINGS or (name == "MLflow" and not self.config.track.required)
            if not is_warning and (self.error is None or isinstance(self.error, TemporaryError)):
                self.error = error  # a permanent error outweighs a temporary one
        self.findings.append(finding)
        return finding

    def checks(self, recipe: str, overrides: list[str], *, sanity: bool) -> Checks:
        """Yield each check: those of a start in their order, then those of a node or a machine.

        Each runs before the next is chosen, so a check that needs what another has found is left
        out if that failed.
        """
        yield "recipe", lambda: self._load(recipe, overrides)
        if self.error:
            return
        yield from self._of_start()
        if "PET_NPROC_PER_NODE" in os.environ:  # set in every node of a job
            yield from self._of_node()
        else:
            yield from self._of_machine()
        if sanity and self.source and self.plan and not self.error:
            from pipeline.addons.ops.sanity import SanityChecks

            brief = SanityChecks(self.config, self.plan, self.source, self.here)
            yield "initial loss", brief.check_initial_loss
            yield "one batch", brief.check_one_batch_overfits
            yield "shuffled", brief.check_shuffled_labels_give_chance

    def _of_start(self) -> Checks:
        config, here = self.config, self.here
        yield "run folder", lambda: request.check_run_folder_is_writable(config, self.folder)
        if config.checkpoint.mirror:
            yield "mirrored run", self._look_into_mirror
        yield "last start", lambda: request.check_previous_start_did_not_fail(config, here, self.run_folder)
        yield "device", lambda: request.check_device(config, here)
        yield "data", self._open_data
        if (source := self.source) and is_bucket(config.data.root):
            yield "data store", lambda: store.check_reads(source.train)
        if place := config.checkpoint.mirror:
            yield "mirror", lambda: store.check_mirror(Store(place))
        if self.source:
            yield "plan", self._make_plan
            yield "resume", self._check_resume
        if self.plan and self.is_resumed is not None:
            yield "model", self._check_model
        yield "GPUs", self._check_gpus

    def _of_node(self) -> Checks:
        """Yield the checks of a node: the others' names, and a tracker, which may still start."""
        end = last_event(self.run_folder.journal)
        is_finished = self.plan and end.get("status") == "FINISHED" and end["step"] >= self.plan.last_step
        done_line = end["line"] if is_finished and not self.error else ""
        endpoint = os.environ.get("PET_RDZV_ENDPOINT")
        if self.here.size > self.here.local_size and endpoint and not done_line:
            yield "names", lambda: check_names_resolve(endpoint)
        yield "MLflow", lambda: tracker.check_server_answers(self.config, self.folder)
        file = os.environ.get("PIPELINE_FINISHED")
        if file and done_line and not self.error:  # the rendezvous of this node then waits for no other
            _log(f"the run is finished: {done_line}")
            Path(file).write_text(done_line, encoding="utf-8")

    def _of_machine(self) -> Checks:
        """Yield the checks of the tracker and this machine. Errors in the request end them."""
        config, folder, here = self.config, self.folder, self.here
        yield "MLflow", self._check_tracker
        has_tracker = self.findings[-1]["ok"]
        yield "CPUs", lambda: machine.check_cpu_per_process(here)
        source, plan = self.source, self.plan
        if self.error or not source or not plan:
            return
        yield "memory", lambda: machine.check_memory(plan)
        yield "shared disk", lambda: machine.check_run_folder_is_shared(config, folder, here)
        yield "disk space", lambda: machine.check_disk_space(config, plan, folder)
        yield "decoding", lambda: machine.check_images_decode(source)
        rate = self.gpu_images_per_s
        if rate or here.uses_gpu(config.run.device):
            yield "loader", lambda: machine.check_loader_feeds_gpus(config, plan, source, here, rate)
        yield "all-reduce", lambda: machine.check_all_reduce(config, here)
        if has_tracker:
            yield "artifacts", lambda: tracker.check_server_stores_files(config, folder)

    def _load(self, recipe: str, overrides: list[str]) -> str:
        self.config = load(recipe, overrides)
        self.folder = self.run_folder = RunFolder(self.config.run_dir)
        return self.config.recipe

    def _look_into_mirror(self) -> str:
        place = str(self.config.checkpoint.mirror)
        resume, copy = self.config.run.resume, self.scratch / "run"
        self.run_folder = restore.view(Store(place), self.folder, resume, copy, _log)
        if self.run_folder is self.folder:
            return f"{place} has nothing newer than {self.folder.path}"
        return f"{place} has the newest state"

    def _open_data(self) -> str:
        uncached = self.config.replacing("data", cache=None)  # a check must not write to it
        self.source = request.open_data(uncached, self.run_folder)
        return self.source.size.describe()

    def _make_plan(self) -> str:
        assert self.source
        self.plan = make_plan(self.config, self.here, self.source.size)
        return f"\n{table(self.plan)}"

    def _check_resume(self) -> str:
        """Check that a start here can resume, and return what it resumes from."""
        config, run = self.config, self.run_folder
        assert self.source
        request.check_config_is_compatible(config, run)
        if run is self.folder and run.lock.is_held():
            self.is_resumed = True
            return "config is compatible with the run in training now"
        from pipeline.train.resume import find  # imports torch

        if run is not self.folder:  # a start restores it, and then resumes from the folder
            config = config.replacing("run", resume="auto")
        found = find(config, run, self.source, _log)
        self.is_resumed = found is not None
        if found is None:
            return "a fresh start"
        if run is self.folder:
            return f"config is compatible with the existing run; resumes from {found.path}"
        return (
            f"config is compatible with the run in {config.checkpoint.mirror}; resumes from {found.path.name}"
        )

    def _check_model(self) -> str:
        from pipeline.addons.ops.model import check_model_builds

        assert self.plan
        check_model_builds(self.config, self.plan, self.here, is_resumed=bool(self.is_resumed))
        return self.config.model.arch

    def _check_gpus(self) -> str:
        if not self.here.has_gpu:
            return "no GPU is visible; training on CPU"
        from pipeline.device import choose_device  # imports torch

        return f"torch can use {choose_device(self.config, self.here)}"

    def _check_tracker(self) -> str:
        try:
            return tracker.check_server_answers(self.config, self.folder)
        except TemporaryError as error:
            if self.config.track.required:  # as `train` does
                raise RequestError(f"track.required=true, and {error.problem}", error.remedy) from None
            raise


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _nodes_from_environment() -> int:
    """Return the largest number of nodes that may form a round (`deploy.node.environment`)."""
    allowed = re.search(r"allowed_nodes=([\d+]+)", os.environ.get("PET_RDZV_CONF", ""))
    return int(allowed[1].split("+")[-1]) if allowed else _size_from_environment("PET_NNODES")


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
    addresses: dict[str, str] = {}
    for name in (socket.getfqdn(), endpoint.rpartition(":")[0] or endpoint):
        while name not in addresses:
            try:
                addresses[name] = socket.gethostbyname(name)
            except OSError as error:
                if time.monotonic() > deadline:
                    problem = (
                        f"the host name {name} does not resolve after {_NAMES_TIMEOUT_S} s ({error.strerror})"
                    )
                    remedy = (
                        "look at the Service (publishNotReadyAddresses, selector) and at the pod's subdomain"
                    )
                    raise TemporaryError(problem, remedy) from None
                time.sleep(1)
    return ", ".join(f"{name} is {address}" for name, address in addresses.items())
