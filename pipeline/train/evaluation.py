"""The figures of a validation."""

import math
from dataclasses import dataclass

LOSS_UNIT = 2**20
"""Losses are summed as integers in units of 2^-20: the sum is the same in any order."""
CONFIDENCE_UNIT = 2**30
"""Confidences are multiples of 2^-30, so that they are summed as integers, too."""
NO_PREDICTION = -1
"""The predicted class of an image whose logits are not finite."""
MAX_LOSS = 2**16
"""The most that an image's loss counts in a sum: 2^26 images then stay below 2^63 units."""


@dataclass(frozen=True)
class Evaluation:
    """The validation result of one step's model: sums of integers, the same at any world size."""

    step: int
    images: int
    total: int
    correct1: int
    """With several labels a picture: images whose labels are all right, at a probability of 0.5."""
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
    """The mean over the classes that have images of their recall."""
    classes: int | None = None
    """The number of these classes."""
    correct1_plain: int | None = None
    """With evaluate.flip: correct predictions without the mirror images."""
    map: float | None = None
    """With several labels a picture: mean average precision, see `addons.models.several_labels`."""
    f1: float | None = None
    thresholds: list[float] | None = None
    """With several labels: the probability from which on a picture has a class, for each class."""

    @property
    def top1(self) -> float:
        return self.correct1 / self.images

    @property
    def top5(self) -> float:
        return self.correct5 / self.images

    @property
    def rank(self) -> tuple[int, int]:
        """The order of models, in integers: the best has the highest. See also `receipt.rank`."""
        return self.correct1 if self.map is None else round(self.map * 2**40), -self.loss_sum

    @property
    def main(self) -> dict[str, float]:
        """The figures of the result line, by name."""
        return {"top1": self.top1, "top5": self.top5} if self.map is None else {"map": self.map}

    @property
    def headline(self) -> str:
        return f"top-1 {self.top1:.4f}" if self.map is None else f"mAP {self.map:.4f}"

    @property
    def figures(self) -> dict[str, float]:
        """The figures beside `main`, by name: those that are finite."""
        loss = math.nan if self.not_finite else self.loss_sum / LOSS_UNIT / self.images
        named = {
            "loss": loss, "nll": math.nan if self.not_finite else self.nll, "ece": self.ece,
            "balanced_accuracy": self.balanced_accuracy, "f1": self.f1,
            "subset": None if self.map is None else self.top1,
            "top1_plain": None if self.correct1_plain is None else self.correct1_plain / self.images,
        }  # fmt: skip
        return {name: value for name, value in named.items() if value is not None and math.isfinite(value)}

    def done_line(self, epoch: int, weights: str) -> str:
        """Return the result line. weights: `sha256:` and the digits."""
        figures = " ".join(f"{name}={value:.4f}" for name, value in self.main.items())
        images = f"{self.images}/{self.total}"
        return f"done step={self.step} epoch={epoch} {figures} images={images} weights={weights}"
