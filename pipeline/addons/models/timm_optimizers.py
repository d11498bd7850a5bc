"""timm's LAMB and Muon.

LAMB: You et al., "Large batch optimization for deep learning", 2020. Muon: Jordan et al., 2024
(kellerjordan.github.io/posts/muon), with a learning rate scaled to match AdamW's as in Liu et al.,
"Muon is scalable for LLM training", 2025. It updates matrices and convolutions, AdamW all else.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

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
    muon = _timm("muon")
    if any(weight.device.type == "cuda" for group in groups for weight in group["params"]):
        muon = batched(muon)
    return muon(groups, lr=options.lr, betas=options.betas, **momentum)


def batched(muon: Any) -> Any:
    """Return timm's Muon with one iteration for all matrices of a shape, in place of one each.

    Each of timm's is some 45 small kernels, which a GPU's host is too slow to queue.
    """
    update = inspect.getmodule(muon).muon  # type: ignore[union-attr]
    keys = [name for name in inspect.signature(update).parameters if name in muon([torch.zeros(1)]).defaults]

    class BatchedMuon(muon):  # type: ignore[misc]
        @torch.no_grad()
        def step(self) -> None:
            for group in self.param_groups:
                of_shape: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
                for weight in group["params"]:  # those that timm has chosen, at the first step
                    if weight.grad is not None and self.state[weight].get("use_muon"):
                        of_shape[len(weight), weight[0].numel()].append(weight)
                for weights in of_shape.values():
                    momenta = [self.state[weight]["momentum_buffer"] for weight in weights]
                    _update(partial(update, **{key: group[key] for key in keys}), weights, momenta)
                    for weight in weights:
                        weight.grad = None  # timm updates the others
            super().step()

    return BatchedMuon


def _update(muon: Callable[..., None], weights: list[Tensor], momenta: list[Tensor]) -> None:
    """Update weights of one shape, a convolution's as a matrix, [out, in × height × width]."""

    def stacked(tensors: list[Tensor]) -> Tensor:
        return torch.stack([tensor.flatten(1) for tensor in tensors], -1)

    all_weights, all_momenta = stacked(weights), stacked(momenta)
    gradients = stacked([weight.grad for weight in weights if weight.grad is not None])
    # a stack of matrices is to timm one convolution, each of whose positions is a matrix
    muon([all_weights], [gradients], [all_momenta], conv_mode="batched", normalize_spatial=False)
    for whole, tensors in ((all_weights, weights), (all_momenta, momenta)):
        parts = [part.reshape(tensor.shape) for part, tensor in zip(whole.unbind(-1), tensors, strict=True)]
        torch._foreach_copy_(tensors, parts)


def _timm(name: str) -> Any:
    try:
        from timm import optim

        return getattr(optim, name.capitalize())
    except (ImportError, AttributeError):
        remedy = "pip install 'ddp-pipeline[timm]', or use sgd or adamw"
        raise RequestError(f"optimizer.name={name} needs timm 1.0.21 or later", remedy) from None
