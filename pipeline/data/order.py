"""The order of samples: arithmetic on one seeded permutation per epoch.

Promise: for a data set and a plan, the ids of a global batch are a function of (seed, step) only.
Ranks, workers and accumulation only slice it: rank r takes the r-th contiguous part, in
`accumulate` micro-batches, so the concatenation over ranks is the same list at any world size.
Nothing about order is saved, because the step determines it.

Repeated augmentation (Berman et al., "MultiGrain", 2019; Hoffer et al., "Augment your batch", 2020;
torchvision's references/classification/sampler.py) takes each image `repeats` times in one batch,
each time as another *view*. So an epoch uses only the first 1/repeats of its permutation. The views
of an image are not neighbours in a batch, since neighbours are mixed with each other.

With `data.balance`, an epoch draws its images with replacement: first a class, by its share, then
one of its images. What is drawn again in an epoch is another view, so it looks different. By chance
neighbours may be the same image.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.lazy import addon
from pipeline.plan import Plan
from pipeline.randomness import derive, generator

Ids = NDArray[np.int64]


class Order:
    def __init__(self, plan: Plan, seed: int, labels: NDArray[np.int32] | None = None) -> None:
        """labels: [train_images], the class of each image; needed with `data.balance`."""
        self._plan, self._seed = plan, seed
        # reading ahead crosses the end of an epoch, and to draw a balanced one takes long
        self._draw_epoch = lru_cache(maxsize=1 if plan.balance == "none" else 2)(self._draw)
        self._classes: Any = None
        """The images of each class, with `data.balance`."""
        if plan.balance != "none":
            assert labels is not None
            self._classes = addon("datasets.balance").Classes(labels, plan)

    def draws(self, step: int) -> tuple[Ids, Ids]:
        """Return ids and views of the update after `step` updates, [global_batch] int64 each."""
        plan = self._plan
        start = step % plan.steps_per_epoch * plan.global_batch
        places = np.arange(start, start + plan.global_batch)
        places = np.concatenate([places[view :: plan.repeats] for view in range(plan.repeats)])
        samples, occurrences = self._draw_epoch(plan.epoch_at(step))
        slots, views = np.divmod(places, plan.repeats)
        return samples[slots], occurrences[slots] * plan.repeats + views

    def ids(self, step: int) -> Ids:
        """Return the sample ids of the update after `step` updates, [global_batch] int64."""
        return self.draws(step)[0]

    def micro_draws(self, step: int, rank: int, micro: int) -> tuple[Ids, Ids]:
        """Return the part of `draws(step)` for a rank's pass `micro`, [micro_batch] int64 each."""
        start = (rank * self._plan.accumulate + micro) * self._plan.micro_batch
        own = slice(start, start + self._plan.micro_batch)
        ids, views = self.draws(step)
        return ids[own], views[own]

    def replacement(self, epoch: int, sample: int, attempt: int) -> int:
        """Return the replacement of a sample that cannot be decoded, the same for every process.

        With `data.balance`, it is one of the same class.
        """
        number = derive(self._seed, "replacement", epoch, sample, attempt)
        if self._classes:
            images = self._classes.images_like(sample)
            return int(images[number % len(images)])
        return number % self._plan.train_images

    def _draw(self, epoch: int) -> tuple[Ids, Ids]:
        """Return the samples of an epoch in order, and how often each has occurred in it before."""
        import torch

        count = self._plan.train_images
        if self._classes:
            draws = torch.rand(
                (2, count), generator=generator(self._seed, "balance", epoch), dtype=torch.float64
            )
            drawn: tuple[Ids, Ids] = self._classes.samples(draws.numpy())
            return drawn
        # 18 ms for the 1.28 M images of ImageNet
        permutation = torch.randperm(count, generator=generator(self._seed, "order", epoch)).numpy()
        return permutation, np.broadcast_to(np.int64(0), count)
