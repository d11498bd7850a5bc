"""The start of a rank: what it trains, and from which state, is settled here. Then it trains.

`operate.launch` has checked the request without torch and, on rank 0, taken the folder's lock. Rank
0 then chooses what to resume from. Once the group has formed, all ranks compare their requests,
and get rank 0's index of the data and its checkpoint: file systems may list differently.
`train.session` gets complete values. It changes only what the built model shows: passes that fit
into the memory, and whether compiling repays.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeline.config.schema import Config
from pipeline.data.interface import Source
from pipeline.device import choose_device, make_timer
from pipeline.errors import RequestError, RunError
from pipeline.group import JOIN_ADVICE, Group
from pipeline.guards.signals import StopRequest
from pipeline.guards.watchdog import COMPILATION_S, Watchdog
from pipeline.lazy import addon
from pipeline.operate.early_stop import exit_on_signal, raise_on_signal
from pipeline.operate.request import Checked
from pipeline.operate.resume import VerifiedCheckpoint, broadcast_contents, find, set_aside
from pipeline.operate.torch_settings import configure_torch
from pipeline.plan import Plan
from pipeline.planning import divide_resources, make_plan, request_digest
from pipeline.record.failure import saving_failure
from pipeline.record.folder import RunFolder
from pipeline.record.terminal import make_terminal
from pipeline.supervision import launch_id
from pipeline.train import session
from pipeline.train.job import Job, Process, Settled
from pipeline.world import World

# A hang is reported by the first of three that sees it: a collective on the host (run.timeout), the
# watchdog (+ _MARGIN_S), and NCCL's own, which ends the process without a line of ours.
_MARGIN_S = 10
_GPU_MARGIN_S = 120  # the watchdog's margin and the part of a step between a collective and its last progress
_RESTORE_S = 3600  # in which rank 0 may download a run from its mirror before it joins


def run_rank(
    config: Config, world: World, folder: RunFolder, stop: StopRequest,
    checked: Checked | None = None, mirror: Any = None,
) -> str:  # fmt: skip
    """Train as one process of `world`; return the result line. Raises a RunError without one.

    checked: what rank 0 has found without torch; mirror: what it has opened. Other ranks have none.
    """
    rank = Rank(config, world, folder, stop)
    rank.watchdog.start()
    try:
        # no name here refers to what is settled, so that training keeps no checkpoint in memory
        trainer = session.set_up(rank.settle(checked, mirror))
        return session.finish(trainer, session.train_to_end(trainer))
    finally:
        rank.watchdog.stop()


class Rank:
    """A process of a run whose group has not formed."""

    def __init__(self, config: Config, world: World, folder: RunFolder, stop: StopRequest) -> None:
        self._config, self._world, self._folder, self._stop = config, world, folder, stop
        self._terminal = make_terminal(is_main=world.is_main)
        # longer than a collective may take, so that a collective that fails reports its own error
        timeout_s = config.run.timeout + _MARGIN_S
        stacks = folder.path / f"hang-rank-{world.rank}.txt"
        self.watchdog = Watchdog(timeout_s, stacks, world.rank, stop, folder.check_ours)

    def settle(self, checked: Checked | None, mirror: Any) -> Settled:
        """Return what to train, from which state. All processes of the run call it together."""
        config, world, folder, stop = self._config, self._world, self._folder, self._stop
        # rank 0 decides here, while the others wait for it in `join`
        found, weights = self._decide(checked, mirror) if checked else (None, None)
        request = request_digest(config, world)
        saving = partial(saving_failure, config, folder, request, self._terminal.log)
        # waiting for peers is native code, in which no exception can be raised: exit
        leaving = (exit_on_signal if world.size > 1 else raise_on_signal)(stop)
        with saving(), leaving, self.watchdog.allow_pause(_RESTORE_S):
            group = join(config, world)
        if not group.is_main:
            folder.lock.join_holder()  # takes no lock: stops writing if another start takes rank 0's
        group.set_device_timeout(config.run.timeout + COMPILATION_S + _GPU_MARGIN_S)
        process = Process(group, self._terminal, make_timer(group.device), self.watchdog, stop)
        with saving():
            # before any weight exists, all agree on the request, the data and the plan
            check_same_request(config, group)
            source = broadcast_source(config, group, checked.source if checked else None)
            job = Job(config, agree_on_plan(config, group, source), source, folder, request)
            if config.run.resume == "never":  # on rank 0 a restart of the job may have replaced it
                is_fresh = checked is not None and checked.config.run.resume == "never"
                group.raise_together(self._set_aside() if is_fresh else None)
            # rank 0 alone has read the checkpoint; the others get its bytes
            contents = broadcast_contents(found, group)
        return Settled(job, process, contents, found.path if found else None, weights, mirror)

    def _set_aside(self) -> RunError | None:
        """Move an earlier run's files into a subfolder; return the error if that fails."""
        try:
            aside = set_aside(self._folder)
        except RunError as error:
            return error
        moved = f"moved the contents of {self._folder.path} to {aside}"
        self._terminal.show(moved if aside else "a fresh start")
        return None

    def _decide(
        self, checked: Checked, mirror: Any
    ) -> tuple[VerifiedCheckpoint | None, dict[str, Tensor] | None]:
        """Return what rank 0 resumes from, or else the first weights if model.init names some.

        Raises EarlyStopError at a signal. It changes nothing: if a check fails, the launcher ends
        the others.
        """
        config, folder, terminal = checked.config, self._folder, self._terminal
        try:
            with raise_on_signal(self._stop):
                choose_device(config, self._world)
                found = find(config, folder, checked.source, terminal.log)
                check = partial(addon("ops.model").check_model_builds, classes=checked.source.classes)
                weights = check(config, checked.plan, self._world, is_resumed=bool(found))
        except BaseException:
            if mirror:
                mirror.close()
            raise
        table = addon("ops.plan_table").table(checked.plan)
        terminal.show(f"{config.recipe} in {folder.path}\n{table}")
        return found, weights


def join(config: Config, world: World) -> Group:
    """Configure torch, choose the device and join the process group."""
    if addon("run.portable").portability(config, world)[0]:
        addon("run.portable").use_exact_roots()
    configure_torch(
        deterministic=config.is_deterministic_on("cuda" if world.uses_gpu(config.run.device) else "cpu"),
        # NCCL's order is fixed for run.deterministic alone: sums of integers need none
        any_order=config.run.exact or not config.run.deterministic,
        precision=config.train.precision,
        threads=divide_resources(config, world).threads,
    )
    if world.size > 1 and launch_id() is None:
        waiting = f"rank {world.rank} of {world.size} waits for the other processes"
        make_terminal(is_main=True).log(f"{waiting}: {JOIN_ADVICE}")
    return form_group(config, world, choose_device(config, world))


def form_group(config: Config, world: World, device: torch.device) -> Group:
    """Join and return the process group.

    Raises TemporaryError if a peer does not come, RequestError if two processes have the same GPU.
    """
    if world.size == 1:
        return Group(world, device)
    group = Group(world, device, config.run.timeout, _RESTORE_S if config.checkpoint.mirror else 0)
    if device.type == "cuda":
        # NCCL refuses that, too, but only at its first collective, and without naming the ranks
        gpus = group.all_gather(str(torch.cuda.get_device_properties(device).uuid))
        for rank, gpu in enumerate(gpus):
            if gpus.index(gpu) < rank:
                raise RequestError(
                    f"ranks {gpus.index(gpu)} and {rank} use the same GPU ({group.hosts[rank]}, {gpu})",
                    "start one process per GPU and give each its LOCAL_RANK, or show each process only its"
                    " own GPU, or set run.device=cpu",
                ).collective()  # a mark: all raise this, so that one prints it
    return group


def check_same_request(config: Config, group: Group) -> None:
    """Raise RequestError, in all processes, if one has another request than rank 0."""
    keys = addon("ops.fixed_keys").training_keys(config)
    requests = group.all_gather({key: str(value) for key, value in keys.items()})
    for rank, request in enumerate(requests):
        stated = [f"{key}={value}" for key, value in requests[0].items() if request.get(key) != value]
        if stated:
            raise RequestError(
                f"rank {rank} was started with another configuration than rank 0, which has"
                f" {' '.join(stated)[:200]}",
                "give all processes the same keys",
            ).collective()


def broadcast_source(config: Config, group: Group, source: Source | None) -> Source:
    """Return a source with rank 0's index, in every process: file systems may list differently."""
    if config.data.source == "synthetic":
        return source or addon("datasets.sources").open_source(config)
    data = group.broadcast_bytes(source.index.to_bytes() if source and source.index else None)
    return source or addon("datasets.sources").received_source(config, data)


def agree_on_plan(config: Config, group: Group, source: Source) -> Plan:
    """Return the plan. If the machine of one process is too small for it, all processes raise."""
    plan, error = None, None
    try:
        plan = make_plan(config, group.world, source.size)
    except RunError as found:
        error = found
    group.raise_together(error)
    assert plan is not None
    machines = group.all_gather((plan.compiles, "" if plan.is_portable else plan.portable_reason))
    if plan.compiles and not all(compiles for compiles, _ in machines):
        plan = replace(plan, compiles=False, compile_reason="another machine of the job cannot compile")
    reasons = [f"on rank {rank}: {reason}" for rank, (_, reason) in enumerate(machines) if reason]
    if plan.is_portable and reasons:
        plan = replace(plan, is_portable=False, portable_reason=reasons[0])
    return plan
