"""timm's LAMB and Muon.

LAMB: You et al., "Large batch optimization for deep learning", 2020. Muon: Jordan et al., 2024
(kellerjordan.github.io/posts/muon), with a learning rate scaled to match AdamW's as in Liu et al.,
"Muon is scalable for LLM training", 2025. It updates matrices and convolutions, AdamW all else.
"""

from typing import Any

from pipeline.config.schema import Config
from pipeline.config.sections import Optimizer
from pipeline.errors import RequestError


def check_optimizer_exists(config: Config) -> None:
    """Raise RequestError if the optimizer's library is not installed, or is too old."""
    if config.optimizer.name in ("lamb", "muon"):
        _timm(config.optimizer.name)


def make(groups: list[dict[str, Any]], options: Optimizer) -> Any:
    """Return LAMB; or Muon for each first group, the weights, and AdamW for each second one."""
    if options.name == "lamb":  # it does not clip by itself: train.clip does
        return _timm("lamb")(groups, lr=options.lr, betas=options.betas, max_grad_norm=None)
    for group in groups[1::2]:
        group["use_fallback"] = True
    momentum = {"momentum": options.momentum, "nesterov": options.nesterov}
    return _timm("muon")(groups, lr=options.lr, betas=options.betas, **momentum)


def _timm(name: str) -> Any:
    try:
        from timm import optim

        return getattr(optim, name.capitalize())
    except (ImportError, AttributeError):
        remedy = "pip install 'ddp-pipeline[timm]', or use sgd or adamw"
        raise RequestError(f"optimizer.name={name} needs timm 1.0.21 or later", remedy) from None
