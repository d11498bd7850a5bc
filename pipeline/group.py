"""The process group of a run, and all its collectives except those on gradients.

Promise: every decision is collective. A process never stops, fails or saves because of something
that only it knows: it passes a flag to `any_rank`, one small all-reduce per step, and all processes
act at the same step. Sums of integers are exact at any world size. Values on the host travel over
gloo, so that no collective here waits for a GPU's stream. A strategy exchanges the gradients.

`Group` is one process, for which every collective is trivial; `ProcessGroup` is several.
"""

import os
import re
import socket
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config.schema import Config
from pipeline.errors import RequestError, RunError, TemporaryError
from pipeline.supervision import launch_id
from pipeline.world import ALONE, World

T = TypeVar("T")

_GLOO_ERROR = r"\[[^]]*/gloo/[^]]*:\d+\] |Application timeout caused pair closure"
"""Start of what gloo raises, as RuntimeError (torch 2.14): file and line of its source."""
_RESTORE_S = 3600
"""Time that rank 0 may take to download a run from its mirror before it joins."""


class Work(Protocol):
    """An asynchronous collective; torch's handle is `torch.distributed.Work`."""

    def wait(self) -> object: ...


class _CompletedWork:
    def wait(self) -> None:
        pass


class Group:
    """A group of one process."""

    def __init__(self, world: World, device: torch.device) -> None:
        self.world, self.device = world, device
        self.rank, self.size, self.is_main = world.rank, world.size, world.is_main
        self.hosts = [socket.gethostname()]
        """The host name of each rank."""
        self.local_peer_pids: list[int] = []
        """The process ids of the other ranks on this machine."""
        self.device_timeout: timedelta | None = None
        """The timeout of collectives on the device, also for subgroups that a strategy creates."""

    def any_rank(self, *flags: bool) -> tuple[bool, ...]:
        """Return for each flag if it is set on any rank."""
        return flags

    def all_reduce(self, counts: Tensor) -> Tensor:
        """Return the sum over the ranks, on the CPU. counts: any shape, int64."""
        return counts.to("cpu", copy=True)

    def all_reduce_async(self, counts: Tensor) -> Work:
        """Start to replace `counts` (int64, on the device) by its sum over the ranks, in place."""
        return _CompletedWork()

    def all_gather(self, item: Any) -> list[Any]:
        """Return the items of all ranks, in rank order, on every rank. For small, rare objects."""
        return [item]

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Return rank 0's bytes on every rank. data: ignored on other ranks."""
        assert data is not None
        return data

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Replace each tensor by rank 0's, in place."""

    def all_reduce_mean(self, tensors: list[Tensor]) -> None:
        """Replace each floating-point tensor by its mean over the ranks, in place."""

    def raise_together(self, error: RunError | None) -> None:
        """Raise on every rank the error of the lowest rank that has one; return if none has."""
        for found in self.all_gather(error):
            if found is not None:
                raise found.collective()

    def run_long_task(self, work: Callable[[], T]) -> T:
        """Run `work`, which may take longer on one rank than the others' collectives wait."""
        return work()

    @contextmanager
    def extended_timeout(self, extra_s: float) -> Iterator[None]:
        """Have the collectives on the host wait `extra_s` longer in this context."""
        yield

    def set_device_timeout(self, timeout_s: float) -> None:
        """Set how long collectives on GPUs wait, of this group and of subgroups created later.

        At the timeout torch's NCCL watchdog aborts the process, without the traceback and the line
        of ours (torch 2.14, TORCH_NCCL_ASYNC_ERROR_HANDLING=3). So it must wait longer than ours.
        """

    def set_subgroup_timeout(self, subgroup: dist.ProcessGroup) -> None:
        """Give the collectives of `subgroup` on the device the timeout of those of this group."""

    def shutdown(self) -> None:
        """Wait for all ranks, then destroy the process group."""


class ProcessGroup(Group):
    """A group of several processes, over `torch.distributed`."""

    def __init__(self, world: World, device: torch.device, timeout_s: float, restore_s: float = 0) -> None:
        """timeout_s: of a collective. restore_s: how much longer the ranks wait until all join."""
        super().__init__(world, device)
        self._timeout_s = timeout_s
        self.device_timeout = timedelta(seconds=timeout_s)
        if world.local_size == world.size:  # no other machine may reach the ranks: gloo unpickles what it receives
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        try:
            dist.init_process_group(
                backend, world.init_method, rank=world.rank, world_size=world.size,
                timeout=timedelta(seconds=timeout_s + restore_s),
            )  # fmt: skip
        except (dist.DistNetworkError, dist.DistStoreError, dist.DistBackendError, TimeoutError) as error:
            raise TemporaryError(
                f"rank {world.rank} of {world.size} found no group within {timeout_s + restore_s:g} s:"
                f" {join_advice()} ({error})"
            ) from error
        _set_timeout("cpu", timedelta(seconds=timeout_s))

        ranks = self.all_gather((socket.gethostname(), os.getpid()))
        self.hosts = [host for host, _ in ranks]
        this_host, this_pid = ranks[self.rank]
        self.local_peer_pids = [pid for host, pid in ranks if host == this_host and pid != this_pid]

    def any_rank(self, *flags: bool) -> tuple[bool, ...]:
        raised = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(raised, dist.ReduceOp.MAX)
        return tuple(bool(flag) for flag in raised.tolist())

    def all_reduce(self, counts: Tensor) -> Tensor:
        assert counts.dtype == torch.int64
        total = counts.to("cpu", copy=True)
        dist.all_reduce(total)
        return total

    def all_reduce_async(self, counts: Tensor) -> Work:
        work: Work = dist.all_reduce(counts, async_op=True)
        return work

    def all_gather(self, item: Any) -> list[Any]:
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item)  # uses the CPU backend if the group has one
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
        total = torch.cat([tensor.double().flatten() for tensor in tensors])
        dist.all_reduce(total)
        means = torch.split(total / self.size, [tensor.numel() for tensor in tensors])
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.copy_(mean.view(tensor.shape))

    def run_long_task(self, work: Callable[[], T]) -> T:
        with futures.ThreadPoolExecutor(1) as thread:
            task = thread.submit(work)
            while any(self.any_rank(not task.done())):
                futures.wait([task], timeout=1)
            return task.result()

    @contextmanager
    def extended_timeout(self, extra_s: float) -> Iterator[None]:
        _set_timeout("cpu", timedelta(seconds=self._timeout_s + extra_s))
        try:
            yield
        finally:
            _set_timeout("cpu", timedelta(seconds=self._timeout_s))

    def set_device_timeout(self, timeout_s: float) -> None:
        if self.device.type == "cuda":
            self.device_timeout = timedelta(seconds=timeout_s)
            _set_timeout("cuda", self.device_timeout)

    def set_subgroup_timeout(self, subgroup: dist.ProcessGroup) -> None:
        assert self.device_timeout is not None
        subgroup._get_backend(self.device)._set_default_timeout(self.device_timeout)

    def shutdown(self) -> None:
        # After the first rank exits, a launcher kills the others, and rank 0 may still be saving.
        self.any_rank(False)
        dist.destroy_process_group()


def _set_timeout(device: str, timeout: timedelta) -> None:
    """Set the timeout of later collectives of the process group's backend for `device`.

    `torch.distributed.set_timeout` (torch 2.14) would set that of both backends.
    """
    assert dist.group.WORLD is not None
    dist.group.WORLD._get_backend(torch.device(device))._set_default_timeout(timeout)


def join_advice() -> str:
    """Return what to do if a group does not form. RANK may be that of a pod whose shell is used."""
    return "start all processes of the job" + (f", or {ALONE}" if launch_id() is None else "")


def is_peer_failure(error: Exception) -> bool:
    """Return True if an error is only the consequence of another process's failure."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and re.match(_GLOO_ERROR, str(error)) is not None
    )


def start(config: Config, world: World, device: torch.device) -> Group:
    """Join and return the process group.

    Raises TemporaryError if a peer does not come, RequestError if two processes have the same GPU.
    """
    if world.size == 1:
        return Group(world, device)
    group = ProcessGroup(world, device, config.run.timeout, _RESTORE_S if config.checkpoint.mirror else 0)
    if device.type == "cuda":
        _check_gpus_differ(group, str(torch.cuda.get_device_properties(device).uuid))
    return group


def _check_gpus_differ(group: Group, uuid: str) -> None:
    """Raise RequestError on all ranks if two of them use the same GPU. uuid: this rank's GPU.

    NCCL refuses that, too, but only at its first collective, and without naming the ranks.
    """
    first_rank: dict[str, int] = {}
    for rank, gpu in enumerate(group.all_gather(uuid)):
        if gpu in first_rank:
            raise RequestError(
                f"ranks {first_rank[gpu]} and {rank} use the same GPU ({group.hosts[rank]}, {gpu})",
                "start one process"
                " per GPU and give each its LOCAL_RANK, or show each process only its own GPU, or set run.device=cpu",
            ).collective()
        first_rank[gpu] = rank
