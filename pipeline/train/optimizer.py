"""Optimizers: torch's SGD and AdamW, and timm's LAMB and Muon.

LAMB: You et al., "Large batch optimization for deep learning", 2020. Muon: Jordan et al., 2024
(kellerjordan.github.io/posts/muon), with a learning rate scaled to match AdamW's as in Liu et al.,
"Muon is scalable for LLM training", 2025. It updates matrices and convolutions, AdamW all else.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pipeline.config.schema import Config
from pipeline.errors import RequestError
from pipeline.model.architectures import parameter_groups


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
    if options.name == "lamb":
        return _timm("Lamb")(groups, lr=options.lr, betas=options.betas, max_grad_norm=None)  # train.clip does that
    if options.name == "muon":
        groups[1]["use_fallback"] = True
        return _timm("Muon")(
            groups, lr=options.lr, betas=options.betas, momentum=options.momentum, nesterov=options.nesterov
        )
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


def _timm(name: str) -> Callable[..., torch.optim.Optimizer]:
    try:
        from timm import optim

        return getattr(optim, name)  # type: ignore[no-any-return]
    except (ImportError, AttributeError):
        raise RequestError(
            f"optimizer.name={name.lower()} needs timm 1.0.21 or later",
            "pip install 'ddp-pipeline[timm]', or use sgd or adamw",
        ) from None
