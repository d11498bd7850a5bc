"""All that must survive a restart, in one place.

Promise: a run that loads this state at step n goes on as the run that wrote it would have. That is why it is so little:
order, augmentation, dropout and the learning rate are functions of the step, so the step stands for all of them. It is
built whole and then loaded.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline.config.schema import Config
from pipeline.model.architectures import parameter_groups
from pipeline.parallel import Strategy
from pipeline.record.checkpoint import weights_digest


@dataclass(frozen=True)
class Evaluation:
    """The validation of one step's model, in integers: the same at any number of processes."""

    step: int
    images: int
    total: int
    correct1: int
    correct5: int
    loss_sum: int
    """In units of 2^-20."""
    not_finite: int = 0
    """Images whose logits are not finite: wrong answers, and in no sum. Checkpoints of version 0.1 do not have it."""

    @property
    def top1(self) -> float:
        return self.correct1 / self.images

    @property
    def top5(self) -> float:
        return self.correct5 / self.images

    @property
    def loss(self) -> float:
        """Return the mean loss; NaN if the logits of any image are not finite."""
        return math.nan if self.not_finite else self.loss_sum / 2**20 / self.images

    @property
    def warning(self) -> str | None:
        """Return a line that says how many images have logits that are not finite, or None."""
        if not self.not_finite:
            return None
        return (
            f"the logits of {self.not_finite} of {self.images} images are not finite: they count as wrong answers, the loss"
            " is nan, and this model is never the best; lower optimizer.lr or set train.clip"
        )


@dataclass
class TrainState:
    strategy: Strategy
    """How the rest is spread over the processes: what is written down is the whole."""
    model: nn.Module
    optimizer: torch.optim.Optimizer
    ema: nn.Module | None
    """The moving average of the weights, where the recipe asks for one."""
    scaler: torch.amp.GradScaler
    """Of fp16; elsewhere it does nothing."""
    totals: Tensor
    """[loss in 2^-20, correct, images] int64 on the device: since the last report, not yet summed over processes."""
    step: int = 0
    """Updates made: the run's only position."""
    evaluation: Evaluation | None = None
    """The last one made."""
    best: Evaluation | None = None
    bad_images: dict[int, str] = field(default_factory=dict)
    """Sample id of each training image found undecodable so far, and why."""

    @classmethod
    def build(cls, strategy: Strategy, config: Config) -> "TrainState":
        model, device = strategy.model, strategy.group.device
        average = strategy.make_ema() if config.train.ema is not None else None
        scaler = torch.amp.GradScaler(device.type, enabled=config.train.precision == "fp16")
        totals = torch.zeros(3, dtype=torch.int64, device=device)
        return cls(strategy, model, _optimizer(model, config), average, scaler, totals)

    def to_dict(self, totals: Tensor) -> dict[str, Any]:
        """Tensors, numbers and strings; at rank 0 of the whole model, by all processes together.

        totals: this state's, summed over the processes.
        """
        return {
            "step": self.step,
            **self.strategy.full_state(
                {
                    "model": self.model.state_dict(),
                    "average": self.ema.state_dict() if self.ema else None,
                    "optimizer": self.optimizer.state_dict(),
                }
            ),
            "scaler": self.scaler.state_dict(),
            "totals": totals,
            "evaluation": asdict(self.evaluation) if self.evaluation else None,
            "best": asdict(self.best) if self.best else None,
            "bad_images": dict(self.bad_images),
        }

    def load_dict(self, contents: dict[str, Any], *, is_main: bool) -> None:
        """Take over what `to_dict` gave. The sum so far goes to rank 0, so that the next sum counts it once."""
        contents = {
            **contents,
            **self.strategy.local_state({key: contents[key] for key in ("model", "average", "optimizer")}),
        }
        self.model.load_state_dict(contents["model"])
        if self.ema:
            self.ema.load_state_dict(contents["average"])
        self.optimizer.load_state_dict(contents["optimizer"])
        self.scaler.load_state_dict(contents["scaler"])
        self.step = contents["step"]
        self.totals.zero_()
        if is_main:
            self.totals.copy_(contents["totals"])
        self.evaluation = Evaluation(**contents["evaluation"]) if contents["evaluation"] else None
        self.best = Evaluation(**contents["best"]) if contents["best"] else None
        self.bad_images = dict(contents["bad_images"])

    def take(self, evaluation: Evaluation) -> bool:
        """Note an evaluation; whether it is the best so far (the earlier of equals stays).

        A model whose logits are not all finite is never the best.
        """
        self.evaluation = evaluation
        if not evaluation.not_finite and (self.best is None or evaluation.correct1 > self.best.correct1):
            self.best = evaluation
        return self.best is evaluation

    def forget_best(self) -> None:
        """Choose the best again from here on: the present model, if it is evaluated."""
        self.best = None
        if self.evaluation and self.is_evaluated:
            self.take(self.evaluation)

    @property
    def is_evaluated(self) -> bool:
        """Whether the last evaluation was of this very model."""
        return self.evaluation is not None and self.evaluation.step == self.step

    @property
    def eval_model(self) -> nn.Module:
        """The model that is evaluated, digested and served."""
        return self.ema or self.model

    def account(self) -> dict[str, Any]:
        """What the receipt says of an evaluated model; by all processes together, and true at rank 0."""
        evaluation = self.evaluation
        assert evaluation is not None
        return {
            "step": evaluation.step,
            "weights": f"sha256:{self.weights_digest()}",
            "top1": evaluation.top1,
            "top5": evaluation.top5,
            "loss": None if evaluation.not_finite else evaluation.loss,  # JSON has no NaN
            "images": f"{evaluation.images}/{evaluation.total}",
            **({"not_finite": evaluation.not_finite} if evaluation.not_finite else {}),
        }

    def weights_digest(self) -> str:
        """Of the judged model; by all processes together, and true at rank 0."""
        return weights_digest(self.strategy.full_state({"model": self.eval_model.state_dict()})["model"])


def _optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Learning rates are set before each update, from the plan."""
    options = config.optimizer
    groups = parameter_groups(model, options.weight_decay)
    if options.name == "adamw":
        return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, fused=True)
    is_sliced = any(isinstance(one, DTensor) for one in model.parameters())  # torch's fused SGD takes none (2.14)
    optimizer = torch.optim.SGD(
        groups, lr=options.lr, momentum=options.momentum, nesterov=options.nesterov, fused=not is_sliced
    )
    if options.momentum:
        # of zeros, which is what the first step makes of none: where that step is skipped for an overflow (fp16), torch's
        # fused SGD leaves its buffers as memory was, other numbers at each process (2.14)
        for group in optimizer.param_groups:
            for one in group["params"]:
                optimizer.state[one]["momentum_buffer"] = torch.zeros_like(one)
    return optimizer
