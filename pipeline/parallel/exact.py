"""Exact mode: weights that do not depend on the number of processes, bit for bit.

Promise: a run with `run.exact=true` has the same weights with 1, 2, 3, … processes, and when it
resumes with another number. Why it holds: a global batch is always cut into the same shards, and
each shard is computed alone, in whichever process: in a pass of its own, with its own randomness
and its own batch norm. What shards exchange are integers, whose sum is the same in any order and
any grouping: gradients in units of 2^-fraction_bits, running statistics in units of 2^-36.

- Batch norm sees its shard, as under DDP it sees its process's pass. Each shard starts from the
  step's first running statistics; the step ends with the mean of all shards' results. A value that
  no shard changed keeps its bits. If only some shards changed it, old and new values must both be
  in range, else `has_overflow` says so. A counter (`num_batches_tracked`) rises by 1 a step.
- Range: a shard's gradient must stay below 2^(62 - fraction_bits) / shards, so that no sum can
  overflow. A larger gradient, or one that is not finite, is noticed before the update
  (the loss guard asks `has_overflow`).
- Resolution: a unit of 2^-44 is 6e-14.
- Cost: twice the bytes of DDP, in buckets that are sent while the last backward pass still runs.

Sums that do not depend on the order are an old goal (Demmel & Nguyen, "Fast reproducible
floating-point summation", 2013); fixed point is the simplest way to have them, for numbers whose
range can be stated.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.config.schema import Config
from pipeline.group import Group, flatten, split_like
from pipeline.parallel.strategy import Strategy
from pipeline.plan import Plan

_BUCKET_ELEMENTS = 1 << 20
_BUFFER_BITS = 36
_INT64_BITS = 62  # without the sign, and with one bit to spare


@dataclass
class _Bucket:
    """Parameters whose gradients are summed and sent together."""

    parameters: list[nn.Parameter]
    units: Tensor
    """[elements] int64: the sum over this process's shards so far, in the end over all shards."""
    arrived: int = 0
    """Parameters whose gradient of the current shard is there."""
    is_complete: bool = False
    """The gradients of this process's last shard are in."""


class ExactStrategy(Strategy):
    def __init__(self, config: Config, plan: Plan, model: nn.Module, group: Group) -> None:
        super().__init__(config, plan, model, group)
        self._loss_divisor = 1  # the sum over all shards is divided by their number
        self._shards = config.exact.shards
        self._bits = config.exact.fraction_bits
        self._max_gradient = 2.0 ** (_INT64_BITS - self._bits) / self._shards
        self._max_buffer = 2.0 ** (_INT64_BITS - _BUFFER_BITS) / self._shards
        # gradients arrive from the last layer to the first
        trained = [parameter for parameter in reversed(list(model.parameters())) if parameter.requires_grad]
        self._buckets = _fill_buckets(trained)
        self._bucket_of = {
            id(parameter): bucket for bucket in self._buckets for parameter in bucket.parameters
        }
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
        # frozen modules are in evaluation mode, and their buffers stay bit-identical
        trained_modules = [module for module in model.modules() if module.training]
        self._buffers = [buffer for module in trained_modules for buffer in module.buffers(recurse=False)]
        # running statistics are averaged; other buffers are counters, which count one shard a step
        self._averaged = [buffer for buffer in self._buffers if buffer.is_floating_point()]
        self._buffers_before: list[Tensor] = []
        self._statistics_before = flatten(self._averaged)
        self._sums = torch.zeros((2, self._statistics_before.numel()), dtype=torch.int64, device=group.device)
        self._statistics, self._changes = self._sums  # the units, and in how many shards each value changed
        self._pending: list[dist.Work | None] = []
        self._is_last_pass = False
        self._overflow = torch.zeros((), dtype=torch.bool, device=group.device)

    @contextmanager
    def gradient_sync(self, micro: int) -> Iterator[None]:
        """Restore the buffers, let a shard run, add it; after the last, sum over the ranks."""
        if micro == 0:
            self._begin_step()
        self._is_last_pass = micro == self._passes - 1
        for buffer, before in zip(self._buffers, self._buffers_before, strict=True):
            buffer.copy_(before)
        yield
        for bucket in self._buckets:
            # a layer took no part in this pass
            if bucket.arrived or (self._is_last_pass and not bucket.is_complete):
                self._add_shard(bucket)
        if self._statistics.numel():
            statistics = flatten(self._averaged)
            is_changed = statistics != self._statistics_before
            is_changed &= ~(statistics.isnan() & self._statistics_before.isnan())
            self._changes += is_changed
            self._overflow |= ~_within(torch.where(is_changed, statistics, 0.0), self._max_buffer)
            self._statistics += _to_units(statistics, _BUFFER_BITS)
        if self._is_last_pass:
            self._end_step()

    def has_overflow(self) -> Tensor:
        return self._overflow

    def replicated_tensors(self) -> dict[str, Tensor]:
        return {**super().replicated_tensors(), **dict(self.model.named_buffers())}

    def _begin_step(self) -> None:
        self._overflow.zero_()
        for bucket in self._buckets:
            bucket.units.zero_()
            bucket.is_complete = False
        self._buffers_before = [buffer.clone() for buffer in self._buffers]
        self._statistics_before = flatten(self._averaged)
        self._sums.zero_()

    def _on_gradient(self, parameter: Tensor) -> None:
        bucket = self._bucket_of[id(parameter)]
        bucket.arrived += 1
        if bucket.arrived == len(bucket.parameters):
            self._add_shard(bucket)

    def _add_shard(self, bucket: _Bucket) -> None:
        """Add the current shard's gradients to a bucket; in the last pass send complete buckets."""
        gradient = flatten(
            [torch.zeros_like(param) if param.grad is None else param.grad for param in bucket.parameters]
        )
        self._overflow |= ~_within(gradient, self._max_gradient)
        bucket.units += _to_units(gradient, self._bits)
        for parameter in bucket.parameters:
            parameter.grad = None
        bucket.arrived, bucket.is_complete = 0, self._is_last_pass
        while len(self._pending) < len(self._buckets) and self._buckets[len(self._pending)].is_complete:
            self._pending.append(self.group.all_reduce_async(self._buckets[len(self._pending)].units))

    def _end_step(self) -> None:
        """Wait for all sums, then set the mean gradients and the mean running statistics."""
        if self._statistics.numel():
            self._pending.append(self.group.all_reduce_async(self._sums))
        for pending in self._pending:
            if pending:
                pending.wait()
        self._pending = []
        for bucket in self._buckets:
            gradients = split_like(self._mean(bucket.units, self._bits), bucket.parameters)
            for parameter, mean in zip(bucket.parameters, gradients, strict=True):
                parameter.grad = torch.empty_like(parameter).copy_(mean)  # in the parameter's memory format
        if self._statistics.numel():
            is_mixed = (self._changes > 0) & (self._changes < self._shards)
            self._overflow |= ~_within(torch.where(is_mixed, self._statistics_before, 0.0), self._max_buffer)
            means = self._mean(self._statistics, _BUFFER_BITS)
            statistics = torch.where(self._changes > 0, means, self._statistics_before.double())
            for buffer, statistic in zip(self._averaged, split_like(statistics, self._averaged), strict=True):
                buffer.copy_(statistic)

    def _mean(self, units: Tensor, bits: int) -> Tensor:
        return units.double().div_(self._shards * 2.0**bits)


def _within(values: Tensor, limit: float) -> Tensor:
    """Return a bool on the device: all |values| < limit (False for NaN). One pass over memory."""
    low, high = values.aminmax()
    return (low > -limit) & (high < limit)


def _to_units(values: Tensor, bits: int) -> Tensor:
    """Return values as int64 in units of 2^-bits. values: float32, changed in place.

    A multiplication by a power of two is exact, so only the rounding loses anything.
    """
    return values.mul_(2.0**bits).round_().to(torch.int64)


def _fill_buckets(parameters: list[nn.Parameter]) -> list[_Bucket]:
    groups: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        if parameter.numel() > room:
            groups.append([])
            room = _BUCKET_ELEMENTS
        groups[-1].append(parameter)
        room -= parameter.numel()
    return [_Bucket(group, torch.zeros_like(flatten(group), dtype=torch.int64)) for group in groups]
