"""One process: gradients are where they are needed. Also the interface that the others fill in."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from pipeline.group import Group
from pipeline.plan import Plan


class Strategy:
    """How a model is run so that after the last pass of a step every process holds the mean gradient."""

    can_guard = True
    """Whether an update may be skipped on the device, by a flag of its own (`train.finite`)."""

    def __init__(self, model: nn.Module, group: Group, plan: Plan) -> None:
        self.model = model
        """The bare model: what is evaluated, saved and digested."""
        self.group = group
        self.divisor = plan.accumulate
        """What the mean loss of a pass is divided by, so that a step's gradients are those of the mean over its batch."""

        self._compiles = plan.compiles
        self._run = self._compiled(model)

    def forward(self, images: Tensor) -> Tensor:
        """images: [B, 3, H, W] float -> logits [B, classes]."""
        logits: Tensor = self._run(images)
        return logits

    def _compiled(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        """`module` as the plan has it run; it is compiled at its first call, once for each size of images."""
        return torch.compile(module, dynamic=False) if self._compiles else module

    def accumulating(self, micro: int) -> AbstractContextManager[None]:
        """Around the forward and backward of pass `micro` of a step: gradients are exchanged in the last alone."""
        return nullcontext()

    def out_of_range(self) -> bool:
        """Whether a gradient of this step could not be summed as promised; then there must be no update."""
        return False

    def remark(self) -> str | None:
        """What somebody should know about the sums made so far."""
        return None

    def replicas(self) -> dict[str, Tensor]:
        """What every process holds alike after each update, bit for bit, by name."""
        return dict(self.model.named_parameters())

    def warm_up(self, backward: Callable[[], None]) -> None:
        """Settle whatever the first backward pass settles; the state is loaded after this, so nothing of it stays."""

    def share_buffers(self, model: nn.Module) -> None:
        """Give every process the same buffers of `model` (batch-norm statistics), before it is judged."""
