"""Mixup and cutmix: images and label weights are those of the papers."""

import torch
from harness import plan_of, refused
from torch.nn import functional

from pipeline.config.sections import Augment, Train
from pipeline.data.mix import draw_mix, mix_images, own_label_weights, swap_partners
from pipeline.model.loss import Targets, classification_loss


def mixed(options: Augment) -> tuple[torch.Tensor, ...]:
    """Return 64 mixed images, each of which is its number, their numbers, and label weights."""
    mix, numbers = draw_mix(options, 1, 7, 0, 64), torch.arange(64.0).view(-1, 1, 1, 1)
    seen = mix_images(numbers.expand(-1, 3, 32, 48).contiguous(), mix)
    return seen, numbers, own_label_weights(mix, 32, 48)


def test_mixup_is_the_weighted_sum_of_both_images() -> None:
    seen, numbers, weights = mixed(Augment(mixup=0.4))
    own = weights.view(-1, 1, 1, 1)
    expected = own * numbers + (1 - own) * swap_partners(numbers)
    torch.testing.assert_close(seen, expected.expand_as(seen))
    assert torch.equal(weights[0::2], weights[1::2]), "both of a pair share the draw"
    assert 0.3 < float(weights.mean()) < 0.7


def test_the_label_weights_of_cutmix_are_the_shares_of_the_pixels() -> None:
    seen, numbers, weights = mixed(Augment(cutmix=1.0))
    own = (seen == numbers).float().mean((1, 2, 3))
    torch.testing.assert_close(weights, own)
    assert ((seen == numbers) | (seen == swap_partners(numbers))).all()
    assert float(own.std()) > 0.1


def test_the_mix_depends_on_the_position_in_the_global_batch() -> None:
    options = Augment(mixup=0.2, cutmix=1.0)
    whole = draw_mix(options, 3, 5, 0, 48)
    assert torch.equal(whole, torch.cat([draw_mix(options, 3, 5, first, 12) for first in range(0, 48, 12)]))
    assert not torch.equal(whole, draw_mix(options, 3, 6, 0, 48))
    assert draw_mix(Augment(), 3, 5, 0, 48).shape == (0, 5)
    is_mixup = (draw_mix(options, 3, 0, 0, 400)[:, 1:] == torch.tensor([0.0, 0, 1, 1])).all(1)
    assert 120 < int(is_mixup.sum()) < 280, "each pair gets one of both"


def test_the_loss_of_a_mix_equals_the_loss_of_its_soft_target() -> None:
    mix = draw_mix(Augment(mixup=0.4, cutmix=1.0), 1, 7, 0, 16)
    own, labels = own_label_weights(mix, 32, 48), torch.arange(16) % 10
    logits = torch.randn(16, 10, generator=torch.Generator().manual_seed(0))
    one_hot = functional.one_hot(labels, 10).float()
    soft = own[:, None] * one_hot + (1 - own[:, None]) * swap_partners(one_hot)
    found = classification_loss(
        logits, Targets(labels, swap_partners(labels), own), Train(label_smoothing=0.1)
    )
    torch.testing.assert_close(found, functional.cross_entropy(logits, soft, label_smoothing=0.1))


def test_passes_with_an_odd_number_of_images_are_refused() -> None:
    line = refused(lambda: plan_of("batch.global=45", "augment.mixup=0.2", size=3))
    assert "mix pairs, and a pass has 15 images" in line
