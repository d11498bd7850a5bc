"""How gradients meet. The model knows nothing of it, and the loop speaks to the one small interface of `Strategy`."""

from pipeline.group import Group
from pipeline.parallel.ddp import Distributed
from pipeline.parallel.single import Strategy

__all__ = ["Strategy", "choose"]


def choose(group: Group) -> type[Strategy]:
    """The strategy of this run: alone there is nothing to exchange."""
    return Distributed if group.size > 1 else Strategy
