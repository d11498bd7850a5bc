"""Exact mode: weights that do not depend on the number of processes, bit for bit.

Promise: a run with `run.exact=true` has the same weights at 1, 2, 3, … processes, and when it goes on with another number.
Why that holds: a global batch is always cut into the same shards, and a shard is computed alone, wherever that is: a pass
of its own, with its own randomness and its own batch norm. What shards have to say to each other they say in integers,
which add in any order and any grouping to the same: gradients in units of 2^-fraction_bits, running statistics of 2^-36.

- Batch norm sees its shard, as under DDP it sees its process's pass. Each shard starts from the running statistics that
  the step began with, and the step's new ones are the mean of what the shards make of them; a counter counts one shard.
- Range: a shard's gradient must stay below 2^(62 - fraction_bits) / shards, so that no sum can overflow. A larger one, or
  one that is not finite, is noticed before the update (`out_of_range`) and not cast into nonsense.
- Resolution: a unit of 2^-44 is 6e-14. Where the largest gradient of a tensor is of few units, `remark` says so.
- Cost: twice the bytes of DDP, in buckets that are sent while the last backward pass still runs.

Sums that any order leaves the same are an old wish (Demmel & Nguyen, "Fast reproducible floating-point summation", 2013);
fixed point is the plainest way to have them, for numbers whose range can be stated.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline.config.schema import Exact as Settings
from pipeline.group import Group, Pending
from pipeline.parallel.strategy import Strategy
from pipeline.plan import Plan

_BUCKET_ELEMENTS = 1 << 20
_BUFFER_BITS = 36
_SIGN_AND_SPARE = 62
_FEW_UNITS = 1 << 10


@dataclass
class _Bucket:
    """Parameters whose gradients are summed and sent together."""

    parameters: list[nn.Parameter]
    units: Tensor
    """[elements] int64: the sum so far, over this process's shards and in the end over all."""
    came: int = 0
    """Parameters whose gradient of the present shard is there."""
    is_complete: bool = False
    """The last shard of this process is in."""


class Exact(Strategy):
    can_guard = False  # it looks at its sums in each step, `out_of_range`

    def __init__(self, model: nn.Module, group: Group, plan: Plan, settings: Settings) -> None:
        super().__init__(model, group, plan)
        self.divisor = 1  # a shard gives its own gradient; the division by all shards comes after their sum
        self._passes, self._shards = plan.accumulate, settings.shards
        self._bits = settings.fraction_bits
        self._largest = 2.0 ** (_SIGN_AND_SPARE - self._bits) / self._shards
        self._largest_buffer = 2.0 ** (_SIGN_AND_SPARE - _BUFFER_BITS) / self._shards
        # gradients come from the last layer to the first
        self._buckets = _fill_buckets([one for one in reversed(list(model.parameters())) if one.requires_grad])
        self._bucket_of = {id(one): bucket for bucket in self._buckets for one in bucket.parameters}
        for bucket in self._buckets:
            for one in bucket.parameters:
                one.register_post_accumulate_grad_hook(self._came)  # type: ignore[no-untyped-call]
        # what is frozen is in evaluation mode, and its buffers stay what they are, bit for bit
        self._buffers = [
            buffer for module in model.modules() if module.training for buffer in module.buffers(recurse=False)
        ]
        # running statistics are averaged; other buffers count, and count one shard a step
        self._averaged = [buffer for buffer in self._buffers if buffer.is_floating_point()]
        self._before: list[Tensor] = []
        size = sum(buffer.numel() for buffer in self._averaged)
        self._statistics = torch.zeros(size, dtype=torch.int64, device=group.device)
        self._pending: list[Pending] = []
        self._is_last = False
        self._bad = torch.zeros((), dtype=torch.bool, device=group.device)
        self._smallest = torch.full((), torch.inf, device=group.device)

    @contextmanager
    def accumulating(self, micro: int) -> Iterator[None]:
        if micro == 0:
            self._begin()
        self._is_last = micro == self._passes - 1
        for buffer, before in zip(self._buffers, self._before, strict=True):
            buffer.copy_(before)
        yield
        for bucket in self._buckets:
            if bucket.came or (self._is_last and not bucket.is_complete):  # a layer took no part in this pass
                self._take(bucket)
        if self._averaged:
            made = torch.cat([buffer.reshape(-1) for buffer in self._averaged])
            self._bad |= ~_within(made, self._largest_buffer)
            self._statistics += _to_units(made, _BUFFER_BITS)
        if self._is_last:
            self._finish()

    def out_of_range(self) -> bool:
        return bool(self._bad)

    def remark(self) -> str | None:
        units = float(self._smallest) * 2.0**self._bits
        if units >= _FEW_UNITS:
            return None
        return (
            f"exact: the largest gradient of a tensor was no more than {units:.0f} units of 2^-{self._bits}, so it was"
            " summed coarsely: raise exact.fraction_bits"
        )

    def replicated_tensors(self) -> dict[str, Tensor]:
        return {**super().replicated_tensors(), **dict(self.model.named_buffers())}

    def _begin(self) -> None:
        self._bad.zero_()
        for bucket in self._buckets:
            bucket.units.zero_()
            bucket.is_complete = False
        self._before = [buffer.clone() for buffer in self._buffers]
        self._statistics.zero_()

    def _came(self, parameter: Tensor) -> None:
        bucket = self._bucket_of[id(parameter)]
        bucket.came += 1
        if bucket.came == len(bucket.parameters):
            self._take(bucket)

    def _take(self, bucket: _Bucket) -> None:
        """Add the present shard's gradients to a bucket; after the last shard, send what is complete, in order."""
        parts = [one.grad if one.grad is not None else torch.zeros_like(one) for one in bucket.parameters]
        gradient = torch.cat([part.reshape(-1) for part in parts])
        self._bad |= ~_within(gradient, self._largest)
        bucket.units += _to_units(gradient, self._bits)
        for one in bucket.parameters:
            one.grad = None
        bucket.came, bucket.is_complete = 0, self._is_last
        while len(self._pending) < len(self._buckets) and self._buckets[len(self._pending)].is_complete:
            self._pending.append(self.group.all_reduce_async(self._buckets[len(self._pending)].units))

    def _finish(self) -> None:
        """Wait for all sums; the mean gradient is then in place, and the mean of the running statistics."""
        if self._averaged:
            self._pending.append(self.group.all_reduce_async(self._statistics))
        for arrival in self._pending:
            arrival.wait()
        self._pending = []
        for bucket in self._buckets:
            for one, mean in zip(
                bucket.parameters, self._means(bucket.units, self._bits, bucket.parameters), strict=True
            ):
                one.grad = torch.empty_like(one).copy_(mean)  # in the layout that the optimizer likes
        for buffer, mean in zip(
            self._averaged, self._means(self._statistics, _BUFFER_BITS, self._averaged), strict=True
        ):
            buffer.copy_(mean)
        gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
        largest = torch.stack([torch.linalg.vector_norm(gradient, torch.inf) for gradient in gradients])
        self._smallest = torch.minimum(self._smallest, torch.where(largest > 0, largest, torch.inf).min())

    def _means(self, units: Tensor, bits: int, shaped: Sequence[Tensor]) -> list[Tensor]:
        """A flat sum over all shards as means, float64, shaped like those that went into it one after another."""
        mean = units.double().div_(self._shards * 2.0**bits)
        parts = torch.split(mean, [one.numel() for one in shaped])
        return [part.view(one.shape) for part, one in zip(parts, shaped, strict=True)]


def _within(values: Tensor, limit: float) -> Tensor:
    """Whether all are below the limit, up and down; of NaN false. A scalar on the device, in one pass over memory."""
    low, high = values.aminmax()
    return (low > -limit) & (high < limit)


def _to_units(values: Tensor, bits: int) -> Tensor:
    """int64 in units of 2^-bits; values, float32, are used up. Times a power of two they are exact: rounding is all that
    is lost."""
    return values.mul_(2.0**bits).round_().to(torch.int64)


def _fill_buckets(parameters: list[nn.Parameter]) -> list[_Bucket]:
    groups: list[list[nn.Parameter]] = []
    room = 0
    for one in parameters:
        if one.numel() > room:
            groups.append([])
            room = _BUCKET_ELEMENTS
        groups[-1].append(one)
        room -= one.numel()
    return [
        _Bucket(members, torch.zeros(sum(one.numel() for one in members), dtype=torch.int64, device=members[0].device))
        for members in groups
    ]
