"""The base of FSDP and stages: each process has a part of the state."""

from collections.abc import Sequence

import torch.distributed as dist

from pipeline.group import Group
from pipeline.parallel.strategy import Strategy


class ShardedStrategy(Strategy):
    is_replicated = False
    notice = (
        "rank 0 holds the whole state in host memory during a save, and every process on resume; run.watch compares"
        " nothing"
    )


def join_one_of(groups: Sequence[Sequence[int]], group: Group) -> dist.ProcessGroup:
    """Return the subgroup of `group` that this process is in, of those that all create together."""
    subgroup, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups], group.device_timeout)
    assert isinstance(subgroup, dist.ProcessGroup)
    return subgroup
