"""How gradients meet. The model knows nothing of it, and the loop speaks to the one small interface of `Strategy`."""

from torch import nn

from pipeline.config.schema import Config
from pipeline.group import Group
from pipeline.parallel.dataparallel import Scattered
from pipeline.parallel.ddp import Distributed
from pipeline.parallel.exact import Exact
from pipeline.parallel.fsdp import FullyShard
from pipeline.parallel.stages import Stages
from pipeline.parallel.strategy import Objective, Strategy, Targets
from pipeline.plan import Plan

__all__ = ["Objective", "Strategy", "Targets", "choose"]


def choose(config: Config, plan: Plan, model: nn.Module, group: Group) -> Strategy:
    """The strategy of this run; alone there is nothing to exchange, but exact mode sums as several would."""
    if config.run.exact:
        return Exact(model, group, plan, config.exact)
    if config.parallel == "dataparallel":
        return Scattered(model, group, plan)
    if group.size > 1:
        match config.parallel:
            case "fsdp":
                return FullyShard(model, group, plan, config)
            case "stages":
                return Stages(model, group, plan, config)
            case _:
                return Distributed(model, group, plan, config.model.batchnorm, config.train.gradient_dtype)
    return Strategy(model, group, plan)
