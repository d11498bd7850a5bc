"""Strategies by which the processes of a run share the work.

The model does not know, and the loop sees only `Strategy`.
"""

from torch import nn

from pipeline.config.schema import Config
from pipeline.group import Group
from pipeline.lazy import part
from pipeline.parallel.ddp import DDPStrategy
from pipeline.parallel.strategy import Strategy
from pipeline.plan import Plan


def choose_strategy(config: Config, plan: Plan, model: nn.Module, group: Group) -> Strategy:
    """Return the strategy of this run. One process exchanges nothing, except in exact mode."""
    kind: type[Strategy] = DDPStrategy
    if config.run.exact:
        kind = part("exact")
    elif group.size == 1 and config.parallel != "dataparallel":
        kind = Strategy
    elif config.parallel != "ddp":
        kind = part(config.parallel)
    return kind(config, plan, model, group)
