"""The ranks of a run, as a launcher sets them in the environment.

A process started by torchrun (or by our own `--nproc`, which is the same agent) reads its rank from
RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. They can also be set by hand. Without them the
world is this one process (`pipeline.launcher`).
"""

import os
from dataclasses import dataclass, replace

from pipeline.errors import RequestError

VARIABLES = {"RANK": None, "WORLD_SIZE": None, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
"""The launcher's variables and their defaults."""
ALONE = "unset RANK and WORLD_SIZE to train or evaluate alone"


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
    init_method: str | None = None
    """Rendezvous address tcp://HOST:PORT; None: that of MASTER_ADDR and MASTER_PORT."""
    has_gpu: bool = False
    missing_to_compile: str = ""
    """Missing torch.compile prerequisite, or ""."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def uses_gpu(self, device: str) -> bool:
        """Return True if a run with run.device=`device` uses this machine's GPUs."""
        return self.has_gpu and device != "cpu"

    def resized(self, size: int, nodes: int = 1) -> "World":
        """Return rank 0's world with `size` processes on `nodes` machines like this one."""
        if size % nodes:
            raise RequestError(
                f"--world {size} does not divide by --nodes {nodes}", f"give --world a multiple of {nodes}"
            )
        return replace(self, size=size, local_size=size // nodes, rank=0, local_rank=0)


def is_launched() -> bool:
    """Return True if a launcher has set this process's rank."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ
