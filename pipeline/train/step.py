"""One update: forward and backward over this process's share of the global batch, then the weights.

Nothing here waits for the device: losses and counts stay on it, summed as integers, until they are
reported. What the passes draw (dropout) is addressed by (seed, step, shard), where a shard is one
pass of one process.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from pipeline.config.schema import Config
from pipeline.data.batch import Batch
from pipeline.data.mix import MIX_COLUMNS, mix_images, own_label_weights, swap_partners
from pipeline.lazy import addon
from pipeline.model.ema import MovingAverage
from pipeline.model.loss import Targets
from pipeline.parallel.strategy import Strategy
from pipeline.plan import Plan
from pipeline.randomness import seed_network
from pipeline.timing import StepTimer
from pipeline.train.state import TrainState


class Step:
    """The halves of an update; between them all agree. `addons.models.graph_step` records both."""

    def __init__(self, config: Config, plan: Plan, state: TrainState, timer: StepTimer) -> None:
        self._config, self._plan, self._state, self._timer = config, plan, state, timer
        self._average: MovingAverage | None = None
        if state.ema is not None and config.train.ema is not None:
            self._average = MovingAverage(state.ema, state.model, config.train.ema)
        frozen_until = addon("models.pretrained").FrozenUntil
        self._frozen = frozen_until(state.model, config.model.freeze, plan.unfreeze_step)
        self.used: list[Batch] = []
        """The batches of the current step, which an error names."""

    def forward_backward(self, batches: Iterator[Batch]) -> Tensor:
        """Run all passes of one step, and return their summed loss, [] on the device."""
        state, passes = self._state, self._plan.accumulate
        group = state.strategy.group
        self._frozen.before_step(state.step)
        losses: list[Tensor] = []
        failed = next((batch for batch in self.used if batch.outage), None)
        self.used = []
        for micro in range(passes):
            with self._timer.charge("data"):
                # none is waited for after an outage: on GPUs the processes agree on it a step later
                batch = failed or next(batches)
                failed = batch if batch.outage else None
            self.used.append(batch)
            # dropout draws from a generator that is seeded by position: no state of it to save
            seed_network(self._config.run.seed, "network", state.step, group.rank * passes + micro)
            with self._timer.charge("forward_backward"):
                losses.append(self._run_pass(micro, batch))
        return sum(losses[1:], start=losses[0])

    def apply_gradients(self) -> None:
        """Update the weights at this step's learning rate; the state is then one step further."""
        self._set_rates()
        self._update()
        self._state.step += 1  # from here on the run is one position further
        if self._average:
            self._average.update(self._state.step)

    def _run_pass(self, micro: int, batch: Batch) -> Tensor:
        """Run a pass and count its images; return its loss, []."""
        # gradients add up over the passes; only the last one exchanges them
        loss, logits = run_pass(self._state.strategy, self._timer, micro, batch)
        self._state.add_to_totals(loss, logits, batch.labels)  # stays on the device: reading it would wait
        return loss

    def _set_rates(self) -> None:
        rate = self._plan.learning_rate(self._state.step)  # of the step alone: no scheduler, no state
        for param_group in self._state.optimizer.param_groups:
            param_group["lr"] = rate * param_group.get("lr_scale", 1.0)

    def _update(self) -> None:
        state, config, scaler = self._state, self._config, self._state.strategy.scaler
        self._frozen.before_update(state.step)
        # if the loss was bad, a GPU leaves the update out: the host learns of it a step later
        state.loss_guard.skip_bad_update(state.optimizer, has_scaler=scaler.is_enabled())
        if config.train.clip is not None:
            scaler.unscale_(state.optimizer)  # the norm is that of the true gradient
            state.strategy.clip_gradients(config.train.clip)
        scaler.step(state.optimizer)  # optimizer.step(), unless fp16 gradients overflowed
        scaler.update()
        state.optimizer.zero_grad()


def warm_up(strategy: Strategy, timer: StepTimer, plan: Plan, *, is_synced: bool = True) -> None:
    """Run one discarded pass on blank images. The caller then restores weights and buffers.

    is_synced: the processes exchange the gradients, as in the last pass of an update.
    """
    device, shape = strategy.group.device, (plan.micro_batch, plan.first_size, plan.first_size, 3)
    images = torch.zeros(shape, dtype=torch.uint8, device=device).permute(0, 3, 1, 2)  # as the loader's
    labels = torch.zeros(plan.micro_batch, dtype=torch.int64, device=device)
    none = torch.empty((0, MIX_COLUMNS))
    blank = Batch(images, labels, labels, digests=none, mix=none, defects=[])
    run_pass(strategy, timer, plan.accumulate - 1 if is_synced else -1, blank)
    strategy.model.zero_grad()


def run_pass(strategy: Strategy, timer: StepTimer, micro: int, batch: Batch) -> tuple[Tensor, Tensor]:
    """Run one pass, which leaves its gradients for the update.

    Return its mean loss and logits, [B, classes]. batch: labels and mix are on the device.
    """
    with timer.charge("copy"):
        pixels = strategy.normalise(batch.images)
    targets = Targets(batch.labels)
    if len(batch.mix):
        pixels = mix_images(pixels, batch.mix)
        own = own_label_weights(batch.mix, *pixels.shape[2:])
        targets = Targets(batch.labels, swap_partners(batch.labels), own)
    if strategy.teacher:
        targets = replace(targets, teacher=strategy.teacher(pixels))
    return strategy.forward_backward(micro, pixels, targets)
