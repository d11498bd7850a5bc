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
from torch.nn import Module

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
_ONE_PASS = "train.compile=reduce-overhead needs one pass; lower batch.global"


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the device's memory was too small for torch or a library that it calls."""
    is_torchs = isinstance(error, torch.OutOfMemoryError)
    return is_torchs or (isinstance(error, RuntimeError) and bool(_SHORTAGES.search(str(error))))


def explain_shortage(error: Exception, config: Config, plan: Plan, first_step: int) -> RequestError | None:
    """Return the error of a start whose first steps do not fit into memory; None for any other."""
    if not is_out_of_memory(error):
        return None
    key, processes = ("exact.shards", plan.world) if config.run.exact else ("batch.accumulate", 1)
    problem = f"the first steps do not fit into memory ({one_line(error)})"
    if first_step:  # a resumed run keeps its passes
        return RequestError(problem, "resume it with more processes, or on devices with more memory")
    remedy = f"raise {key}, which is {plan.accumulate * processes}"
    return RequestError(problem, _ONE_PASS if config.train.compile == "reduce-overhead" else remedy)


def fit_passes(config: Config, plan: Plan, group: Group, model: Module, log: Callable[[str], None]) -> Plan:
    """Return the plan with as many passes a step as the memory needs.

    Raises RequestError if no pass fits, or if the run cannot have more: a deterministic one, or one
    with CUDA graphs.
    """
    images, unit = plan.process_batch, 2 if config.mixes else 1  # mixing needs pairs
    shortage = f"a pass of {plan.micro_batch} images does not fit into the memory of {group.device}"
    reason = ""
    for accumulate in range(plan.accumulate, images // unit + 1, plan.accumulate):
        if images % (accumulate * unit):
            continue
        try:
            try_pass(config, plan, model, images // accumulate)
            is_too_large = False
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            is_too_large, reason = True, f" ({one_line(error)})"
        if any(group.any_rank(is_too_large)):
            continue
        if accumulate == plan.accumulate:
            return plan
        if config.train.compile == "reduce-overhead":
            raise RequestError(shortage, _ONE_PASS).collective()
        if config.is_deterministic_on_gpus:
            key = "exact.shards" if config.run.exact else "batch.accumulate"
            value = accumulate * (plan.world if config.run.exact else 1)
            remedy = f"fewer at once would change the bits; {key}={value} fits"
            raise RequestError(shortage, remedy).collective()
        log(f"{shortage}: batch.accumulate={accumulate} makes the same batch")
        return replace(plan, accumulate=accumulate, micro_batch=images // accumulate)
    remedy = "choose a smaller model.arch or augment.size, or parallel=fsdp"
    raise RequestError(f"{shortage}, nor does one of {unit}{reason}", remedy).collective()


def try_pass(config: Config, plan: Plan, model: Module, images: int) -> None:
    """Run one pass of `images` images, with room for all else on the device of the model.

    That is moments, EMA and resident images. With several processes also what NCCL needs, and the
    gradients' second buckets, which DDP makes. Raises an error for which `is_out_of_memory` holds
    if the images are too many.
    """
    device, is_alone = next(model.parameters()).device, plan.world == 1
    copies = config.optimizer.moments + (1 if config.train.ema is not None else 0) + (0 if is_alone else 1)
    num_bytes = 4 * copies * sum(parameter.numel() for parameter in model.parameters())
    num_bytes += resident_bytes(config, plan, device.type) + (0 if is_alone else _NCCL_BYTES)
    buffers = [buffer.clone() for buffer in model.buffers()]  # running statistics
    held = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    blank = torch.zeros((images, 3, plan.image_size, plan.image_size), dtype=torch.uint8)
    try:
        with autocast(device, config.train.precision):
            logits = model(Normalise(device, config.model)(blank))
        logits.float().sum().backward()
    finally:
        del held
        model.zero_grad()
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
        torch.cuda.empty_cache()
