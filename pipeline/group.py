"""The process group of a run, and all its collectives except those on gradients.

Promise: every decision is collective. A process never stops, fails or saves because of something
that only it knows: it tells `any_rank` or the loss guard, and all processes act at the same step.
Sums of integers are exact at any world size. Values on the host travel over gloo, so that no
collective here waits for a GPU's stream. A strategy exchanges the gradients.
"""

import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.errors import RunError, TemporaryError
from pipeline.world import ALONE, World

T = TypeVar("T")

_GLOO_ERROR = r"\[[^]]*/gloo/[^]]*:\d+\] |Application timeout caused pair closure"
"""Start of what gloo raises, as RuntimeError (torch 2.14): file and line of its source."""
JOIN_ADVICE = f"start all processes of the job, or {ALONE}"


class Group:
    """The processes of a run: without `timeout_s` one, for which every collective is trivial."""

    def __init__(
        self, world: World, device: torch.device, timeout_s: float | None = None, restore_s: float = 0
    ) -> None:
        """timeout_s: of a collective. restore_s: how much longer the ranks wait until all join."""
        self.world, self.device = world, device
        self.rank, self.size, self.is_main = world.rank, world.size, world.is_main
        self.device_timeout: timedelta | None = None
        """The timeout of collectives on the device, also for subgroups that a strategy creates."""
        self._is_alone = timeout_s is None
        if timeout_s is not None:
            self._timeout = self.device_timeout = timedelta(seconds=timeout_s)
            self._join(timeout_s + restore_s)
        this = socket.gethostname(), os.getpid()
        ranks = self.all_gather(this)
        self.hosts = [host for host, _ in ranks]
        """The host name of each rank."""
        self.local_peer_pids = [pid for host, pid in ranks if host == this[0] and pid != this[1]]
        """The process ids of the other ranks on this machine."""

    def _join(self, timeout_s: float) -> None:
        world = self.world
        if world.local_size == world.size:
            # no other machine may reach the ranks: gloo unpickles what it receives
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl"
        timeout = timedelta(seconds=timeout_s)
        try:
            dist.init_process_group(
                backend, world.init_method, rank=world.rank, world_size=world.size, timeout=timeout
            )
        except (dist.DistNetworkError, dist.DistStoreError, dist.DistBackendError, TimeoutError) as error:
            raise TemporaryError(
                f"rank {world.rank} of {world.size} found no group within {timeout_s:g} s ({error})",
                JOIN_ADVICE,
            ) from error
        _set_timeout("cpu", self._timeout)

    def any_rank(self, *flags: bool) -> tuple[bool, ...]:
        """Return for each flag if it is set on any rank."""
        return self.ask_ranks(*flags)()

    def ask_ranks(self, *flags: bool) -> Callable[[], tuple[bool, ...]]:
        """Start `any_rank`; return a function that waits for its result."""
        if self._is_alone:
            return lambda: flags
        raised = torch.tensor(flags, dtype=torch.uint8)
        exchange = dist.all_reduce(raised, dist.ReduceOp.MAX, async_op=True)

        def result() -> tuple[bool, ...]:
            exchange.wait()
            return tuple(bool(flag) for flag in raised.tolist())

        return result

    def all_reduce(self, counts: Tensor) -> Tensor:
        """Return the sum over the ranks, on the CPU. counts: any shape, int64."""
        assert counts.dtype == torch.int64
        total = counts.to("cpu", copy=True)
        if not self._is_alone:
            dist.all_reduce(total)
        return total

    def all_reduce_async(self, counts: Tensor) -> dist.Work | None:
        """Start to replace `counts` (int64, on the device) by its sum over the ranks, in place."""
        return None if self._is_alone else dist.all_reduce(counts, async_op=True)

    def all_gather(self, item: Any) -> list[Any]:
        """Return the items of all ranks, in rank order, on every rank. For small, rare objects."""
        if self._is_alone:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item)  # uses the CPU backend if the group has one
        return items

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Return rank 0's bytes on every rank. data: ignored on other ranks."""
        if self._is_alone:
            return data or b""
        length = self.all_gather(len(data or b""))[0]
        buffer = torch.empty(length, dtype=torch.uint8)
        if data and self.is_main:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if length:
            dist.broadcast(buffer, 0)
        return buffer.numpy().tobytes()

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Replace each tensor by rank 0's, in place."""
        if not self._is_alone:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def all_reduce_mean(self, tensors: list[Tensor]) -> None:
        """Replace each floating-point tensor by its mean over the ranks, in place."""
        if self._is_alone or not tensors:
            return
        total = flatten([tensor.double() for tensor in tensors])
        dist.all_reduce(total)
        for tensor, mean in zip(tensors, split_like(total / self.size, tensors), strict=True):
            tensor.copy_(mean)

    def raise_together(self, error: RunError | None) -> None:
        """Raise on every rank the error of the lowest rank that has one; return if none has."""
        for found in self.all_gather(error):
            if found is not None:
                raise found.collective()

    def run_long_task(self, work: Callable[[], T]) -> T:
        """Run `work`, which may take longer on one rank than the others' collectives wait."""
        if self._is_alone:
            return work()
        with futures.ThreadPoolExecutor(1) as thread:
            task = thread.submit(work)
            while any(self.any_rank(not task.done())):
                futures.wait([task], timeout=1)
            return task.result()

    @contextmanager
    def extended_timeout(self, extra_s: float) -> Iterator[None]:
        """Have the collectives on the host wait `extra_s` longer in this context."""
        if self._is_alone:
            yield
            return
        _set_timeout("cpu", self._timeout + timedelta(seconds=extra_s))
        try:
            yield
        finally:
            _set_timeout("cpu", self._timeout)

    def set_device_timeout(self, timeout_s: float) -> None:
        """Set how long collectives on GPUs wait, of this group and of subgroups created later.

        At the timeout torch's NCCL watchdog aborts the process, without the traceback and the line
        of ours (torch 2.14, TORCH_NCCL_ASYNC_ERROR_HANDLING=3). So it must wait longer than ours.
        """
        if not self._is_alone and self.device.type == "cuda":
            self.device_timeout = timedelta(seconds=timeout_s)
            _set_timeout("cuda", self.device_timeout)

    def shutdown(self) -> None:
        """Wait for all ranks, then destroy the process group."""
        if not self._is_alone:
            # after the first rank exits, a launcher kills the others; rank 0 may still be saving
            self.any_rank(False)
            dist.destroy_process_group()


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of all tensors, in one dimension."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.zeros(0)


def split_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a flattened tensor, in the shapes of `tensors`."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _set_timeout(device: str, timeout: timedelta) -> None:
    """Set the timeout of later collectives of the process group's backend for `device`.

    `torch.distributed.set_timeout` (torch 2.14) would set that of both backends.
    """
    assert dist.group.WORLD is not None
    dist.group.WORLD._get_backend(torch.device(device))._set_default_timeout(timeout)


def is_peer_failure(error: Exception) -> bool:
    """Return True if an error is only the consequence of another process's failure."""
    is_of_gloo = isinstance(error, RuntimeError) and re.match(_GLOO_ERROR, str(error)) is not None
    return is_of_gloo or isinstance(error, dist.DistError)
