"""What torchrun on one node wants to know: one function, which compose, the rehearsal and the cluster's manifests print.

Every flag of torchrun can be given as `PET_<FLAG>`, so the command of a container is torchrun itself, without a shell in
between that would swallow signals. The values are those under which a lost worker, a lost node and a lost node 0 come back
by themselves (measured on Kubernetes 1.36, see docs/operations.md).
"""

from pipeline.config.schema import Config
from pipeline.errors import RequestError

JOB = "trainer"
"""Name of the job and of the service that gives its nodes their names."""
PORT = 29500
COMMAND = ("torchrun", "-m", "pipeline", "train")
SHUTDOWN_S = 90
"""Longer than a step and a save, shorter than the grace that a container is given to end."""
RESTARTS = 20
"""How often the ranks are started anew while their nodes live."""


def replacements(nodes: int) -> int:
    """How many nodes of a job may fail before it does: each lost one counts, and the loss of node 0 ends all of them."""
    return 10 * nodes


def memory_gib(gpus: int, nproc: int) -> int:
    """Return the most memory that a node may take: by its GPUs, or without any by its processes."""
    return 24 * gpus if gpus else 4 * nproc


def host(node: int) -> str:
    """Name under which the others find node `node`."""
    return f"{JOB}-{node}.{JOB}"


def check_resume(config: Config) -> None:
    """RequestError for a `run.resume` that every replacement of a node would obey again."""
    if config.run.resume != "auto":
        raise RequestError(
            f"run.resume={config.run.resume} would be obeyed again by each node that replaces a lost one, which must resume"
            " where the run is: leave it out; for a new run, give another run.dir (RUN_DIR in 10-config.yaml)"
        )


def environment(nodes: int, nproc: int | str) -> dict[str, str]:
    """Variables of each of `nodes` nodes with `nproc` processes (a number, or `gpu`: one for each GPU).

    The same for every node: ranks follow the nodes' names, so that rank 0 stays on node 0.
    """
    shared = {
        "PET_NPROC_PER_NODE": str(nproc),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_S),
        # what torchrun itself sets, with a warning, for more than one process; the plan then sets the threads
        "OMP_NUM_THREADS": "1",
    }
    if nodes == 1:
        return {"PET_STANDALONE": "1", **shared}
    return {
        "PET_NNODES": str(nodes),
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"{host(0)}:{PORT}",
        "PET_RDZV_ID": JOB,
        # longer than it takes to pull an image of many GB on a node that has none of it
        "PET_RDZV_CONF": "join_timeout=1800,read_timeout=300",
        "PET_MAX_RESTARTS": str(RESTARTS),
        # not in torch's documentation: without it the agents keep the store of a node that is gone, and hang
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **shared,
    }
