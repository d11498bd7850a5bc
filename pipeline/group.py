"""Who takes part: the processes of one run, and the few things they say to each other besides gradients.

Promise: every decision is collective. A process never stops, fails or saves on what it alone knows: it says it in
`agree`, one small reduction a step, and all act alike at the same step. Sums of integers are exact at any world size.
Host values travel over gloo, so that no exchange of ours waits for a GPU's stream; gradients are the strategy's business.

`Group` itself is the group of one, where everybody agrees at once; `Peers` is the group of several.
"""

import os
import socket
from collections.abc import Callable
from concurrent import futures
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config.schema import Config
from pipeline.errors import RunError, TemporaryError
from pipeline.world import World

T = TypeVar("T")


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> object:
        """Return once it is done."""


class _Done:
    def wait(self) -> None:
        pass


class Group:
    """One process."""

    def __init__(self, world: World, device: torch.device) -> None:
        self.world = world
        self.device = device
        self.pids_here: list[int] = []
        """Process ids of the others on this machine."""
        self.hosts = [socket.gethostname()]
        """Each rank's machine."""

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def is_main(self) -> bool:
        return self.world.is_main

    def any_rank(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether any process raised it."""
        return flags

    def all_reduce(self, counts: Tensor) -> Tensor:
        """Sum of int64 counts over the processes, on the CPU. counts: any shape, int64."""
        return counts.to("cpu", copy=True)

    def all_reduce_async(self, counts: Tensor) -> Pending:
        """Begin to overwrite `counts` (int64, on the device) with its sum over the processes."""
        return _Done()

    def all_gather(self, item: Any) -> list[Any]:
        """Everybody's item, in rank order, at every process. For small, rare things."""
        return [item]

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, at every process."""
        assert data is not None
        return data

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Overwrite each tensor with rank 0's."""

    def all_reduce_mean(self, tensors: list[Tensor]) -> None:
        """Overwrite each floating-point tensor with its mean over the processes."""

    def raise_together(self, verdict: RunError | None) -> None:
        """Raise at every process the first verdict that any of them brings; return if there is none."""
        for found in self.all_gather(verdict):
            if found is not None:
                raise found.collective()

    def run_long_task(self, work: Callable[[], T]) -> T:
        """Do `work`, which may take one process longer than the others may wait in an exchange."""
        return work()

    def finish(self) -> None:
        """Take leave of the others."""


class ProcessGroup(Group):
    """Several processes."""

    def __init__(self, world: World, device: torch.device, timeout: float) -> None:
        super().__init__(world, device)
        limit = timedelta(seconds=timeout)
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        try:
            dist.init_process_group(backend, world.init_method, rank=world.rank, world_size=world.size, timeout=limit)
        except (dist.DistNetworkError, dist.DistStoreError, dist.DistBackendError, TimeoutError) as error:
            raise TemporaryError(
                f"rank {world.rank} of {world.size} found no group within {timeout:g} s: a peer is not there yet ({error})"
            ) from error

        places = self.all_gather((socket.gethostname(), os.getpid()))
        self.hosts = [host for host, _ in places]
        here, own = places[self.rank]
        self.pids_here = [pid for host, pid in places if host == here and pid != own]

    def any_rank(self, *flags: bool) -> tuple[bool, ...]:
        raised = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(raised, dist.ReduceOp.MAX)
        return tuple(bool(flag) for flag in raised.tolist())

    def all_reduce(self, counts: Tensor) -> Tensor:
        assert counts.dtype == torch.int64
        total = counts.to("cpu", copy=True)
        dist.all_reduce(total)
        return total

    def all_reduce_async(self, counts: Tensor) -> Pending:
        pending: Pending = dist.all_reduce(counts, async_op=True)
        return pending

    def all_gather(self, item: Any) -> list[Any]:
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item)  # over the CPU's backend, where a group has one
        return items

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        length = torch.tensor([len(data) if data is not None else 0])
        dist.broadcast(length, 0)
        buffer = torch.empty(int(length), dtype=torch.uint8)
        if data:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if len(buffer):
            dist.broadcast(buffer, 0)
        return buffer.numpy().tobytes()

    def broadcast(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, 0)

    def all_reduce_mean(self, tensors: list[Tensor]) -> None:
        if not tensors:  # a model without batch norm
            return
        mean = torch.cat([tensor.double().flatten() for tensor in tensors])
        dist.all_reduce(mean)
        for tensor, part in zip(tensors, torch.split(mean / self.size, [one.numel() for one in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))

    def run_long_task(self, work: Callable[[], T]) -> T:
        with futures.ThreadPoolExecutor(1) as thread:
            done = thread.submit(work)
            while any(self.any_rank(not done.done())):
                futures.wait([done], timeout=1)
            return done.result()

    def finish(self) -> None:
        self.any_rank(False)  # nobody leaves before rank 0 has saved: a launcher kills what outlives its first leaver
        dist.destroy_process_group()


def is_peer_failure(error: Exception) -> bool:
    """Whether an error is but the echo of another process's end."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def start(config: Config, world: World, device: torch.device) -> Group:
    """Join the group. TemporaryError if a peer does not come."""
    return ProcessGroup(world, device, config.run.timeout) if world.size > 1 else Group(world, device)
