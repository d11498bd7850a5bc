"""Setting up a training: the group, what all processes agree on, the model and its state."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from torch import Tensor

from pipeline import group as groups
from pipeline import randomness
from pipeline.config.load import training_keys
from pipeline.config.schema import Config
from pipeline.data.index import Index
from pipeline.data.sources import Source, open_source, sent_source
from pipeline.device import choose_device
from pipeline.errors import RequestError, RunError
from pipeline.group import Group
from pipeline.guards.nonfinite import make_loss_guard
from pipeline.lazy import part
from pipeline.model.architectures import build
from pipeline.model.normalise import Normalise
from pipeline.model.weights import load_weights
from pipeline.parallel import choose_strategy
from pipeline.parallel.strategy import Strategy
from pipeline.plan import Plan
from pipeline.planning import divide_resources, make_plan
from pipeline.record.checkpoint import copy_to_host
from pipeline.record.terminal import make_terminal
from pipeline.supervision import launch_id
from pipeline.train.job import Job, Process
from pipeline.train.state import TrainState
from pipeline.train.step import warm_up
from pipeline.world import World


def join(config: Config, world: World) -> Group:
    """Configure torch, choose the device and join the process group."""
    if part("portability")(config, world)[0]:
        part("exact roots")()
    randomness.configure_torch(
        deterministic=_is_deterministic(config, on_gpu=world.uses_gpu(config.run.device)),
        # NCCL's order is fixed for run.deterministic alone: sums of integers need none
        any_order=config.run.exact or not config.run.deterministic,
        precision=config.train.precision,
        threads=divide_resources(config, world).threads,
    )
    if world.size > 1 and launch_id() is None:
        waiting = f"rank {world.rank} of {world.size} waits for the other processes"
        make_terminal(is_main=True).log(f"{waiting}: {groups.JOIN_ADVICE}")
    return groups.start(config, world, choose_device(config, world))


def check_same_request(config: Config, group: Group) -> None:
    """Raise RequestError, in all processes, if one has another request than rank 0."""
    requests = group.all_gather({key: str(value) for key, value in training_keys(config).items()})
    for rank, request in enumerate(requests):
        stated = [f"{key}={value}" for key, value in requests[0].items() if request.get(key) != value]
        if stated:
            raise RequestError(
                f"rank {rank} was started with another configuration than rank 0, which has"
                f" {' '.join(stated)[:200]}",
                "give all processes the same keys",
            ).collective()  # a mark: all raise this, so that one prints it


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
    machines = group.all_gather((plan.compiles, "" if plan.is_portable else plan.portable_reason))
    if plan.compiles and not all(compiles for compiles, _ in machines):
        plan = replace(plan, compiles=False, compile_reason="another machine of the job cannot compile")
    reasons = [f"on rank {rank}: {reason}" for rank, (_, reason) in enumerate(machines) if reason]
    if plan.is_portable and reasons:
        plan = replace(plan, is_portable=False, portable_reason=reasons[0])
    return plan


def build_state(
    job: Job, process: Process, weights: dict[str, Tensor] | None, *, is_resumed: bool
) -> tuple[Job, TrainState]:
    """Build the model, its strategy and its state, and warm up.

    Return also the job, with passes that fit the memory. First weights are a function of the seed,
    or rank 0's `weights`.
    """
    config, plan = job.config, job.plan
    group, log, watchdog = process.group, process.terminal.log, process.watchdog
    if _is_deterministic(config, on_gpu=group.device.type == "cuda"):
        log("deterministic: bit-identical every time; kernels are slower and the number of threads is fixed")
    log(f"creating {config.model.arch} for {plan.num_classes} classes on {group.device} ...")
    randomness.seed_network(config.run.seed, "weights")
    model = build(config.model, plan.num_classes).to(group.device)
    if config.model.init and not is_resumed:
        part("load first weights")(model, weights, config.model, group, log)
    if config.model.freeze:
        log(part("freeze")(model, config.model.freeze))
    if group.device.type == "cuda" and config.parallel == "ddp":
        watchdog.beat()
        plan = part("fit passes")(config, plan, group, model, log)
    normalise = Normalise(group.device, channels_last=config.model.channels_last)
    if plan.compiles and config.train.compile == "auto":
        eager = Strategy(config, replace(plan, compiles=False), model, group)
        run_pass = partial(warm_up, eager, normalise, process.timer, plan)
        plan = part("compile if it repays")(plan, group, model, run_pass, log)
    strategy = choose_strategy(config, plan, model, group)
    if group.size > 1 and strategy.is_replicated:
        strategy.on_gradients_computed(partial(process.timer.switch_to, "communication"))
    state = TrainState.build(strategy, make_loss_guard(strategy, process.timer, config.start_again), config)
    watchdog.beat()
    if strategy.warms_up:
        first_weights = copy_to_host(model.state_dict())  # the warm-up pass changes the running statistics
        with watchdog.allow_compilation(group) if plan.compiles else nullcontext():
            if plan.compiles:
                log("compiling, which takes a minute or so ...")
                # a process that cannot compile would leave the others waiting for its gradients
                run_pass = partial(warm_up, strategy, normalise, process.timer, plan, is_synced=False)
                group.raise_together(part("compile")(config.model.arch, run_pass, process.stop))
            warm_up(strategy, normalise, process.timer, plan)
        load_weights(model, first_weights)
    return replace(job, plan=plan), state


def _is_deterministic(config: Config, *, on_gpu: bool) -> bool:
    return config.is_deterministic_on_gpus if on_gpu else config.is_deterministic
