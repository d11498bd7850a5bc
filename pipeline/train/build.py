"""The model, its strategy and its state, before the first step."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from torch import Tensor

from pipeline import randomness
from pipeline.config.schema import Config
from pipeline.errors import RequestError, one_line
from pipeline.guards.nonfinite import make_loss_guard
from pipeline.lazy import part
from pipeline.model.architectures import build
from pipeline.model.normalise import Normalise
from pipeline.model.weights import load_weights
from pipeline.parallel import choose_strategy
from pipeline.parallel.strategy import Strategy
from pipeline.plan import Plan
from pipeline.record.checkpoint import copy_to_host
from pipeline.train.job import Job, Process
from pipeline.train.join import is_deterministic
from pipeline.train.state import TrainState
from pipeline.train.step import warm_up


def build_state(
    job: Job, process: Process, weights: dict[str, Tensor] | None, *, is_resumed: bool
) -> tuple[Job, TrainState]:
    """Build the model, its strategy and its state, and warm up.

    Return also the job, with passes that fit the memory.

    First weights are a function of the seed, or rank 0's `weights`.
    """
    config, plan = job.config, job.plan
    group, log, watchdog = process.group, process.terminal.log, process.watchdog
    if is_deterministic(config, on_gpu=group.device.type == "cuda"):
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
    if plan.compiles:
        log("compiling at the first step, which takes a minute or so ...")
    strategy = choose_strategy(config, plan, model, group)
    if strategy.notice:
        log(strategy.notice)
    if group.size > 1:
        strategy.on_gradients_computed(partial(process.timer.switch_to, "communication"))
    state = TrainState.build(strategy, make_loss_guard(strategy, process.timer, config.start_again), config)
    watchdog.beat()
    if strategy.warms_up:
        first_weights = copy_to_host(model.state_dict())  # the warm-up pass changes the running statistics
        with watchdog.allow_compilation(group) if plan.compiles else nullcontext():
            _warm_up(config, plan, strategy, process)
        load_weights(model, first_weights)
    return replace(job, plan=plan), state


def _warm_up(config: Config, plan: Plan, strategy: Strategy, process: Process) -> None:
    """Run the discarded pass, in which a model is compiled.

    Raises RequestError if it cannot be compiled, TemporaryError if a signal ended the compiler.
    """
    normalise = Normalise(strategy.group.device, channels_last=config.model.channels_last)
    if not plan.compiles:
        return warm_up(strategy, normalise, process.timer, plan)
    from torch._dynamo.exc import TorchDynamoException  # takes a second to import

    try:
        warm_up(strategy, normalise, process.timer, plan)
    except TorchDynamoException as error:
        process.stop.check()
        raise RequestError(
            f"{config.model.arch} cannot be compiled", f"train with train.compile=off ({one_line(error)})"
        ) from error
