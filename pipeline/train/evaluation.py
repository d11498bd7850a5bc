"""The figures of a validation."""

import math
from dataclasses import dataclass

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
