"""The environment that a launcher sets: torchrun, or our own `--nproc`.

Only `train` and `evaluate` read its variables: the shell of a job's pod may have them, too.
"""

import os
import re
from dataclasses import replace

from pipeline.errors import RequestError
from pipeline.lazy import addon
from pipeline.machine import available_cpus, has_gpu
from pipeline.world import ALONE, VARIABLES, World, is_launched


def this_world(nproc: int | None = None) -> World:
    """Return this process's world. Raises RequestError if a launcher's variables are invalid.

    nproc: that of --nproc, which no process of a launcher may have.
    """
    missing = addon("models.compilation").missing_to_compile()
    alone = World(cpus=available_cpus(), has_gpu=has_gpu(), missing_to_compile=missing)
    if not is_launched():
        return alone
    if nproc is not None:
        problem = f"--nproc {nproc} with RANK and WORLD_SIZE in the environment"
        raise RequestError(problem, "give --nproc, or start with torchrun, not both")
    given = {name: os.environ.get(name, default) or "" for name, default in VARIABLES.items()}
    if all(text.isdecimal() for text in given.values()):
        rank, size, local_rank, local_size = map(int, given.values())
        if rank < size and local_rank < local_size <= size:
            address = _init_method() if size > 1 else None
            return replace(alone, size=size, local_size=local_size, rank=rank, local_rank=local_rank,
                           init_method=address)  # fmt: skip
    text = " ".join(f"{name}={value}" for name, value in given.items())
    raise RequestError(
        f"{text} in the environment is no place in a group", f"{ALONE}, or start with torchrun or --nproc"
    )


def _init_method() -> str | None:
    """Return INIT_METHOD, or None if it is not set and MASTER_ADDR and MASTER_PORT are."""
    given, port = os.environ.get("INIT_METHOD"), os.environ.get("MASTER_PORT")
    address = given if port is None or given else f"tcp://{os.environ.get('MASTER_ADDR', '')}:{port}"
    match = re.fullmatch(r"tcp://[^/\s]+:(\d{1,5})", address or "", re.ASCII)
    if match and 0 < int(match[1]) < 1 << 16:
        return given or None
    raise RequestError(
        f"RANK and WORLD_SIZE are set, but no address of rank 0: INIT_METHOD={given} MASTER_PORT={port}",
        f"set INIT_METHOD=tcp://HOST:PORT of rank 0's machine, or MASTER_ADDR and MASTER_PORT, or {ALONE},"
        " or start with torchrun or --nproc",
    )


def is_first(variable: str = "RANK") -> bool:
    """Return True unless the variable holds a rank above 0."""
    value = os.environ.get(variable, "0")
    return not (value.isdecimal() and int(value))


def forget_launcher() -> None:
    """Remove a launcher's variables from the environment of this process and of its children."""
    for name in VARIABLES:
        os.environ.pop(name, None)
