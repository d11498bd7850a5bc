"""Optimizers: torch's SGD and AdamW; `addons.models.timm_optimizers` has LAMB and Muon."""

from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pipeline.config.schema import Config
from pipeline.config.sections import Optimizer
from pipeline.errors import RequestError
from pipeline.lazy import addon


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Return the optimizer. The learning rate is set before each update, from the plan."""
    options = config.optimizer
    groups = parameter_groups(model, options)
    if options.name == "adamw":
        return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, fused=True)
    if options.name in ("lamb", "muon"):
        return addon("models.timm_optimizers").make(groups, options)  # type: ignore[no-any-return]
    # torch 2.14's fused SGD does not take sharded parameters, and chooses foreach by itself only if
    # neither option is given
    is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    optimizer = torch.optim.SGD(
        groups, lr=options.lr, momentum=options.momentum, nesterov=options.nesterov,
        fused=not is_sharded, foreach=is_sharded,
    )  # fmt: skip
    if options.momentum:
        # Zeros have the same effect as no buffer at the first step. If that step is skipped because
        # of an overflow (fp16), torch 2.14's fused SGD leaves new buffers uninitialised, with other
        # values in each process.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def parameter_groups(model: nn.Module, options: Optimizer) -> list[dict[str, Any]]:
    """Return the weights, with weight decay, and the norms (ndim < 2) and biases, without.

    With optimizer.layer_decay or head_lr such a pair for each `lr_scale`, the factor of the rate.

    A model may name more parameters without weight decay, or patterns of them, as timm's do
    (`no_weight_decay`). Raises RequestError if it gives anything else.
    """
    patterns = getattr(model, "no_weight_decay", ())
    if callable(patterns):
        patterns = patterns()
    is_collection = isinstance(patterns, Collection) and not isinstance(patterns, str)
    if not is_collection or not all(isinstance(pattern, str) for pattern in patterns):
        problem = f"no_weight_decay of {type(model).__name__} gives a {type(patterns).__name__}"
        raise RequestError(problem, "give a set of parameters' names, as strings")
    scales: dict[str, float] = {}
    if options.layer_decay or options.head_lr:
        scales = addon("models.layers").rate_scales(model, options)
    pairs: dict[float, tuple[list[nn.Parameter], list[nn.Parameter]]] = {} if scales else {1.0: ([], [])}
    for name, param in model.named_parameters():
        if param.requires_grad:
            is_named = any(fnmatchcase(name, pattern) for pattern in patterns)
            is_decayed = param.ndim >= 2 and not name.endswith("bias") and not is_named
            decayed, others = pairs.setdefault(scales.get(name, 1.0), ([], []))
            (decayed if is_decayed else others).append(param)
    groups: list[dict[str, Any]] = []
    for scale, (decayed, others) in pairs.items():
        scaled = {"lr_scale": scale} if scales else {}
        groups.append({"params": decayed, "weight_decay": options.weight_decay, **scaled})
        groups.append({"params": others, "weight_decay": 0.0, **scaled})
    return groups
