"""The ranks of a run: read from the environment that a launcher sets, before torch is imported.

A process started by torchrun (or by our own `--nproc`, which is the same agent) reads its place from RANK, WORLD_SIZE,
LOCAL_RANK and LOCAL_WORLD_SIZE. They may also be set by hand. A process without them is alone.
"""

import os
import re
from dataclasses import dataclass, replace

from pipeline.errors import RequestError
from pipeline.machine import available_cpus, has_gpu, missing_to_compile, shared_memory_bytes


@dataclass(frozen=True)
class World:
    size: int = 1
    """Processes in the whole job."""
    local_size: int = 1
    """Processes on this machine."""
    rank: int = 0
    local_rank: int = 0
    cpus: int = 1
    """CPUs that the processes of this machine may use together."""
    shared_memory: int | None = None
    """Bytes of /dev/shm, all of it; None where that is not known."""
    init_method: str | None = None
    """Where processes meet: tcp://HOST:PORT; None: at MASTER_ADDR and MASTER_PORT, as launchers set them."""
    has_gpu: bool = False
    missing_to_compile: str = ""
    """What torch.compile wants and this machine has not; empty where it has all."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def resized(self, size: int, nodes: int = 1) -> "World":
        """The same machine with another number of processes, seen from rank 0. RequestError if nodes do not divide it."""
        if size % nodes:
            raise RequestError(f"--world {size} does not divide by --nodes {nodes}: give the same number to each")
        return replace(self, size=size, local_size=size // nodes, rank=0, local_rank=0)


def is_launched() -> bool:
    """Whether a launcher gave this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def from_environment() -> World:
    """This process's place. RequestError if a launcher's variables make no sense."""
    if not is_launched():
        return World(
            cpus=available_cpus(),
            shared_memory=shared_memory_bytes(),
            has_gpu=has_gpu(),
            missing_to_compile=missing_to_compile(),
        )
    values = {}
    for name, default in (("RANK", ""), ("WORLD_SIZE", ""), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")):
        text = os.environ.get(name, default)
        if not text.isdecimal():
            raise RequestError(
                f"{name}={text!r} in the environment is not a whole number: start with torchrun or --nproc"
            )
        values[name] = int(text)
    rank, size, local_rank, local_size = values.values()
    if not (rank < size and local_rank < local_size <= size):
        given = " ".join(f"{name}={value}" for name, value in values.items())
        raise RequestError(f"{given} in the environment make no group of processes: start with torchrun or --nproc")
    meet = _meeting_place() if size > 1 else None
    return World(
        size,
        local_size,
        rank,
        local_rank,
        available_cpus(),
        shared_memory_bytes(),
        meet,
        has_gpu(),
        missing_to_compile(),
    )


def _meeting_place() -> str | None:
    given = os.environ.get("INIT_METHOD")
    if given is None and "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        port = os.environ["MASTER_PORT"]
        if not _is_port(port):
            raise RequestError(
                f"MASTER_PORT={port!r} in the environment is not a port: a number from 1 to 65535, which rank 0's machine"
                " has free, or start with torchrun or --nproc"
            )
        return None
    if given is None or not re.fullmatch(r"tcp://[^/\s]+:\d+", given) or not _is_port(given.rpartition(":")[2]):
        raise RequestError(
            (
                f"INIT_METHOD={given!r} is not tcp://HOST:PORT, with a port from 1 to 65535"
                if given
                else "RANK and WORLD_SIZE are set, but no place to meet"
            )
            + ": set INIT_METHOD=tcp://HOST:PORT, an address of rank 0's machine, or MASTER_ADDR and MASTER_PORT, or start"
            " with torchrun or --nproc"
        )
    return given


def _is_port(text: str) -> bool:
    return bool(re.fullmatch(r"\d{1,5}", text, re.ASCII)) and 0 < int(text) < 1 << 16
