"""DistributedDataParallel: whole models, whose gradients are averaged during the backward pass.

Resuming to the same bits needs two choices.

- DDP rebuilds its gradient buckets after the first backward pass, and other buckets give other sums
  from 3 processes on. A discarded, synchronised pass at the start (`train.session`) gives a resumed
  run the buckets of an uninterrupted one.
- Buffers are not broadcast in every pass: training itself never reads running statistics. An
  evaluation takes rank 0's, which a checkpoint holds, too. With model.batchnorm=average both take
  the mean. Deterministic runs refuse that: a resume rounds it differently.

The wrapper is compiled, not the model: so torch splits the backward pass at the buckets, and they
are still sent while it runs. DDP's `static_graph` stays off: it saves the search for unused
parameters, which is off here already.
"""

import inspect
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from pipeline.config.schema import Config
from pipeline.group import Group
from pipeline.parallel.strategy import Strategy
from pipeline.plan import Plan

_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
# torch 2.14 renamed the option
_LOCAL_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"
_BATCHED_COPY = "batched_grad_copy"
"""Copies the gradients of a bucket with one kernel, if torch has the option (2.14 does)."""


class DDPStrategy(Strategy):
    def __init__(self, config: Config, plan: Plan, model: nn.Module, group: Group) -> None:
        super().__init__(config, plan, model, group)
        self.warms_up = True  # the buckets, see above
        self._averages_buffers = config.model.batchnorm == "average"
        if config.model.batchnorm == "sync":
            synchronise_batch_norm(model)
        options: dict[str, Any] = {"gradient_as_bucket_view": True, _LOCAL_BUFFERS: False}
        if group.device.type == "cuda":
            options["device_ids"] = [group.device]
            if _BATCHED_COPY in _OPTIONS:  # not on a CPU: of 3 processes it would round otherwise
                options[_BATCHED_COPY] = True
        self._ddp = DistributedDataParallel(model, **options)  # it broadcasts rank 0's weights
        if config.train.gradient_dtype == "bf16":
            self._ddp.register_comm_hook(None, bf16_compress_hook)
        self._run_model = self._compiled(self._ddp, plan)

    def gradient_sync(self, micro: int) -> AbstractContextManager[None]:
        return nullcontext() if micro == self._passes - 1 else self._ddp.no_sync()

    def average_buffers(self, model: nn.Module) -> None:
        if self._averages_buffers:
            self.group.all_reduce_mean([buffer for buffer in model.buffers() if buffer.is_floating_point()])


def synchronise_batch_norm(model: nn.Module) -> None:
    """Synchronise the batch norm of `model`, in place: the layers keep their tensors.

    timm's BatchNormAct2d includes an activation, which only timm's own conversion keeps.
    """
    # a model with such a layer has imported timm.layers
    sys.modules.get("timm.layers", nn.SyncBatchNorm).convert_sync_batchnorm(model)
