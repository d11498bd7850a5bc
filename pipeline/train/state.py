"""The training state: what a checkpoint holds, with the strategy and loss guard that it needs.

Promise: a run that loads this state at step n continues exactly as the run that saved it would
have. It is small because order, augmentation, dropout and the learning rate are functions of the
step. It is complete when built, and then loaded.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config.schema import Config
from pipeline.guards.nonfinite import LossGuard
from pipeline.model.weights import digest_and_checksums, load_weights
from pipeline.parallel.strategy import Strategy
from pipeline.train.optimizer import make_optimizer

LOSS_UNIT = 2**20
"""Losses are summed as integers in units of 2^-20: the sum is the same in any order."""
MAX_LOSS = 2**16
"""The most that an image's loss counts in a sum: 2^26 images then stay below 2^63 units."""


@dataclass(frozen=True)
class Evaluation:
    """The validation result of one step's model: sums of integers, the same at any world size."""

    step: int
    images: int
    total: int
    correct1: int
    correct5: int
    loss_sum: int
    """In units of 2^-20."""
    not_finite: int = 0
    """Images whose logits are not finite: wrong predictions, and in no sum."""
    nll: float | None = None
    """The mean negative log likelihood of the images that have a label."""
    ece: float | None = None
    """The expected calibration error, see `Predictions.calibration_error`."""
    balanced_accuracy: float | None = None
    """The mean over the classes of their recall."""
    classes: int | None = None
    """The number of those classes: those that have images."""
    correct1_plain: int | None = None
    """With evaluate.flip: correct predictions without the mirror images."""

    @property
    def top1(self) -> float:
        return self.correct1 / self.images

    @property
    def top5(self) -> float:
        return self.correct5 / self.images

    @property
    def loss(self) -> float:
        """The mean loss; NaN if the logits of any image are not finite."""
        return math.nan if self.not_finite else self.loss_sum / LOSS_UNIT / self.images

    @property
    def rank(self) -> tuple[int, int]:
        """The order of models, in integers: the best has the highest. See also `receipt.rank`."""
        return self.correct1, -self.loss_sum

    @property
    def figures(self) -> dict[str, float]:
        """The figures beside top-1 and top-5, by name: those that are finite."""
        named = {
            "loss": self.loss, "nll": math.nan if self.not_finite else self.nll, "ece": self.ece,
            "balanced_accuracy": self.balanced_accuracy,
            "top1_plain": None if self.correct1_plain is None else self.correct1_plain / self.images,
        }  # fmt: skip
        return {name: value for name, value in named.items() if value is not None and math.isfinite(value)}

    @property
    def line(self) -> str:
        """The figures, for the terminal."""
        names = {"loss": "loss", "ece": "ECE", "top1_plain": "top-1 without mirror images"}
        figures = {"loss": math.nan} | self.figures
        parts = [f"{word} {figures[name]:.4f}" for name, word in names.items() if name in figures]
        return f"top-1 {self.top1:.4f}, top-5 {self.top5:.4f}, {', '.join(parts)}, {self.images} of {self.total} images"

    def lacks_classes(self, num_classes: int) -> bool:
        """Return True if a class has no image, so that no figure says how well it is predicted."""
        return self.classes is not None and self.classes < num_classes

    def describe_balanced(self, num_classes: int) -> str:
        """Return the balanced accuracy as text, and over how many classes if some have no image."""
        over = f" over {self.classes:,} of {num_classes:,} classes" if self.lacks_classes(num_classes) else ""
        return f"balanced accuracy {self.balanced_accuracy or 0:.4f}{over}"

    @property
    def warning(self) -> str | None:
        """A line that says how many images have logits that are not finite, or None."""
        if not self.not_finite:
            return None
        return (
            f"the logits of {self.not_finite} of {self.images} images are not finite: they count as wrong predictions,"
            " the loss is nan, and this model is never the best; lower optimizer.lr or set train.clip"
        )


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
    bad_images: dict[int, str] = field(default_factory=dict)
    """Sample id and reason of each training image found undecodable so far."""

    @classmethod
    def build(cls, strategy: Strategy, loss_guard: LossGuard, config: Config) -> "TrainState":
        """Return the state before the first step."""
        ema = strategy.make_ema() if config.train.ema is not None else None
        totals = torch.zeros(3, dtype=torch.int64, device=strategy.group.device)
        return cls(strategy, loss_guard, make_optimizer(strategy.model, config), ema, totals)

    @property
    def model(self) -> nn.Module:
        return self.strategy.model

    @property
    def best_step(self) -> int | None:
        return self.best.step if self.best else None

    def confirm_step(self) -> int:
        """Return the step, once its loss is known to be finite.

        Whatever reports, evaluates or saves a step calls this first. Raises NotFiniteError in all
        processes.
        """
        self.loss_guard.sync()
        return self.step

    @property
    def eval_model(self) -> nn.Module:
        """The model that is evaluated, digested and served: the EMA if there is one."""
        return self.model if self.ema is None else self.ema

    @property
    def is_evaluated(self) -> bool:
        """The last evaluation was of this step's model."""
        return self.evaluation is not None and self.evaluation.step == self.step

    def add_to_totals(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a pass to the totals. loss: [] mean, logits: [B, classes], labels: [B]."""
        images = len(labels)
        self.totals[0] += (loss.double().clamp(max=MAX_LOSS) * (images * LOSS_UNIT)).round().to(torch.int64)
        self.totals[1] += (logits.argmax(1) == labels).sum()
        self.totals[2] += images

    def add_evaluation(self, evaluation: Evaluation) -> bool:
        """Keep an evaluation.

        Return True if it is the best so far: of equals the one with the lower loss, then the
        earlier; never one with NaN logits.
        """
        self.evaluation = evaluation
        if not evaluation.not_finite and (self.best is None or evaluation.rank > self.best.rank):
            self.best = evaluation
        return self.best is evaluation

    def forget_best(self) -> None:
        """Choose the best again from here on: the present model, if it is evaluated."""
        self.best = None
        if self.evaluation and self.is_evaluated:
            self.add_evaluation(self.evaluation)

    def to_dict(self, totals: Tensor) -> dict[str, Any]:
        """Return tensors, numbers and strings: on rank 0 of the whole model.

        All processes call this together.

        totals: those of this state, summed over the processes.
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
        }

    def load_dict(self, contents: dict[str, Any], *, is_main: bool) -> None:
        """Load what `to_dict` returned.

        Rank 0 alone loads the totals, so that the next sum counts them once.
        """
        states = self.strategy.local_state({key: contents[key] for key in ("model", "average", "optimizer")})
        load_weights(self.model, states["model"])
        if self.ema is not None:
            load_weights(self.ema, states["average"])
        # The saved settings say which kernels updated (fused, foreach). With another number of
        # processes these may be unable to.
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

    def receipt_row(self) -> dict[str, Any]:
        """Return the receipt's row of the evaluated model; valid on rank 0.

        All processes call this together.
        """
        evaluation = self.evaluation
        assert evaluation is not None
        digest, checksums = self._digest_and_checksums()
        return {
            "step": evaluation.step,
            "weights": f"sha256:{digest}",
            "tensors": checksums,
            "top1": evaluation.top1,
            "top5": evaluation.top5,
            "loss": None,  # JSON has no NaN
            **evaluation.figures,
            "images": f"{evaluation.images}/{evaluation.total}",
            **({"not_finite": evaluation.not_finite} if evaluation.not_finite else {}),
        }

    def weights_digest(self) -> str:
        """Return the digest of the evaluated model; valid on rank 0.

        All processes call this together.
        """
        return self._digest_and_checksums()[0]

    def _digest_and_checksums(self) -> tuple[str, str]:
        return digest_and_checksums(self.strategy.full_state({"model": self.eval_model.state_dict()})["model"])
