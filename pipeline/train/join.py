"""Joining the other processes of a job: torch settings, the group, and what all must agree on."""

import json
from dataclasses import replace

from pipeline import group as groups
from pipeline import randomness
from pipeline.config.load import training_keys
from pipeline.config.schema import Config
from pipeline.data.index import Index
from pipeline.data.sources import Source, open_source, sent_source
from pipeline.device import choose_device
from pipeline.errors import RequestError, RunError, shorten
from pipeline.group import Group
from pipeline.plan import Plan
from pipeline.planning import divide_resources, make_plan
from pipeline.portable import portability, use_exact_roots
from pipeline.record.terminal import make_terminal
from pipeline.supervision import launch_id
from pipeline.world import World


def join(config: Config, world: World) -> Group:
    """Configure torch, choose the device and join the process group."""
    if portability(config, world)[0]:
        use_exact_roots()
    randomness.configure_torch(
        deterministic=is_deterministic(config, on_gpu=world.uses_gpu(config.run.device)),
        # only run.deterministic means the sums of NCCL: portable runs are on CPUs
        exact=config.run.exact or not config.run.deterministic,
        precision=config.train.precision,
        threads=divide_resources(config, world).threads,
    )
    if world.size > 1 and launch_id() is None:
        waiting = f"rank {world.rank} of {world.size} waits for the other processes"
        make_terminal(is_main=True).log(f"{waiting}: {groups.JOIN_ADVICE}")
    return groups.start(config, world, choose_device(config, world))


def is_deterministic(config: Config, *, on_gpu: bool) -> bool:
    return config.is_deterministic_on_gpus if on_gpu else config.is_deterministic


def check_same_request(config: Config, group: Group) -> None:
    """Raise RequestError, in all processes, if one of them would train something else than rank 0.

    A run of an earlier version that rank 0 restores from a mirror is one whose defaults no other
    machine knows.
    """
    mine = {key: str(value) for key, value in training_keys(config).items()}
    stated = json.loads(group.broadcast_bytes(json.dumps(mine).encode() if group.is_main else None))
    other = " ".join(f"{key}={value}" for key, value in stated.items() if mine.get(key) != value)
    problem = f"rank {group.rank} was started with another configuration than rank 0, which has {shorten(other, 200)}"
    group.raise_together(RequestError(problem, "give all processes the same keys") if other else None)


def broadcast_source(config: Config, group: Group, source: Source | None) -> Source:
    """Return a source with rank 0's index, in every process: file systems may list differently."""
    if config.data.source == "synthetic":
        return source or open_source(config)
    data = group.broadcast_bytes(source.index.to_bytes() if source and source.index else None)
    return source or sent_source(config, Index.from_bytes(data))


def agree_on_plan(config: Config, group: Group, source: Source) -> Plan:
    """Return the plan. If the machine of one process is too small for it, all processes raise."""
    plan, error = None, None
    try:
        plan = make_plan(config, group.world, source.size)
    except RunError as found:
        error = found
    group.raise_together(error)
    assert plan is not None
    (is_compiler_missing,) = group.any_rank(not plan.compiles)
    if is_compiler_missing and plan.compiles:
        plan = replace(plan, compiles=False, compile_reason="another machine of the job cannot compile")
    reasons = group.all_gather("" if plan.is_portable else plan.portable_reason)
    rank = next((rank for rank, reason in enumerate(reasons) if reason), None)
    if plan.is_portable and rank is not None:
        plan = replace(plan, is_portable=False, portable_reason=f"on rank {rank}: {reasons[rank]}")
    return plan
