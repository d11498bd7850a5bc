"""The plan of a run: its sizes, steps and rates, as numbers (`pipeline.planning` makes it).

A *step* is one update of the weights from one global batch; it is the only position that a run has.
An epoch has `images // global_batch` steps: the rest of the shuffled images is left out, and it is
another rest in each epoch.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class DataSize:
    train_images: int
    val_images: int
    num_classes: int
    notes: str = ""
    """Text for a message: the rule that holds images out, and what else a reader should know."""
    label_sets: int = 0
    """With several labels a picture: the number of different sets of them."""

    def describe(self) -> str:
        """Return the sizes as text for a message."""
        images = f"{self.train_images:,} images to train, {self.val_images:,} held out"
        return f"{images}, {self.num_classes:,} classes" + (f" ({self.notes})" if self.notes else "")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The processes, loader workers and threads of a job: all that an evaluation needs."""

    world: int
    local_world: int
    workers_per_node: int
    workers: int
    """Loader processes of each training process."""
    prefetch: int
    threads: int
    eval_batch: int


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The parts of a global batch."""

    global_batch: int
    process_batch: int
    micro_batch: int
    accumulate: int
    stages: int = 1
    """Stages of the model; the job trains world / stages copies of it."""
    micro_batches: int = 1
    """Micro-batches that a copy's pass is split into for the stages."""

    @property
    def bn_batch(self) -> int:
        """Return the number of images that batch norm sees at once."""
        return self.micro_batch * self.stages // self.micro_batches


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The steps of a training, what happens at which of them, and its learning rate."""

    steps_per_epoch: int
    total_steps: int
    """The length of the schedule."""
    last_step: int
    """The step at which this run stops: total_steps, or earlier with train.max_steps."""
    peak_lr: float
    schedule: str
    warmup_steps: int
    decay_steps: int
    """Steps from the end of the warm-up to the start of the cooldown."""
    final_lr_fraction: float
    drop_steps: int
    """With the step schedule: steps between two drops."""
    gamma: float
    evaluate_every: int
    checkpoint_every: int
    log_every: int
    watch_every: int
    """0: never."""
    unfreeze_step: int = 0
    """The first step that trains all of the model, with model.freeze_until."""
    patience: int = 0
    """Evaluations without a better one after which the run ends; 0: it does not."""

    def epoch_at(self, step: int) -> int:
        """Return the epoch, from 0, of the update after `step`."""
        return step // self.steps_per_epoch

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of the update after `step`.

        It is a function of the step, so there is no scheduler state to save.
        """
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        share = min(1.0, (step - self.warmup_steps) / max(1, self.decay_steps))
        final = self.final_lr_fraction
        match self.schedule:
            case "cosine":
                return self.peak_lr * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * share)))
            case "linear":
                return self.peak_lr * (final + (1 - final) * (1 - share))
            case "step":
                return self.peak_lr * self.gamma ** (step // self.drop_steps)
            case _:
                return self.peak_lr

    def evaluates_at(self, step: int) -> bool:
        return step > 0 and (step % self.evaluate_every == 0 or step >= self.last_step)

    def saves_at(self, step: int) -> bool:
        return step > 0 and (step % self.checkpoint_every == 0 or step >= self.last_step)

    def is_over(self, step: int, best: int) -> bool:
        """Return True if `step` is the last. best: the step of the best evaluation until then."""
        waited = step - max(best, self.warmup_steps, self.unfreeze_step)
        return step >= self.last_step or 0 < self.patience * self.evaluate_every <= waited

    def logs_at(self, step: int) -> bool:
        return step % self.log_every == 0 or step == self.last_step


@dataclass(frozen=True, kw_only=True)
class ImageSizes:
    """The sides of images, in pixels."""

    image_size: int
    """Side of the training images in the last epochs, the largest."""
    first_size: int
    grows_from: float
    grows_until: float
    """Epochs between which the side of an image grows from first_size to image_size."""
    eval_size: int
    repeats: int

    def image_size_in(self, epoch: int) -> int:
        """Return the side of the images in an epoch.

        It grows by the rule of FFCV (train_imagenet.py, get_resolution).
        """
        if epoch <= self.grows_from or self.first_size == self.image_size:
            return self.first_size
        if epoch >= self.grows_until:
            return self.image_size
        share = (epoch - self.grows_from) / (self.grows_until - self.grows_from)
        nearest = round((self.first_size + share * (self.image_size - self.first_size)) / 32) * 32
        return min(max(nearest, self.first_size), self.image_size)


@dataclass(frozen=True, kw_only=True)
class Plan(Resources, BatchSizes, Schedule, ImageSizes, DataSize):
    """The sizes, steps and rates of a training run."""

    balance: str = "none"
    """See data.balance."""
    compiles: bool
    compile_reason: str
    """The reason for compiling the model, or for not compiling it."""
    not_resident: str = ""
    """Why the training images do not live on the training device; "" if they do."""
    is_portable: bool
    portable_reason: str
    """Why the bits depend on the model of CPU, or do not; "" if the run is not deterministic."""
    normalised: str = ""
    """Mean and deviation of the colours, if they are not ImageNet's by default."""

    def image_size_at(self, step: int) -> int:
        return self.image_size_in(self.epoch_at(step))

    @property
    def image_sizes(self) -> list[int]:
        """Return every side that training images have, in ascending order."""
        return sorted({self.image_size_at(step) for step in range(0, self.total_steps, self.steps_per_epoch)})

    def compiles_at(self, step: int, *, is_first: bool) -> bool:
        """Return True if the update after `step` may compile the model.

        That is the first update of a start, each update with a new image size, and that of
        model.freeze_until.
        """
        is_new = self.image_size_at(step) != self.image_size_at(step - 1) or step == self.unfreeze_step
        return self.compiles and (is_first or is_new)

    @property
    def prefetch_bytes(self) -> int:
        """Return the bytes of memory for the batches (uint8 pixels) that a node's workers hold.

        Each worker has the prefetched batches and the memory for one more, and its process one in
        use and one just received: for training and again for evaluation.
        """
        batches = self.local_world * (self.workers * (self.prefetch + 1) + 2) if self.workers else 0
        return batches * 3 * (self.micro_batch * self.image_size**2 + self.eval_batch * self.eval_size**2)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
