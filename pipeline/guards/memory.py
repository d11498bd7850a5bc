"""Passes that fit: where one is too large for a device's memory, more and smaller ones make the same step.

Promise: global batch, order, augmentation and mixing stay what they are, since passes only slice a global batch. What
changes is a pass: batch norm sees fewer images at once, and sums are rounded in other places. So a run that promises its
bits is refused instead, with the batch.accumulate that fits. All processes go by the one with the least room. A pass is
tried before gradients have anywhere to meet, so that a process that fails leaves no other waiting in an exchange.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from pipeline.config.schema import Config
from pipeline.errors import RequestError
from pipeline.group import Group
from pipeline.model.architectures import Normalise
from pipeline.parallel.strategy import autocast
from pipeline.plan import Plan


def fit_passes(
    config: Config, plan: Plan, group: Group, attempt: Callable[[int], None], log: Callable[[str], None]
) -> Plan:
    """The plan with as many passes a step as it takes. RequestError if none fits, or if that would change promised bits.

    attempt: one pass of so many images at this process; raises torch.OutOfMemoryError if they are too many.
    """
    images, pairs = plan.process_batch, 2 if config.mixes else 1
    for accumulate in range(plan.accumulate, images // pairs + 1, plan.accumulate):
        if images % accumulate or images // accumulate % pairs:
            continue
        (too_large,) = group.any_rank(not _fits(attempt, images // accumulate))
        if too_large:
            continue
        if accumulate == plan.accumulate:
            return plan
        shortage = f"a pass of {plan.micro_batch} images does not fit into the memory of {_name(group.device)}"
        if config.is_deterministic:
            key = "exact.shards" if config.run.exact else "batch.accumulate"
            value = accumulate * (plan.world if config.run.exact else 1)
            raise RequestError(f"{shortage}, and fewer at once would have other bits: {key}={value} fits").collective()
        log(
            f"{shortage}: {accumulate} passes of {images // accumulate} make the same batch"
            f" (batch.accumulate={accumulate})"
        )
        return replace(plan, accumulate=accumulate, micro_batch=images // accumulate)
    raise RequestError(
        f"not even a pass of {pairs} of {plan.image_size} px fits into the memory of {_name(group.device)}: take a smaller"
        " model.arch or augment.size, or parallel=fsdp"
    ).collective()


def one_pass(model: nn.Module, config: Config, plan: Plan, device: torch.device) -> Callable[[int], None]:
    """Of the bare model, forward and backward on blank images, with room held for optimizer and average."""
    copies = config.optimizer.moments + (config.train.ema is not None)
    parameters = sum(one.numel() for one in model.parameters())
    normalise = Normalise(device, channels_last=config.model.channels_last)

    def attempt(images: int) -> None:
        before = [buffer.clone() for buffer in model.buffers()]  # running statistics
        held = torch.empty(4 * copies * parameters, dtype=torch.uint8, device=device)
        blank = torch.zeros((images, 3, plan.image_size, plan.image_size), dtype=torch.uint8)
        try:
            with autocast(device, config):
                answer = model(normalise(blank))
            answer.float().sum().backward()
        finally:
            del held
            model.zero_grad()
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)
            torch.cuda.empty_cache()

    return attempt


def _fits(attempt: Callable[[int], None], images: int) -> bool:
    try:
        attempt(images)
    except torch.OutOfMemoryError:
        return False
    return True


def _name(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    total = torch.cuda.get_device_properties(device).total_memory
    return f"{torch.cuda.get_device_name(device)} ({total / 2**30:.0f} GiB)"
