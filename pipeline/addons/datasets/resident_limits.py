"""The rule by which images live on the training device, see `data.resident`. No torch here."""

import math

from pipeline.config.schema import Config
from pipeline.errors import RequestError
from pipeline.plan import Plan
from pipeline.world import World

_LIMITS = {"cuda": 1 << 30, "cpu": 1 << 28}
"""Most bytes of each split's images that a process keeps on its device, with data.resident=auto."""


def mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def why_not(config: Config, plan: Plan, world: World) -> str:
    """Return why the training images do not live on the device, or "" if they do.

    Raises RequestError if data.resident=on asks for what cannot be.
    """
    mode, options = config.data.resident, config.augment
    if mode == "off":
        return "data.resident=off"
    impossible = {
        "augment.pad=0 crops and resizes each image anew": not options.pad,
        f"augment.policy={options.policy} changes colours and shapes": options.policy != "none",
        "augment.first_size changes their size": plan.first_size < plan.image_size,
    }
    num_bytes = _bytes(plan.train_images, plan.image_size)
    limit = _LIMITS["cuda" if world.uses_gpu(config.run.device) else "cpu"]
    useless = {
        f"{mib(num_bytes)} of pixels exceed {mib(limit)}": num_bytes > limit,
        "the run is shorter than an epoch": plan.last_step < plan.steps_per_epoch,
    }
    reasons = impossible if mode == "on" else impossible | useless
    reason = next((reason for reason, holds in reasons.items() if holds), "")
    if reason and mode == "on":
        raise RequestError(f"data.resident=on is not possible: {reason}", "set it to auto")
    return reason


def validation_bytes(config: Config, images: int, world: int, device_type: str) -> int:
    """Return the bytes of the validation images that a process keeps on its device; 0: none."""
    num_bytes = _bytes(math.ceil(images / world), config.evaluate.size or config.augment.size)
    is_small = num_bytes <= _LIMITS[device_type]
    return num_bytes if {"off": False, "auto": is_small, "on": True}[config.data.resident] else 0


def resident_bytes(config: Config, plan: Plan, device_type: str) -> int:
    """Return the bytes of the images that a process keeps on its device, of both splits."""
    training = 0 if plan.not_resident else _bytes(plan.train_images, plan.image_size)
    return training + validation_bytes(config, plan.val_images, plan.world, device_type)


def _bytes(images: int, size: int) -> int:
    return images * 3 * size**2
