"""The device of this process: a usable GPU, or the CPU if the request allows it."""

import re

import torch

from pipeline.config.schema import Config
from pipeline.errors import RequestError
from pipeline.machine import has_gpu, no_gpu_error
from pipeline.world import World


def choose_device(config: Config, world: World) -> torch.device:
    """This process's device. RequestError, never a silent CPU, if a GPU is there or asked for and cannot be used."""
    wanted = config.run.device
    if wanted == "cpu" or (wanted == "auto" and not has_gpu() and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if not has_gpu():
            raise no_gpu_error()
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
