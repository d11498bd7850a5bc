"""Who takes part: the processes of one run, and the few things they say to each other besides gradients.

Promise: every decision is collective. A process never stops, fails or saves on what it alone knows: it says it in
`agree`, one small reduction a step, and all act alike at the same step. Sums of integers are exact at any world size.
Host values travel over gloo, so that no exchange of ours waits for a GPU's stream; gradients are the strategy's business.

`Group` itself is the group of one, where everybody agrees at once; `Peers` is the group of several.
"""

import os
import re
import socket
from collections.abc import Callable
from concurrent import futures
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config import Config
from pipeline.verdict import RequestError, TemporaryError, Verdict
from pipeline.world import World, no_gpu, shows_gpu

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

    def agree(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether any process raised it."""
        return flags

    def sum(self, counts: Tensor) -> Tensor:
        """Sum of int64 counts over the processes, on the CPU. counts: any shape, int64."""
        return counts.to("cpu", copy=True)

    def start_sum(self, counts: Tensor) -> Pending:
        """Begin to overwrite `counts` (int64, on the device) with its sum over the processes."""
        return _Done()

    def gather(self, item: Any) -> list[Any]:
        """Everybody's item, in rank order, at every process. For small, rare things."""
        return [item]

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, at every process."""
        assert data is not None
        return data

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Overwrite each tensor with rank 0's."""

    def average(self, tensors: list[Tensor]) -> None:
        """Overwrite each floating-point tensor with its mean over the processes."""

    def raise_together(self, verdict: Verdict | None) -> None:
        """Raise at every process the first verdict that any of them brings; return if there is none."""
        for found in self.gather(verdict):
            if found is not None:
                raise found.common()

    def unhurried(self, work: Callable[[], T]) -> T:
        """Do `work`, which may take one process longer than the others may wait in an exchange."""
        return work()

    def finish(self) -> None:
        """Take leave of the others."""


class Peers(Group):
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

        places = self.gather((socket.gethostname(), os.getpid()))
        self.hosts = [host for host, _ in places]
        here, own = places[self.rank]
        self.pids_here = [pid for host, pid in places if host == here and pid != own]

    def agree(self, *flags: bool) -> tuple[bool, ...]:
        raised = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(raised, dist.ReduceOp.MAX)
        return tuple(bool(flag) for flag in raised.tolist())

    def sum(self, counts: Tensor) -> Tensor:
        assert counts.dtype == torch.int64
        total = counts.to("cpu", copy=True)
        dist.all_reduce(total)
        return total

    def start_sum(self, counts: Tensor) -> Pending:
        pending: Pending = dist.all_reduce(counts, async_op=True)
        return pending

    def gather(self, item: Any) -> list[Any]:
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

    def average(self, tensors: list[Tensor]) -> None:
        if not tensors:  # a model without batch norm
            return
        mean = torch.cat([tensor.double().flatten() for tensor in tensors])
        dist.all_reduce(mean)
        for tensor, part in zip(tensors, torch.split(mean / self.size, [one.numel() for one in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))

    def unhurried(self, work: Callable[[], T]) -> T:
        with futures.ThreadPoolExecutor(1) as thread:
            done = thread.submit(work)
            while any(self.agree(not done.done())):
                futures.wait([done], timeout=1)
            return done.result()

    def finish(self) -> None:
        self.agree(False)  # nobody leaves before rank 0 has saved: a launcher kills what outlives its first leaver
        dist.destroy_process_group()


def lost_a_peer(error: Exception) -> bool:
    """Whether an error is but the echo of another process's end."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def start(config: Config, world: World, device: torch.device) -> Group:
    """Join the group. TemporaryError if a peer does not come."""
    return Peers(world, device, config.run.timeout) if world.size > 1 else Group(world, device)


def choose_device(config: Config, world: World) -> torch.device:
    """This process's device. RequestError, never a silent CPU, if a GPU is there or asked for and cannot be used."""
    wanted = config.run.device
    if wanted == "cpu" or (wanted == "auto" and not shows_gpu() and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if not shows_gpu():
            raise no_gpu()
        built, driver = torch.version.cuda, driver_version()
        raise RequestError(
            f"a GPU is there but torch {torch.__version__} (CUDA {built}) cannot use it, driver {driver}: update the driver"
            " (CUDA 13 wants 580 or later), or train on the CPU with run.device=cpu"
        )
    if world.local_size > torch.cuda.device_count():
        raise RequestError(
            f"{world.local_size} processes on this machine but {torch.cuda.device_count()} usable GPUs: start one process"
            " a GPU, or set run.device=cpu"
        )
    device = torch.device("cuda", world.local_rank)
    major, minor = torch.cuda.get_device_capability(device)
    built_for = torch.cuda.get_arch_list()
    if not any(_serves(arch, major, minor) for arch in built_for):
        raise RequestError(
            f"{torch.cuda.get_device_name(device)} is of compute capability {major}.{minor}; torch {torch.__version__} is"
            f" built for {' '.join(built_for)}: install a build for it, or set run.device=cpu"
        )
    torch.cuda.set_device(device)
    return device


def _serves(arch: str, major: int, minor: int) -> bool:
    """A binary (sm_86) serves later minor versions of its own major one; PTX (compute_86) serves everything later."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", arch)
    if not match:
        return False
    built = int(match[2]), int(match[3])
    return built <= (major, minor) and (match[1] == "compute" or built[0] == major)


def driver_version() -> str:
    """Of NVIDIA's kernel module."""
    try:
        with open("/sys/module/nvidia/version") as file:
            return file.read().strip()
    except OSError:
        return "unknown"
