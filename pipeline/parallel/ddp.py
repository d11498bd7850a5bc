"""DistributedDataParallel: each process has the whole model, and gradients are averaged while the backward pass runs.

Two choices that exact resumption wants. DDP lays its gradient buckets anew after the first backward pass, and other
buckets are other sums from 3 processes on: one discarded, synchronised pass before the state is loaded makes the buckets
of a resumed run those of an uninterrupted one. And buffers are not sent at every pass but shared when they matter,
before an evaluation or a save: training itself never reads running statistics.

What is compiled is the wrapper: so torch cuts the backward pass at the buckets, and they still leave while it runs. DDP's
`static_graph` is left off, for it spares the search for unused parameters, which is not made here either.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from pipeline.group import Group
from pipeline.parallel.strategy import Strategy
from pipeline.plan import Plan

# torch 2.14 renamed the option
_KEEP_BUFFERS: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else {"broadcast_buffers": False}
)


class Distributed(Strategy):
    def __init__(self, model: nn.Module, group: Group, plan: Plan, batchnorm: str, exchange: str) -> None:
        super().__init__(model, group, plan)
        self._averages = batchnorm == "average"
        if batchnorm == "sync":
            # in place: the layers' tensors stay what they are
            nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        self._wrapped = DistributedDataParallel(
            model,
            device_ids=[group.device] if group.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            **_KEEP_BUFFERS,
        )
        if exchange == "bf16":
            self._wrapped.register_comm_hook(None, bf16_compress_hook)
        self._run = self._compiled(self._wrapped)

    def accumulating(self, micro: int) -> AbstractContextManager[None]:
        return nullcontext() if micro == self.divisor - 1 else self._wrapped.no_sync()

    def warm_up(self, backward: Callable[[], None]) -> None:
        backward()  # the new buckets are laid at the next forward pass, from the order in which gradients came here

    def average_buffers(self, model: nn.Module) -> None:
        if self._averages:
            self.group.all_reduce_mean([buffer for buffer in model.buffers() if buffer.is_floating_point()])

    def share_buffers(self, model: nn.Module) -> None:
        self.average_buffers(model)
        self.group.broadcast(list(model.buffers()))
