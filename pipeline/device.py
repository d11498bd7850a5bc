"""The device of this process: a usable GPU, or the CPU if the request allows it."""

import os
import re
from contextlib import suppress
from pathlib import Path

import torch

from pipeline.config.schema import Config
from pipeline.errors import RequestError
from pipeline.machine import has_gpu, no_gpu_error
from pipeline.world import World, is_launched


def choose_device(config: Config, world: World) -> torch.device:
    """Return this process's device.

    Raises RequestError if a GPU is requested or present and cannot be used; never falls back to the
    CPU.
    """
    wanted = config.run.device
    if wanted == "cpu" or (wanted == "auto" and not has_gpu() and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if not has_gpu():
            raise no_gpu_error()
        raise RequestError(
            f"this machine has a GPU, but torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use it with"
            f" driver {driver_version()}",
            "update the driver (CUDA 13 needs 580 or later), or set run.device=cpu",
        )
    gpus = torch.cuda.device_count()
    # Slurm, for example, can show each process only its own GPU; `group.start` compares them
    sees_only_its_gpu = gpus == 1 and is_launched() and "CUDA_VISIBLE_DEVICES" in os.environ
    if world.local_size > gpus and not sees_only_its_gpu:
        raise RequestError(
            f"{world.local_size} processes on this machine but {gpus} usable GPUs",
            "start one process per GPU, or set run.device=cpu",
        )
    device = torch.device("cuda", 0 if sees_only_its_gpu else world.local_rank)
    capability = torch.cuda.get_device_capability(device)
    built_for = torch.cuda.get_arch_list()
    if not any(_supports(arch, capability) for arch in built_for):
        raise RequestError(
            f"{torch.cuda.get_device_name(device)} is of compute capability {capability[0]}.{capability[1]}; torch"
            f" {torch.__version__} is built for {' '.join(built_for)}",
            "install a build for it, or set run.device=cpu",
        )
    torch.cuda.set_device(device)
    return device


def _supports(arch: str, capability: tuple[int, int]) -> bool:
    """Return True if code built for `arch` runs on a GPU of this compute capability.

    A binary (sm_86) runs on later minor versions of its major version, PTX (compute_86) on all
    later versions.
    """
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", arch)
    if not match:
        return False
    built = int(match[2]), int(match[3])
    return built <= capability and (match[1] == "compute" or built[0] == capability[0])


def driver_version() -> str:
    """Return the version of NVIDIA's kernel module."""
    with suppress(OSError):
        return Path("/sys/module/nvidia/version").read_text(encoding="utf-8").strip()
    return "unknown"
