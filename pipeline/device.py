"""The device of this process: a usable GPU, or the CPU if the request allows it."""

import os
from contextlib import suppress
from pathlib import Path

import torch

from pipeline.config.schema import Config
from pipeline.errors import RequestError, TemporaryError, one_line
from pipeline.lazy import addon
from pipeline.machine import has_gpu, no_gpu_error
from pipeline.timing import StepTimer
from pipeline.world import World, is_launched


def choose_device(config: Config, world: World) -> torch.device:
    """Return this process's device; never fall back to the CPU.

    Raises RequestError if a GPU is requested or present and torch cannot use it, TemporaryError if
    it is full or fails.
    """
    wanted = config.run.device
    if wanted == "cpu":
        return torch.device("cpu")  # without a look at the driver
    is_usable = torch.cuda.is_available()
    if wanted == "auto" and not has_gpu() and not is_usable:
        return torch.device("cpu")
    if not has_gpu() and not is_usable:
        raise no_gpu_error()
    software = f"torch {torch.__version__} (CUDA {torch.version.cuda}, driver {driver_version()})"
    if not is_usable:
        raise RequestError(
            f"this machine has a GPU, but {software} cannot use it",
            "update the driver (CUDA 13 needs 580 or later), or set run.device=cpu",
        )
    gpus = torch.cuda.device_count()
    # Slurm, for example, can show each process only its own GPU; `operate.start` compares them
    sees_only_its_gpu = gpus == 1 and is_launched() and "CUDA_VISIBLE_DEVICES" in os.environ
    if world.local_size > gpus and not sees_only_its_gpu:
        raise RequestError(
            f"{world.local_size} processes on this machine but {gpus} usable GPUs",
            "start one process per GPU, or set run.device=cpu",
        )
    device = torch.device("cuda", 0 if sees_only_its_gpu else world.local_rank)
    try:
        torch.cuda.set_device(device)
        _compute(device)
    except RuntimeError as error:
        problem = f"{software} cannot use the GPU {device} ({one_line(error)})"
        if "no kernel image" in str(error):  # the GPU is older or newer than this torch
            raise RequestError(problem, "install a build for it, or set run.device=cpu") from None
        raise TemporaryError(
            problem, "see nvidia-smi for what uses it, and give the same command again"
        ) from None
    return device


def _compute(device: torch.device) -> None:
    torch.ones(1, device=device).add_(1).item()


def make_timer(device: torch.device) -> StepTimer:
    """Return the timer for steps on a device."""
    timer: StepTimer = addon("run.timing").CudaStepTimer() if device.type == "cuda" else StepTimer()
    return timer


def driver_version() -> str:
    """Return the version of NVIDIA's kernel module."""
    with suppress(OSError):
        return Path("/sys/module/nvidia/version").read_text(encoding="utf-8").strip()
    return "unknown"
