"""Optimizers: torch's SGD and AdamW, and timm's LAMB and Muon.

LAMB: You et al., "Large batch optimization for deep learning", 2020. Muon: Jordan et al., 2024
(kellerjordan.github.io/posts/muon), with a learning rate scaled to match AdamW's as in Liu et al.,
"Muon is scalable for LLM training", 2025. It updates matrices and convolutions, AdamW all else.
"""

from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pipeline.config.schema import Config
from pipeline.errors import RequestError


def check_optimizer_exists(config: Config) -> None:
    """Raise RequestError if the optimizer's library is not installed, or is too old."""
    if config.optimizer.name in ("lamb", "muon"):
        _timm(config.optimizer.name.capitalize())


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Return the optimizer. The learning rate is set before each update, from the plan."""
    options = config.optimizer
    groups = parameter_groups(model, options.weight_decay)
    if options.name == "adamw":
        return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, fused=True)
    if options.name == "lamb":  # train.clip clips, not LAMB itself
        return _timm("Lamb")(groups, lr=options.lr, betas=options.betas, max_grad_norm=None)
    momentum: dict[str, Any] = {"momentum": options.momentum, "nesterov": options.nesterov}
    if options.name == "muon":
        groups[1]["use_fallback"] = True
        return _timm("Muon")(groups, lr=options.lr, betas=options.betas, **momentum)
    # torch 2.14's fused SGD does not take sharded parameters, and chooses foreach by itself only if
    # neither option is given
    is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    optimizer = torch.optim.SGD(groups, lr=options.lr, **momentum, fused=not is_sharded, foreach=is_sharded)
    if options.momentum:
        # Zeros have the same effect as no buffer at the first step. If that step is skipped because
        # of an overflow (fp16), torch 2.14's fused SGD leaves new buffers uninitialised, with other
        # values in each process.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the weights, with weight decay, and the norms (ndim < 2) and biases, without.

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
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, param in model.named_parameters():
        if param.requires_grad:
            is_named = any(fnmatchcase(name, pattern) for pattern in patterns)
            is_decayed = param.ndim >= 2 and not name.endswith("bias") and not is_named
            (decayed if is_decayed else others).append(param)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def _timm(name: str) -> Callable[..., torch.optim.Optimizer]:
    try:
        from timm import optim

        return getattr(optim, name)  # type: ignore[no-any-return]
    except (ImportError, AttributeError):
        raise RequestError(
            f"optimizer.name={name.lower()} needs timm 1.0.21 or later",
            "pip install 'ddp-pipeline[timm]', or use sgd or adamw",
        ) from None
