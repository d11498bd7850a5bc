"""One update: passes forward and backward over this process's share of the global batch, then the weights.

Nothing here waits for the device: losses and counts stay on it as integers until they are reported. What the passes draw
(dropout) is addressed by (seed, step, shard), where a shard is one pass of one process.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.config.schema import Config
from pipeline.data.batch import Batch
from pipeline.data.mix import WIDTH, mixed, own_shares, partners
from pipeline.model.architectures import Normalise
from pipeline.model.ema import update_ema
from pipeline.parallel import Objective, Strategy, Targets
from pipeline.parallel.strategy import autocast
from pipeline.plan import Plan
from pipeline.randomness import seed_network
from pipeline.telemetry.timing import Clock
from pipeline.train.state import TrainState

LOSS_UNIT = 2**20
"""Losses are summed in integers of 2^-20, which add in any order to the same."""
MAX_LOSS = 2**16
"""The loss of an image counts at most this much in a sum: fewer than 2^27 images add up to less than 2^63 units."""


class Step:
    def __init__(self, state: TrainState, strategy: Strategy, config: Config, plan: Plan, clock: Clock) -> None:
        self._state = state
        self._strategy = strategy
        self._config = config
        self._plan = plan
        self._clock = clock
        self._device = strategy.group.device
        self._normalise = Normalise(self._device, channels_last=config.model.channels_last)
        self._objective = Objective(self._mean_loss, state.scaler.scale, partial(autocast, self._device, config))
        self._used: list[Batch] = []

    def settle(self) -> None:
        """One discarded pass on blank images, with whatever the strategy settles in it; the state is loaded after this."""
        plan, size = self._plan, self._plan.first_size
        blank = torch.zeros((plan.micro_batch, 3, size, size), dtype=torch.uint8)
        labels = torch.zeros(plan.micro_batch, dtype=torch.int64, device=self._device)

        def backward() -> None:
            self._pass(plan.accumulate - 1, blank, labels, torch.empty((0, WIDTH)))

        self._strategy.warm_up(backward)
        self._state.optimizer.zero_grad()

    def forward_backward(self, batches: Iterator[Batch]) -> tuple[Tensor, list[Batch]]:
        """All passes of one step. Returns their summed loss (on the device) and the batches that were used."""
        state, plan = self._state, self._plan
        loss_sum = torch.zeros((), device=self._device)
        self._used = used = []
        for micro in range(plan.accumulate):
            batch = next(batches)
            seed_network(
                self._config.run.seed, "network", state.step, self._strategy.group.rank * plan.accumulate + micro
            )
            used.append(batch)
            labels = batch.labels.to(self._device, non_blocking=True)
            with self._clock.on("forward_backward"):
                loss, logits = self._pass(micro, batch.images, labels, batch.mix)
            self._count(loss, logits, labels)
            loss_sum += loss
        return loss_sum, used

    @property
    def sample_ids(self) -> list[int]:
        """Of the step under way or just made: what an account of a failure names."""
        return [sample for batch in self._used for sample in batch.ids.tolist()]

    def update(self, guard: Tensor | None = None) -> None:
        """Apply the gradients at this step's learning rate; the state is then one step on.

        guard: [] float32 on the device; where it is 1, weights and optimizer stay what they are.
        """
        state = self._state
        if guard is not None:
            self._heed(guard)
        if self._config.train.clip is not None:
            state.scaler.unscale_(state.optimizer)
            self._strategy.clip(self._config.train.clip)
        rate = self._plan.learning_rate(state.step)
        for group in state.optimizer.param_groups:
            group["lr"] = rate
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad()
        state.step += 1
        if state.ema is not None:
            assert self._config.train.ema is not None
            update_ema(state.ema, state.model, state.step, self._config.train.ema)

    def _heed(self, guard: Tensor) -> None:
        """Have the fused optimizer skip the update; it is the scaler that tells it so where there is one, by a gradient."""
        state = self._state
        if state.scaler.is_enabled():
            first = next(one.grad for one in state.model.parameters() if one.grad is not None)
            first.masked_fill_(guard > 0, torch.nan)
        else:
            state.optimizer.found_inf = guard  # type: ignore[attr-defined]

    def _pass(self, micro: int, images: Tensor, labels: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
        """images: [B, 3, H, W] uint8, labels: [B] int64 on the device, mix: [B or 0, 5]
        -> (mean loss, logits [B, classes]); the gradients are left where the update finds them."""
        with self._clock.on("copy"):
            pixels = self._normalise(images)
            mix = mix.to(self._device, non_blocking=True)
        targets: Targets = (labels,)
        if len(mix):
            pixels = mixed(pixels, mix)
            targets = (labels, partners(labels), own_shares(mix, *pixels.shape[2:]))
        return self._strategy.forward_backward(micro, pixels, targets, self._objective)

    def _mean_loss(self, logits: Tensor, targets: Targets) -> Tensor:
        """targets: labels [B], and of a mixed pass the partners' labels [B] and each image's own share [B]."""
        loss = self._loss(logits, targets[0])
        if len(targets) > 1:
            _, others, own = targets
            loss = own * loss + (1 - own) * self._loss(logits, others)
        return loss.mean()

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[B]: linear in the target, so that a mixed target's loss is the mix of two."""
        options = self._config.train
        if options.loss == "ce":
            return functional.cross_entropy(logits, labels, reduction="none", label_smoothing=options.label_smoothing)
        classes = logits.shape[1]
        target = torch.full_like(logits, options.label_smoothing / classes)
        target.scatter_(1, labels[:, None], 1 - options.label_smoothing + options.label_smoothing / classes)
        return functional.binary_cross_entropy_with_logits(logits, target, reduction="none").sum(1)

    def _count(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        totals, images = self._state.totals, len(labels)
        totals[0] += (loss.double().clamp(max=MAX_LOSS) * (images * LOSS_UNIT)).round().to(torch.int64)
        totals[1] += (logits.argmax(1) == labels).sum()
        totals[2] += images
