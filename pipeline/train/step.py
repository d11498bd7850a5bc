"""One update: forward and backward over this process's share of the global batch, then the weights.

Nothing here waits for the device: losses and counts stay on it, as integers, until they are
reported. What the passes draw (dropout) is addressed by (seed, step, shard), where a shard is one
pass of one process.
"""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from pipeline.data.batch import Batch
from pipeline.data.mix import MIX_COLUMNS, mix_images, own_label_weights, swap_partners
from pipeline.errors import StorageError
from pipeline.model.architectures import Normalise
from pipeline.model.ema import update_ema
from pipeline.model.loss import Targets
from pipeline.parallel import Strategy
from pipeline.plan import Plan
from pipeline.randomness import seed_network
from pipeline.telemetry.timing import StepTimer
from pipeline.train.trainer import Trainer


def update_once(trainer: Trainer, batches: Iterator[Batch]) -> bool:
    """Train on the next global batch and update the weights once.

    Return True if any process was asked to stop.

    batches: this process's passes, in order. Raises in all processes: NotFiniteError if the loss is
    not finite, OutageError if the data stays out of reach, StorageError if too many images are bad,
    DivergedError if weights differ.
    """
    state, group, timer = trainer.state, trainer.group, trainer.timer
    trainer.stragglers.begin_step()
    loss, used = forward_backward(trainer, batches)
    with timer.charge("communication"):
        is_stopping, is_bad, has_defects, has_outage = group.any_rank(
            trainer.asked_to_stop(),
            state.loss_guard.check(state.step + 1, loss, used),
            any(batch.defects for batch in used),
            any(batch.outage for batch in used),
        )
    if has_outage:  # nothing is saved: batch norm has counted images that are none
        group.raise_together(next((batch.outage for batch in used if batch.outage), None))
    if is_bad:
        raise state.loss_guard.error()
    if has_defects:
        _record_defects(trainer, used)
    with timer.charge("optimizer"):
        apply_gradients(trainer)
    with timer.charge("tracking"):
        if trainer.config.run.trace:
            _trace_update(trainer, used)
        for batch in used:
            trainer.metrics.add_failed_reads(batch.failed_reads)
        trainer.metrics.after_update(state)
    trainer.profiler.at_step(state.step)
    if trainer.plan.watches_at(state.step):
        trainer.divergence.compare(state.step)
    return is_stopping


def forward_backward(trainer: Trainer, batches: Iterator[Batch]) -> tuple[Tensor, list[Batch]]:
    """Run all passes of one step.

    Return their summed loss, [] on the device, and the batches used.
    """
    state, strategy, passes = trainer.state, trainer.strategy, trainer.plan.accumulate
    device = strategy.group.device
    loss_sum = torch.zeros((), device=device)
    used = trainer.current_batches
    used.clear()
    for micro in range(passes):
        with trainer.timer.charge("data"):
            batch = next(batches)
        used.append(batch)
        seed_network(trainer.config.run.seed, "network", state.step, strategy.group.rank * passes + micro)
        with trainer.timer.charge("forward_backward"):
            loss, logits = _run_pass(strategy, trainer.normalise, trainer.timer, micro, batch)
        state.add_to_totals(loss, logits, batch.labels)
        loss_sum += loss
    return loss_sum, list(used)  # a copy: the loss guard keeps it for one more step


def apply_gradients(trainer: Trainer) -> None:
    """Update the weights at this step's learning rate; the state is then one step further."""
    state, config, scaler = trainer.state, trainer.config, trainer.strategy.scaler
    skip = state.loss_guard.skip
    if skip is not None and scaler.is_enabled():  # the scaler skips the update for a gradient that is NaN
        first = next(parameter.grad for parameter in state.model.parameters() if parameter.grad is not None)
        first.masked_fill_(skip > 0, torch.nan)
    elif skip is not None and state.optimizer.defaults.get("fused"):  # a fused optimizer skips it for this flag
        state.optimizer.found_inf = skip  # type: ignore[attr-defined]
    if config.train.clip is not None:
        scaler.unscale_(state.optimizer)
        trainer.strategy.clip_gradients(config.train.clip)
    learning_rate = trainer.plan.learning_rate(state.step)
    for param_group in state.optimizer.param_groups:
        param_group["lr"] = learning_rate
    scaler.step(state.optimizer)
    scaler.update()
    state.optimizer.zero_grad()
    state.step += 1
    if state.ema is not None:
        assert config.train.ema is not None
        update_ema(state.ema, state.model, state.step, config.train.ema)


def warm_up(strategy: Strategy, normalise: Normalise, timer: StepTimer, plan: Plan) -> None:
    """Run one discarded pass on blank images.

    The caller restores weights and buffers afterwards.
    """
    shape = (plan.micro_batch, 3, plan.first_size, plan.first_size)
    labels = torch.zeros(plan.micro_batch, dtype=torch.int64, device=strategy.group.device)
    none = torch.empty((0, MIX_COLUMNS))
    blank = Batch(torch.zeros(shape, dtype=torch.uint8), labels, ids=labels, digests=none, mix=none, defects=[])
    _run_pass(strategy, normalise, timer, plan.accumulate - 1, blank)
    strategy.model.zero_grad()


def _run_pass(
    strategy: Strategy, normalise: Normalise, timer: StepTimer, micro: int, batch: Batch
) -> tuple[Tensor, Tensor]:
    """Run one pass, which leaves its gradients for the update.

    Return its mean loss and logits, [B, classes]. batch: labels and mix are on the device.
    """
    with timer.charge("copy"):
        pixels = normalise(batch.images)
    targets = Targets(batch.labels)
    if len(batch.mix):
        pixels = mix_images(pixels, batch.mix)
        own = own_label_weights(batch.mix, *pixels.shape[2:])
        targets = Targets(batch.labels, swap_partners(batch.labels), own)
    return strategy.forward_backward(micro, pixels, targets)


def _trace_update(trainer: Trainer, used: list[Batch]) -> None:
    """Record the sample ids of the last update in global order, and one digest over all samples."""
    step = trainer.state.confirmed_step
    parts = trainer.group.all_gather([(batch.ids.tolist(), batch.digests.numpy().tobytes()) for batch in used])
    passes = [ids_and_digests for part in parts for ids_and_digests in part]
    digest = hashlib.sha256(b"".join(digests for _, digests in passes)).hexdigest()
    trainer.records.log_sample_ids(
        step, trainer.plan.epoch_at(step - 1), [sample for ids, _ in passes for sample in ids], digest
    )


def _record_defects(trainer: Trainer, used: list[Batch]) -> None:
    """Log each bad image once.

    Raises StorageError, in all processes, if there are more than data.max_bad allows.
    """
    known, images, config, plan = trainer.state.bad_images, trainer.train_images, trainer.config, trainer.plan
    for defects in trainer.group.all_gather([defect for batch in used for defect in batch.defects]):
        for sample, reason in defects:
            if sample not in known:
                known[sample] = reason
                trainer.terminal.log(f"bad image {images.name(sample)}: {reason}; another image takes its place")
                trainer.records.log_event("bad image", id=sample, file=images.name(sample), defect=reason)
    limit = config.data.max_bad * plan.train_images
    if len(known) > limit:
        raise StorageError(
            f"{len(known)} of {plan.train_images:,} training images cannot be decoded, more than"
            f" data.max_bad={config.data.max_bad:g} allows ({limit:.0f})",
            "raise data.max_bad to train without them, or"
            f" fix the files that 'pipeline data check' names and {config.start_again}",
        )
