"""`pipeline doctor`: what would go wrong here, before it does. The preflight of a rehearsal's and of a cluster's nodes.

There it makes the checks of a start alone: a node that is replaced is waited for. Asked by a person it also tries the
machine out, and with --sanity the recipe. What training can go on without is named and stops nobody.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple, TypeVar

from pipeline import errors, world
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.data.sources import Source
from pipeline.errors import RequestError, RunError, TemporaryError
from pipeline.plan import DataSize, Plan
from pipeline.preflight import machine as trials
from pipeline.preflight import request as checks
from pipeline.record.folder import RunFolder
from pipeline.world import World

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Finding:
    check: str
    ok: bool
    line: str
    remedy: str = ""


class _Findings:
    """Checks made so far, and the gravest Verdict among them."""

    def __init__(self) -> None:
        self.all: list[Finding] = []
        self.ending: RunError | None = None

    def check(
        self, name: str, look: Callable[[], _Found], describe: Callable[[_Found], str], *, fatal: bool = True
    ) -> _Found | None:
        """What `look` found; None if it raised a Verdict, which then is the ending if it is fatal."""
        try:
            found = look()
        except RunError as ending:
            line, _, remedy = str(ending).rpartition(": ")
            self.all.append(Finding(name, False, line or remedy, remedy if line else ""))
            if fatal and (self.ending is None or isinstance(self.ending, TemporaryError)):
                self.ending = ending  # what no retry mends outweighs what one may
            return None
        self.all.append(Finding(name, True, describe(found)))
        return found


def examine(
    recipe: str,
    overrides: list[str],
    num_processes: int | None,
    num_nodes: int | None,
    *,
    as_json: bool,
    with_sanity: bool = False,
) -> str | int:
    """A line each check; raises the Verdict that a start here would end with.

    Changes nothing but to make the digits, and takes no lock, so it may run beside the training itself. Sizes that are not
    given are those of the node's environment (`operate.node`), else one process.
    """
    nodes = num_nodes or _of_environment("PET_NNODES")
    processes = num_processes or nodes * _of_environment("PET_NPROC_PER_NODE")
    here = world.from_environment().resized(processes, nodes)
    is_node = "PET_NPROC_PER_NODE" in os.environ  # of a job; one of several has an endpoint too
    endpoint = os.environ.get("PET_RDZV_ENDPOINT")
    found = _Findings()
    config = found.check("recipe", lambda: load(recipe, overrides), lambda config: config.recipe)
    if config:
        folder = RunFolder(config.run_dir)
        found.check("run folder", lambda: checks.run_folder(config), lambda _: f"{folder.path} can be written")
        found.check(
            "last start",
            lambda: checks.previous_failure(config, here, folder),
            lambda _: "the previous start did not fail",
        )
        found.check("device", lambda: checks.device(config, here), lambda _: f"run.device={config.run.device}")
        source = found.check("data", lambda: checks.data(config, folder), lambda source: _sizes(source.size))
        plan, resumes = None, None
        if source:
            plan = found.check("plan", lambda: checks.plan(config, here, source), lambda plan: f"\n{plan.table()}")
            resumes = found.check("resumption", lambda: _resumption(config, folder, source), lambda start: start.line)
        if plan and resumes:
            found.check(
                "model", lambda: checks.model(config, plan, is_resumed=resumes.is_resumed), lambda _: config.model.arch
            )
        found.check("GPUs", lambda: checks.gpus(config, here), str)
        if endpoint:
            found.check("names", lambda: checks.names(endpoint), str)
        reached = found.check(
            "MLflow", lambda: _tracker(config, folder, is_node=is_node), str, fatal=config.track.required
        )
        if not is_node:
            _try_out(found, config, here, folder, source, plan, has_tracker=reached is not None)
        if with_sanity and found.ending is None and source and plan:
            from pipeline.preflight import sanity

            for name, trial in sanity.trials(config, plan, source, here):
                found.check(name, trial, str, fatal=False)
    if as_json:
        print(json.dumps({"findings": [asdict(finding) for finding in found.all]}))
    else:
        for finding in found.all:
            mark, remedy = "ok " if finding.ok else "BAD", f": {finding.remedy}" if finding.remedy else ""
            print(f"{mark} {finding.check:<11} {finding.line}{remedy}", file=sys.stderr)
    if found.ending:
        raise found.ending
    return errors.OK if as_json else f"{recipe} can run here"


class _Start(NamedTuple):
    line: str
    is_resumed: bool


def _resumption(config: Config, folder: RunFolder, source: Source) -> _Start:
    """Return what a start here resumes from, once that is checked."""
    checks.changes(config, folder)
    if folder.is_held():
        return _Start("the run is being trained now", is_resumed=True)
    found = checks.resumption(config, folder, source, lambda line: print(line, file=sys.stderr))
    return _Start(f"resumes from {found.path}" if found else "a fresh start", is_resumed=found is not None)


def _tracker(config: Config, folder: RunFolder, *, is_node: bool) -> str:
    try:
        return checks.tracker(config, folder)
    except TemporaryError as error:
        if config.track.required and not is_node:  # a node is tried again: its server may still be starting
            raise RequestError(f"track.required=true, and {error}") from None
        raise


def _try_out(
    found: _Findings,
    config: Config,
    here: World,
    folder: RunFolder,
    source: Source | None,
    plan: Plan | None,
    *,
    has_tracker: bool,
) -> None:
    """What only a trial shows."""

    def tried(name: str, trial: Callable[[], str], *, fatal: bool = False) -> None:
        found.check(name, trial, str, fatal=fatal)

    tried("CPUs", lambda: trials.cpus(here))
    tried("docker", trials.containers)
    if found.ending is None and source and plan:  # what is wrong with the request comes first
        tried("memory", lambda: trials.memory(plan))
        tried("/dev/shm", lambda: trials.shared_memory(plan, here), fatal=True)
        tried("writing", lambda: trials.writing(folder))
        tried("sharing", lambda: trials.sharing(folder, here))
        tried("room", lambda: trials.room(config, plan, folder), fatal=True)
        tried("decoding", lambda: trials.decoding(source))
        tried("exchange", lambda: trials.exchange(config, here))
        if has_tracker:
            tried("artifacts", lambda: trials.artifacts(config, folder))


def _sizes(size: DataSize) -> str:
    return f"{size.train_images:,} images to train, {size.val_images:,} held out, {size.num_classes:,} classes"


def _of_environment(name: str) -> int:
    text = os.environ.get(name, "1")
    if not text.isdecimal() or int(text) < 1:
        raise RequestError(
            f"{name}={text!r} in the environment is not a number of at least 1: give --world and --nodes"
        )
    return int(text)
