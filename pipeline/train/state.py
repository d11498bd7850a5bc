"""The training state: what a checkpoint holds, with the strategy and loss guard that it needs.

Promise: if `config.is_deterministic` (run.deterministic, run.exact, and on CPUs run.portable), and
with the same plan, a run that loads this state at step n continues to the same bits as the run that
saved it. It is small because order, augmentation, dropout and the learning rate are functions of
the step. `train.loop` adds who saved it (`Records.identity`): `operate.resume.find` compares
configuration and data, `train.resume` names a changed number of processes.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config.schema import Config
from pipeline.guards.nonfinite import LossGuard
from pipeline.model.weights import load_weights
from pipeline.parallel.strategy import Strategy
from pipeline.plan import Plan
from pipeline.train.evaluation import LOSS_UNIT, MAX_LOSS, Evaluation
from pipeline.train.optimizer import make_optimizer


@dataclass
class TrainState:
    """All that a run continues from."""

    strategy: Strategy
    """Shards or replicates this state; a checkpoint holds the complete state."""
    loss_guard: LossGuard
    optimizer: torch.optim.Optimizer
    ema: nn.Module | None
    """The moving average of the weights, or None."""
    totals: Tensor
    """[loss in 2^-20, correct, images] int64 on the device, since the last report."""
    step: int = 0
    """Updates made: the only position of a run. It leaves this process through `confirm_step`."""
    evaluation: Evaluation | None = None
    """The last one made."""
    best: Evaluation | None = None
    watch: str = "val/top1"
    """See train.watch."""
    bad_images: dict[int, str] = field(default_factory=dict)
    """Sample id and reason of each training image found undecodable so far."""

    @classmethod
    def build(cls, strategy: Strategy, loss_guard: LossGuard, config: Config) -> "TrainState":
        """Return the state before the first step."""
        ema = strategy.make_ema() if config.train.ema is not None else None
        totals = torch.zeros(3, dtype=torch.int64, device=strategy.group.device)
        optimizer = make_optimizer(strategy.model, config)
        return cls(strategy, loss_guard, optimizer, ema, totals, watch=config.train.watch)

    @property
    def model(self) -> nn.Module:
        return self.strategy.model

    @property
    def eval_model(self) -> nn.Module:
        """The model that is evaluated, digested and served: the EMA if there is one."""
        return self.model if self.ema is None else self.ema

    @property
    def is_evaluated(self) -> bool:
        """The last evaluation was of this step's model."""
        return self.evaluation is not None and self.evaluation.step == self.step

    def confirm_step(self) -> int:
        """Return the step, once its loss is known to be finite.

        Whatever reports, evaluates or saves a step calls this first. Raises as `LossGuard.agree`.
        """
        self.loss_guard.sync()
        return self.step

    def add_to_totals(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a pass to the totals. loss: [] mean, logits: [B, classes], labels: see `Batch`."""
        images = len(labels)
        units = (loss.double().clamp(max=MAX_LOSS) * (images * LOSS_UNIT)).round().to(torch.int64)
        several = labels.ndim == 2  # all labels of an image must then be right
        is_right = ((logits >= 0) == (labels > 0)).all(1) if several else logits.argmax(1) == labels
        self.totals += torch.stack([units, is_right.sum(), torch.full_like(units, images)])

    def add_evaluation(self, evaluation: Evaluation) -> bool:
        """Keep an evaluation. Return True if it is the best so far.

        Of equals the one with the lower loss is, then the earlier; never one with NaN logits. With
        train.watch=val/loss the loss comes first.
        """

        def rank(found: Evaluation) -> tuple[int, int]:
            return found.rank[::-1] if self.watch == "val/loss" else found.rank

        self.evaluation = evaluation
        if not evaluation.not_finite and (self.best is None or rank(evaluation) > rank(self.best)):
            self.best = evaluation
        return self.best is evaluation

    def is_over(self, plan: Plan) -> bool:
        """Return True if the training has ended: by its steps, or by train.patience."""
        best = self.best.step if self.best else 0
        return plan.is_over(self.step, best if self.is_evaluated else self.step)

    def forget_best(self) -> None:
        """Choose the best again from here on: the present model, if it is evaluated."""
        self.best = None
        if self.evaluation and self.is_evaluated:
            self.add_evaluation(self.evaluation)

    def to_dict(self, totals: Tensor) -> dict[str, Any]:
        """Return tensors, numbers and strings: on rank 0 of the whole model.

        All processes call this together. totals: those of this state, summed over the processes.
        """
        states = {
            "model": self.model.state_dict(),
            "average": self.ema.state_dict() if self.ema is not None else None,
            "optimizer": self.optimizer.state_dict(),
        }
        return {
            "step": self.confirm_step(),
            **self.strategy.full_state(states),
            "scaler": self.strategy.scaler.state_dict(),
            "totals": totals,
            "evaluation": asdict(self.evaluation) if self.evaluation else None,
            "best": asdict(self.best) if self.best else None,
            "bad_images": dict(self.bad_images),
            **(self.strategy.teacher.identity if self.strategy.teacher else {}),
        }

    def load_dict(self, contents: dict[str, Any], *, is_main: bool) -> None:
        """Load what `to_dict` returned. Rank 0 alone loads the totals, to be summed once."""
        if self.strategy.teacher:
            self.strategy.teacher.check(contents)
        states = self.strategy.local_state({key: contents[key] for key in ("model", "average", "optimizer")})
        load_weights(self.model, states["model"])
        if self.ema is not None:
            load_weights(self.ema, states["average"])
        # Keep this process's own settings (fused, foreach): with another number of processes the
        # saved ones may not run. The moments come from the file.
        groups = self.optimizer.state_dict()["param_groups"]
        for group, saved in zip(groups, states["optimizer"]["param_groups"], strict=True):
            if "step" in saved:  # LAMB counts its updates here
                group["step"] = saved["step"]
        self.optimizer.load_state_dict({**states["optimizer"], "param_groups": groups})
        self.strategy.scaler.load_state_dict(contents["scaler"])
        self.step = contents["step"]
        self.totals.zero_()
        if is_main:
            self.totals.copy_(contents["totals"])
        self.evaluation = Evaluation(**contents["evaluation"]) if contents["evaluation"] else None
        self.best = Evaluation(**contents["best"]) if contents["best"] else None
        self.bad_images = dict(contents["bad_images"])
