"""Strategies by which the processes of a run share the work.

The model does not know, and the loop sees only `Strategy`.
"""

from torch import nn

from pipeline.config.schema import Config
from pipeline.group import Group
from pipeline.parallel.dataparallel import DataParallelStrategy
from pipeline.parallel.ddp import DDPStrategy
from pipeline.parallel.exact import ExactStrategy
from pipeline.parallel.fsdp import FSDPStrategy
from pipeline.parallel.stages import StagesStrategy
from pipeline.parallel.strategy import Strategy
from pipeline.plan import Plan

__all__ = ["Strategy", "choose_strategy"]


def choose_strategy(config: Config, plan: Plan, model: nn.Module, group: Group) -> Strategy:
    """Return the strategy of this run.

    One process has nothing to exchange, except in exact mode.
    """
    if config.run.exact:
        return ExactStrategy(config, plan, model, group)
    if config.parallel == "dataparallel":
        return DataParallelStrategy(config, plan, model, group)
    if group.size == 1:
        return Strategy(config, plan, model, group)
    match config.parallel:
        case "fsdp":
            return FSDPStrategy(config, plan, model, group)
        case "stages":
            return StagesStrategy(config, plan, model, group)
        case _:
            return DDPStrategy(config, plan, model, group)
