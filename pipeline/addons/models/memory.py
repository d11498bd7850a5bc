"""Passes that fit: if one needs more memory than the device has, smaller passes make the same step.

Promise: global batch, order, augmentation and mixing stay the same, since passes only slice a
global batch. What changes is the pass: batch norm sees fewer images at once, and sums are rounded
elsewhere. So a deterministic run is refused instead, with the batch.accumulate that fits. All
processes use the number of passes that the process with the least memory needs. A pass is tried
before any gradient is exchanged, so a process that fails leaves no other one waiting.
"""

import re
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from pipeline.addons.datasets.resident_limits import resident_bytes
from pipeline.config.schema import Config
from pipeline.errors import RequestError, one_line
from pipeline.group import Group
from pipeline.model.normalise import Normalise
from pipeline.parallel.strategy import autocast
from pipeline.plan import Plan

# of CUDA and NCCL; of cuDNN, whose algorithms all need more; of cuBLAS and cuDNN
_SHORTAGES = re.compile("out of memory|unable to find an engine|STATUS_ALLOC_FAILED")
_NCCL_BYTES = 2**30


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the device's memory was too small for torch or a library that it calls."""
    is_torchs = isinstance(error, torch.OutOfMemoryError)
    return is_torchs or (isinstance(error, RuntimeError) and bool(_SHORTAGES.search(str(error))))


def explain_shortage(error: Exception, config: Config, plan: Plan) -> RequestError | None:
    """Return the error of a start whose first steps do not fit into memory; None for any other."""
    if not is_out_of_memory(error):
        return None
    key, processes = ("exact.shards", plan.world) if config.run.exact else ("batch.accumulate", 1)
    problem = f"the first steps do not fit into memory ({one_line(error)})"
    return RequestError(problem, f"raise {key}, which is {plan.accumulate * processes}")


def fit_model(config: Config, plan: Plan, group: Group, model: nn.Module, log: Callable[[str], None]) -> Plan:
    """Return the plan with as many passes a step as the memory needs, see `fit_passes`."""
    return fit_passes(config, plan, group, make_try_pass(model, config, plan, group.device), log)


def fit_passes(
    config: Config, plan: Plan, group: Group, try_pass: Callable[[int], None], log: Callable[[str], None]
) -> Plan:
    """Return the plan with as many passes a step as the memory needs.

    try_pass: runs a pass of the given number of images in this process; raises an error for which
    `is_out_of_memory` holds if they are too many. Raises RequestError if no pass fits, or if the
    run cannot have more: a deterministic one, or one with CUDA graphs.
    """
    images, unit = plan.process_batch, 2 if config.mixes else 1  # mixing needs pairs
    shortage = f"a pass of {plan.micro_batch} images does not fit into the memory of {group.device}"
    reason = ""
    for accumulate in range(plan.accumulate, images // unit + 1, plan.accumulate):
        if images % (accumulate * unit):
            continue
        try:
            try_pass(images // accumulate)
            is_too_large = False
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            is_too_large, reason = True, f" ({one_line(error)})"
        if any(group.any_rank(is_too_large)):
            continue
        if accumulate == plan.accumulate:
            return plan
        if config.is_deterministic_on_gpus:
            key = "exact.shards" if config.run.exact else "batch.accumulate"
            value = accumulate * (plan.world if config.run.exact else 1)
            remedy = f"fewer at once would change the bits; {key}={value} fits"
            raise RequestError(shortage, remedy).collective()
        if config.train.compile == "reduce-overhead":
            remedy = "train.compile=reduce-overhead needs one pass; lower batch.global"
            raise RequestError(shortage, remedy).collective()
        log(f"{shortage}: batch.accumulate={accumulate} makes the same batch")
        return replace(plan, accumulate=accumulate, micro_batch=images // accumulate)
    remedy = "choose a smaller model.arch or augment.size, or parallel=fsdp"
    raise RequestError(f"{shortage}, nor does one of {unit}{reason}", remedy).collective()


def make_try_pass(
    model: nn.Module, config: Config, plan: Plan, device: torch.device
) -> Callable[[int], None]:
    """Return a function that tries a pass of so many images, with room for all else on the device.

    That is moments, EMA and resident images. With several processes also what NCCL needs, and the
    gradients' second buckets, which DDP makes.
    """
    is_alone = plan.world == 1
    copies = config.optimizer.moments + (1 if config.train.ema is not None else 0) + (0 if is_alone else 1)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    normalise = Normalise(device, channels_last=config.model.channels_last)

    def try_pass(images: int) -> None:
        buffers = [buffer.clone() for buffer in model.buffers()]  # running statistics
        num_bytes = 4 * copies * parameters + (0 if is_alone else _NCCL_BYTES)
        num_bytes += resident_bytes(config, plan, device.type)
        held = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        blank = torch.zeros((images, 3, plan.image_size, plan.image_size), dtype=torch.uint8)
        try:
            with autocast(device, config.train.precision):
                logits = model(normalise(blank))
            logits.float().sum().backward()
        finally:
            del held
            model.zero_grad()
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)
            torch.cuda.empty_cache()

    return try_pass
