"""One process: gradients are where they are needed. Also the interface that the others fill in."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config.schema import Config
from pipeline.group import Group
from pipeline.model.ema import make_ema
from pipeline.plan import Plan

Targets = tuple[Tensor, ...]
"""What a loss is made of besides the logits: tensors [B, …]."""
_RECOMPILES_PER_SIZE = 8  # torch's own limit, which it means for all sizes together (torch 2.14)


def autocast(device: torch.device, config: Config) -> torch.autocast:
    """The context in which a forward pass has its precision."""
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    precision = config.train.precision
    return torch.autocast(device.type, kinds.get(precision, torch.bfloat16), enabled=precision in kinds)


@dataclass(frozen=True)
class Objective:
    """What is minimised, and in which arithmetic."""

    mean_loss: Callable[[Tensor, Targets], Tensor]
    """Of logits [b, classes] and the targets [b, …] of the same images."""
    scale: Callable[[Tensor], Tensor]
    """Of fp16: what the loss is multiplied by before the backward pass."""
    autocast: Callable[[], AbstractContextManager[None]]
    """Around forward and loss."""


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A nested state with each tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(inner, change) for key, inner in value.items()}
    return value


class Strategy:
    """How a model is run so that after the last pass of a step every process has the mean gradient of what it updates."""

    is_replicated = True
    """Each process has the whole model, and waits for nobody until gradients meet."""
    can_guard = True
    """Whether an update may be skipped on the device, by a flag of its own (`train.finite`)."""
    note: str | None = None
    """What somebody should know who chose this."""

    def __init__(self, model: nn.Module, group: Group, plan: Plan) -> None:
        self.model = model
        """The model without wrappers, or what this process has of it: what is updated, averaged and saved."""
        self.group = group
        self.divisor = plan.accumulate
        """What the mean loss of a pass is divided by, so that a step's gradients are those of the mean over its batch."""
        self._compiles = plan.compiles
        self._num_sizes = len(plan.sizes)
        self._run = self._compiled(model)

    def forward_backward(
        self, micro: int, pixels: Tensor, targets: Targets, objective: Objective
    ) -> tuple[Tensor, Tensor]:
        """Pass `micro` of a step. pixels: [B, 3, H, W] float -> (its mean loss, logits [B, classes]), both detached."""
        with self.accumulating(micro):
            with objective.autocast():
                logits = self.forward(pixels)
                loss = objective.mean_loss(logits, targets)
            objective.scale(loss / self.divisor).backward()  # type: ignore[no-untyped-call]
        return loss.detach(), logits.detach()

    def forward(self, images: Tensor) -> Tensor:
        """images: [B, 3, H, W] float -> logits [B, classes]."""
        logits: Tensor = self._run(images)
        return logits

    def _compiled(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        """`module` as the plan has it run; it is compiled at its first call, once for each size of images."""
        if not self._compiles:
            return module
        from torch._dynamo import config  # a second to import

        # above its limit torch runs a size uncompiled, and a resumed run would compile other sizes
        limit = _RECOMPILES_PER_SIZE * self._num_sizes
        config.recompile_limit = max(config.recompile_limit, limit)
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, limit)
        return torch.compile(module, dynamic=False)

    def accumulating(self, micro: int) -> AbstractContextManager[None]:
        """Around the forward and backward of pass `micro` of a step: gradients are exchanged in the last alone."""
        return nullcontext()

    def clip(self, limit: float) -> None:
        """Scale the gradient down to this norm, of the whole model's, where it is larger."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    def make_ema(self) -> nn.Module:
        """What becomes the moving average of the model's weights: a copy, spread over the processes as they are."""
        return make_ema(self.model)

    def predictor(self, model: nn.Module) -> Callable[[Tensor], Tensor] | None:
        """[B, 3, H, W] float -> logits [B, classes] by all processes together, B perhaps 0 at some; None: each by itself.

        model: this strategy's, or its moving average.
        """
        return None

    def out_of_range(self) -> bool:
        """Whether a gradient of this step could not be summed as promised; then there must be no update."""
        return False

    def remark(self) -> str | None:
        """What somebody should know about the sums made so far."""
        return None

    def replicated_tensors(self) -> dict[str, Tensor]:
        """What every process holds alike after each update, bit for bit, by name."""
        return dict(self.model.named_parameters())

    def warm_up(self, backward: Callable[[], None]) -> None:
        """Settle whatever the first backward pass settles; the state is loaded after this, so nothing of it stays."""
        if self._compiles:
            backward()

    def average_buffers(self, model: nn.Module) -> None:
        """Give every process the mean of all running statistics, before a save, with model.batchnorm=average."""

    def share_buffers(self, model: nn.Module) -> None:
        """Give every process the same buffers of `model` (batch-norm statistics), before it is judged."""

    def full_state(self, contents: dict[str, Any]) -> dict[str, Any]:
        """State dicts (`model`, `average`, `optimizer`) as of the whole model: at rank 0, elsewhere they may be empty.

        By all processes together.
        """
        return contents

    def local_state(self, contents: dict[str, Any]) -> dict[str, Any]:
        """What this process has of what `whole` gave, and every process was told."""
        return contents
