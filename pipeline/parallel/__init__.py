"""How gradients meet. The model knows nothing of it, and the loop speaks to the one small interface of `Strategy`."""

from torch import nn

from pipeline.config import Config
from pipeline.group import Group
from pipeline.parallel.ddp import Distributed
from pipeline.parallel.exact import Exact
from pipeline.parallel.single import Strategy
from pipeline.plan import Plan

__all__ = ["Strategy", "choose"]


def choose(config: Config, plan: Plan, model: nn.Module, group: Group) -> Strategy:
    """The strategy of this run; alone there is nothing to exchange, but exact mode sums as several would."""
    if config.run.exact:
        return Exact(model, group, plan, config.exact)
    if group.size > 1:
        return Distributed(model, group, plan, config.model.batchnorm, config.train.exchange)
    return Strategy(model, group, plan)
