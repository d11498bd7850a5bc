"""The loss of a classification model, with smoothed labels and mixed targets."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.config.sections import Train
from pipeline.lazy import addon


@dataclass(frozen=True)
class Targets:
    """The labels of a pass of B images, on the device of the logits."""

    labels: Tensor
    """[B] int64; with several labels a picture [B, classes] float32 of 0 and 1."""
    partners: Tensor | None = None
    """The label of each image's mixing partner, as `labels`; None without mixup and cutmix."""
    own_share: Tensor | None = None
    """[B] float32 in 0..1: the weight of an image's own label; its partner's label has the rest."""
    teacher: Tensor | None = None
    """[B, classes]: the logits of model.teacher for the same pixels."""


def classification_loss(
    logits: Tensor, targets: Targets, options: Train, weights: Tensor | None = None
) -> Tensor:
    """Return the mean loss of a pass, as a tensor of shape []. logits: [B, classes].

    Both kinds of loss are linear in the target, so the weighted mean of an image's losses against
    its own and its partner's label is its loss against the mixed target.

    weights: [classes] float32, of train.class_weights. The mean is over the images, and not over
    their weights, so that it does not depend on how a global batch is cut into passes.
    """
    loss = _loss_per_image(logits, targets.labels, options, weights)
    if targets.partners is not None and targets.own_share is not None:
        partner_loss = _loss_per_image(logits, targets.partners, options, weights)
        loss = targets.own_share * loss + (1 - targets.own_share) * partner_loss
    if targets.teacher is None:
        return loss.mean()
    return addon("models.teacher").distil(loss.mean(), logits, targets.teacher, options.distill)  # type: ignore[no-any-return]


def _loss_per_image(logits: Tensor, labels: Tensor, options: Train, weights: Tensor | None) -> Tensor:
    """Return the loss of each image, [B]. labels: see `Targets`.

    ce: cross-entropy. bce, and always with several labels a picture: one binary cross-entropy per
    class, summed over the classes, as in Wightman et al., "ResNet strikes back", 2021; with
    weights, for the positive targets. An image of one label has the same loss in both forms.
    """
    smoothing = options.label_smoothing
    if options.loss == "ce" and labels.ndim == 1:
        return functional.cross_entropy(logits, labels, weights, reduction="none", label_smoothing=smoothing)
    classes = logits.shape[1]
    if labels.ndim == 2:  # each label spreads the same share over all classes
        target = (1 - smoothing) * labels + smoothing * labels.mean(1, keepdim=True)
    else:
        target = torch.full_like(logits, smoothing / classes)
        target.scatter_(1, labels[:, None], 1 - smoothing + smoothing / classes)
    losses = functional.binary_cross_entropy_with_logits(logits, target, reduction="none", pos_weight=weights)
    return losses.sum(1)
