"""The interface of all strategies, and the strategy of a single process."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config.schema import Config
from pipeline.group import Group
from pipeline.lazy import addon
from pipeline.model.ema import make_ema
from pipeline.model.loss import Targets, classification_loss
from pipeline.model.normalise import Normalise
from pipeline.plan import Plan


class Strategy:
    """Runs forward and backward, so that each process has the mean gradient of what it updates."""

    is_replicated = True
    """Each process has the whole model; the passes of one do not wait for those of another."""

    def __init__(self, config: Config, plan: Plan, model: nn.Module, group: Group) -> None:
        self.model = model
        """The model without wrappers, or this process's part of it: what is updated and saved."""
        self.group = group
        self.scaler = torch.amp.GradScaler(group.device.type, enabled=config.train.precision == "fp16")
        """Scales the loss of fp16; elsewhere it does nothing."""
        self._passes = plan.accumulate
        self._loss_divisor = plan.accumulate  # so that a step's gradient is that of its mean loss
        self._options = config.train
        self.class_weights: Tensor | None = None  # [classes] float32: see train.class_weights
        self.teacher: Any = None  # with model.teacher: `addons.models.teacher.Teacher`
        self.warms_up = plan.compiles
        """The first pass of a process differs from later ones, so it is discarded."""
        self.normalise = Normalise(group.device, config.model, compiles=plan.compiles)
        self._run_model = self._compiled(model, plan)

    def forward_backward(self, micro: int, pixels: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """Run pass `micro` of a step; return its mean loss, [], and its logits, [B, classes].

        pixels: [B, 3, H, W] float32 on the device.
        """
        with self.gradient_sync(micro):
            with autocast(self.group.device, self._options.precision):
                logits = self.forward(pixels)
                loss = classification_loss(logits, targets, self._options, self.class_weights)
            scaled: Tensor = self.scaler.scale(loss / self._loss_divisor)
            scaled.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), logits.detach()

    def forward(self, pixels: Tensor) -> Tensor:
        """Return logits, [B, classes]. pixels: [B, 3, H, W] float32."""
        logits: Tensor = self._run_model(pixels)
        return logits

    def gradient_sync(self, micro: int) -> AbstractContextManager[None]:
        """Return the context of pass `micro`: gradients are exchanged in the last pass only."""
        return nullcontext()

    def on_gradients_computed(self, callback: Callable[[], None]) -> None:
        """Call `callback` in each backward pass, once this process has computed its gradients.

        For strategies with `is_replicated`.
        """
        # gradients arrive from the last layer to the first
        first = next(parameter for parameter in self.model.parameters() if parameter.requires_grad)
        first.register_post_accumulate_grad_hook(lambda _: callback())  # type: ignore[no-untyped-call]

    def clip_gradients(self, max_norm: float) -> None:
        """Scale the gradient of the whole model down to `max_norm` if its norm is larger."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def has_overflow(self) -> Tensor | bool:
        """Return True, or [] bool on the device, if a gradient of this step could not be summed."""
        return False

    def make_ema(self) -> nn.Module:
        """Return a copy of the model for its moving average, sharded as the model is."""
        return make_ema(self.model)

    def make_predictor(self, model: nn.Module) -> Callable[[Tensor], Tensor] | None:
        """Return a function, pixels [B, 3, H, W] to logits [B, classes], that all ranks call.

        B may be 0. None if each process can run `model` (this strategy's, or its EMA) alone.
        """
        return None

    def average_buffers(self, model: nn.Module) -> None:
        """Average the running statistics of `model` over the processes, if the run wants that."""

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Give every process the same running statistics of `model`, before it is evaluated."""
        self.average_buffers(model)
        self.group.broadcast(list(model.buffers()))

    def replicated_tensors(self) -> dict[str, Tensor]:
        """Return what must be bit-identical in all processes after an update if `is_replicated`."""
        return dict(self.model.named_parameters())

    def full_state(self, states: dict[str, Any]) -> dict[str, Any]:
        """Return the state dicts of the whole model on rank 0. All processes call it together.

        states: those of this process, `model`, `average` and `optimizer`, or some of them.
        """
        return states

    def local_state(self, states: dict[str, Any]) -> dict[str, Any]:
        """Return this process's part of the state dicts that `full_state` returned on rank 0."""
        return states

    def _compiled(self, module: nn.Module, plan: Plan) -> Callable[[Tensor], Tensor]:
        """Return `module`, compiled if the plan says so, at its first call with each image size."""
        if not plan.compiles:
            return module
        compiled_model = addon("models.compilation").compiled_model
        return compiled_model(module, plan, self.group.world)  # type: ignore[no-any-return]


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context in which forward passes run with train.precision."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast(device.type, dtypes.get(precision, torch.bfloat16), enabled=precision in dtypes)
