"""Strategies by which the processes of a run share the work.

The model does not know, and the loop sees only `Strategy`.
"""

from pkgutil import resolve_name

from torch import nn

from pipeline.config.schema import Config
from pipeline.group import Group
from pipeline.parallel.ddp import DDPStrategy
from pipeline.parallel.strategy import Strategy
from pipeline.plan import Plan

_KINDS = {
    "exact": "pipeline.parallel.exact:ExactStrategy",
    "dataparallel": "pipeline.addons.shard.dataparallel:DataParallelStrategy",
    "fsdp": "pipeline.addons.shard.fsdp:FSDPStrategy",
    "stages": "pipeline.addons.shard.stages:StagesStrategy",
}
"""Strategies beside DDP, by `parallel`. Each is imported if it is asked for."""


def choose_strategy(config: Config, plan: Plan, model: nn.Module, group: Group) -> Strategy:
    """Return the strategy of this run. One process exchanges nothing, except in exact mode."""
    kind: type[Strategy] = DDPStrategy
    if config.run.exact:
        kind = resolve_name(_KINDS["exact"])
    elif group.size == 1 and config.parallel != "dataparallel":
        kind = Strategy
    elif config.parallel != "ddp":
        kind = resolve_name(_KINDS[config.parallel])
    return kind(config, plan, model, group)
