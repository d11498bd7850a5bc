"""The environment of one node, shared by compose, the rehearsal and the Kubernetes manifests.

torchrun accepts every flag as a variable `PET_<FLAG>`. So the command of a container is torchrun
itself, without a shell in between that would not pass signals on (but in the rehearsal). With these
values a run recovers by itself from a lost worker, a lost node and a lost node 0 (measured on
Kubernetes 1.36, see docs/operations.md).
"""

from collections.abc import Sequence

from pipeline.config.schema import Config
from pipeline.errors import RequestError
from pipeline.planning import divide_batch

JOB = "trainer"
"""Name of the job and of the service that gives its nodes their host names."""
_PORT = 29500
_BACKEND = "pipeline"  # the rendezvous of this folder. torchrun's own, c10d, unpickles what others send
COMMAND = ("torchrun", "-m", "pipeline", "train")
SHUTDOWN_TIMEOUT_S = 90
"""Longer than a step and a save, shorter than the grace period of a container."""
_MAX_RESTARTS = 20  # of the ranks by torchrun while their nodes stay alive
_ELASTIC_RESTARTS = 100  # if nodes come and go: torchrun counts a restart when a peer was drained


def max_replacements(nodes: int, min_nodes: int | None = None) -> int:
    """Return how many nodes of a job may fail. Those of an elastic job come and go."""
    return (100 if min_nodes else 10) * nodes


def memory_gib(gpus: int, nproc: int) -> int:
    """Return the memory limit of a node in GiB: by its GPUs, or by its processes if it has none."""
    return 24 * gpus if gpus else 4 * nproc


def host_name(node: int) -> str:
    """Return the name by which the other nodes find node `node`."""
    return f"{JOB}-{node}.{JOB}"


def check_resume_is_auto(config: Config) -> None:
    """Raise RequestError for a `run.resume` that is for one start, and not for all of a job."""
    if config.run.resume != "auto":
        problem = f"run.resume={config.run.resume} is for one start"
        problem += ", and a node that replaces another gets it too"
        raise RequestError(problem, "leave it out; for a new run, give another run.dir (in a pod: RUN_DIR)")


def allowed_nodes(config: Config, min_nodes: int | None, max_nodes: int, nproc: int) -> tuple[int, ...]:
    """Return the numbers of nodes from `min_nodes` to `max_nodes` whose processes divide the batch.

    () if the job is not elastic. Raises RequestError if there is none. nproc: processes of a node.
    """
    found, error = [], None
    for nodes in range(min_nodes, max_nodes + 1) if min_nodes else ():
        try:
            divide_batch(config, nodes * nproc)
            found.append(nodes)
        except RequestError as refused:
            error = refused
    if error and not found:
        raise error
    return tuple(found)


def environment(nodes: int, nproc: int | str, allowed: Sequence[int] = ()) -> dict[str, str]:
    """Return the variables of a node, the same for every node of the job.

    nproc: processes of a node. allowed: the numbers of nodes with which an elastic job trains.
    """
    shared = {
        "PET_NPROC_PER_NODE": str(nproc),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_TIMEOUT_S),
        # torchrun's own default, set here to avoid its warning; the plan then sets the threads
        "OMP_NUM_THREADS": "1",
    }
    if nodes == 1:
        return {"PET_RDZV_BACKEND": _BACKEND, "PET_RDZV_ENDPOINT": "localhost", **shared}
    options = ["join_timeout=1800"]  # longer than a node takes to pull an image of many GB
    if allowed:
        options.append(f"allowed_nodes={'+'.join(map(str, allowed))}")
    return {
        "PET_NNODES": f"{allowed[0]}:{nodes}" if allowed else str(nodes),
        "PET_RDZV_BACKEND": _BACKEND,
        "PET_RDZV_ENDPOINT": f"{host_name(0)}:{_PORT}",
        "PET_RDZV_ID": JOB,
        "PET_RDZV_CONF": ",".join(options),
        # all nodes have as many processes: their agents need not tell each other
        "TORCH_ELASTIC_WORKER_IDENTICAL": "1",
        "PIPELINE_FINISHED": "/tmp/finished",  # written by the preflight of a run that is finished
        "PET_MAX_RESTARTS": str(_ELASTIC_RESTARTS if allowed else _MAX_RESTARTS),
        **shared,
    }
