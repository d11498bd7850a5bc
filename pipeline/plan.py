"""The plan of a run: every size, step and rate, from the configuration, the world and the data.

Promise: all arithmetic on sizes is in this module, it is pure, and it is printed. Other training
scripts do it by hand (`batch / ngpus`, `ceil(workers / ngpus)`). Here a size that does not divide
evenly is an error, which names the nearest values that work.

A *step* is one update of the weights from one global batch; it is the only position that a run has.
An epoch has `images // global_batch` steps: the rest of the shuffled images is left out, and it is
another rest in each epoch.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.config.duration import Duration
from pipeline.config.schema import Config
from pipeline.errors import RequestError, count_of
from pipeline.portable import portability
from pipeline.world import World

_STEPS_TO_REPAY_COMPILATION = 2_000
"""Steps with each image size from which train.compile=auto compiles.

An estimate, not measured: to compile takes a minute or more, and a compiled step of 200 ms is 15 %
shorter. A plan does not know the time of a step.
"""


@dataclass(frozen=True)
class DataSize:
    train_images: int
    val_images: int
    num_classes: int
    notes: str = ""
    """Text for a message: the rule that holds images out, and what else a reader should know."""

    def describe(self) -> str:
        """Return the sizes as text for a message."""
        sizes = f"{self.train_images:,} images to train, {self.val_images:,} held out, {self.num_classes:,} classes"
        return sizes + (f" ({self.notes})" if self.notes else "")


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
class Plan(Resources):
    """The sizes, steps and rates of a training run."""

    global_batch: int
    process_batch: int
    micro_batch: int
    accumulate: int
    stages: int
    """Stages of the model; the job trains world / stages copies of it."""
    micro_batches: int
    """Micro-batches that a copy's pass is split into for the stages."""
    train_images: int
    val_images: int
    num_classes: int
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
    image_size: int
    """Side of the training images in the last epochs, the largest."""
    first_size: int
    grows_from: float
    grows_until: float
    """Epochs between which the side of an image grows from first_size to image_size."""
    eval_size: int
    repeats: int
    compiles: bool
    compile_reason: str
    """The reason for compiling the model, or for not compiling it."""
    is_portable: bool
    portable_reason: str
    """Why the bits depend on the model of CPU, or do not; "" if the run is not deterministic."""
    precision_note: str = ""
    """A hint about the speed of the precision on a GPU, or ""."""
    balance: str = "none"
    """See data.balance."""
    notes: str = ""
    """See DataSize."""

    def epoch_at(self, step: int) -> int:
        """Return the epoch, from 0, of the update after `step`."""
        return step // self.steps_per_epoch

    def image_size_at(self, step: int) -> int:
        """Return the side of the images in the update after `step`, in pixels."""
        return _size_at(self.epoch_at(step), self.first_size, self.image_size, self.grows_from, self.grows_until)

    @property
    def image_sizes(self) -> list[int]:
        """Return every side that training images have, in pixels, in ascending order."""
        return sorted({self.image_size_at(step) for step in range(0, self.total_steps, self.steps_per_epoch)})

    def compiles_at(self, step: int, *, is_first: bool) -> bool:
        """Return True if the update after `step` may compile the model.

        That is the first update of a start, and each update with a new image size.
        """
        return self.compiles and (is_first or self.image_size_at(step) != self.image_size_at(step - 1))

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

    def logs_at(self, step: int) -> bool:
        return step % self.log_every == 0 or step == self.last_step

    def watches_at(self, step: int) -> bool:
        return self.watch_every > 0 and step % self.watch_every == 0

    @property
    def prefetch_bytes(self) -> int:
        """Return the bytes of memory for the batches (uint8 pixels) that a node's workers hold.

        Each process has the prefetched batches, one in use and one just received, for training and
        again for evaluation.
        """
        batches = self.local_world * (self.workers * self.prefetch + 2) if self.workers else 0
        return batches * 3 * (self.micro_batch * self.image_size**2 + self.eval_batch * self.eval_size**2)

    @property
    def bn_batch(self) -> int:
        """Return the number of images that batch norm sees at once."""
        return self.micro_batch * self.stages // self.micro_batches

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def request_digest(config: Config, world: World) -> str:
    """Return a SHA-256 that identifies a request: its configuration and its number of processes.

    `run.resume` is left out: it says from where to resume, not what to train.
    """
    fields = config.model_dump_json(exclude={"run": {"resume"}})
    return hashlib.sha256(f"{fields} {world.size} {world.local_size}".encode()).hexdigest()


def fsdp_slices(config: Config, plan: Resources) -> int:
    """Return the number of slices that FSDP cuts a copy of the weights into."""
    return plan.world if config.fsdp.shard == "all" else plan.local_world


def class_shares(balance: str, counts: Sequence[int]) -> list[float]:
    """Return the probability that an image of the training has each class.

    balance: see `data.balance`. counts: images of each class. The square root is that of Mahajan et
    al., "Exploring the limits of weakly supervised pretraining", 2018.
    """
    weights = [{"none": count, "sqrt": math.sqrt(count), "uniform": float(count > 0)}[balance] for count in counts]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def make_plan(config: Config, world: World, data: DataSize) -> Plan:
    """Return the plan, or raise RequestError with the key, the numbers and what works instead."""
    global_batch = config.batch.global_
    accumulate, micro_batch, stages, micro_batches = divide_batch(config, world.size)
    length = _length(config, data, passes=world.size * accumulate)
    warmup_steps, cooldown_steps = _warmup_and_cooldown(config, length)
    growth = first_size, image_size, grows_from, grows_until = _growth(config, length)
    num_sizes = len({_size_at(epoch, *growth) for epoch in range(config.train.epochs)})
    compiles, compile_reason = _compilation(config, world, length.total_steps, num_sizes)
    is_portable, portable_reason = portability(config, world)
    return Plan(
        **vars(divide_resources(config, world)), **vars(data),
        global_batch=global_batch, process_batch=global_batch // world.size,
        micro_batch=micro_batch, accumulate=accumulate, stages=stages, micro_batches=micro_batches,
        steps_per_epoch=length.steps_per_epoch, total_steps=length.total_steps,
        last_step=min(length.total_steps, config.train.max_steps or length.total_steps),
        peak_lr=config.optimizer.lr * global_batch / 256, schedule=config.schedule.name,
        warmup_steps=warmup_steps, decay_steps=length.total_steps - warmup_steps - cooldown_steps,
        final_lr_fraction=config.schedule.final_lr_fraction,
        drop_steps=length.interval(config.schedule.every), gamma=config.schedule.gamma,
        evaluate_every=length.interval(config.evaluate.every),
        checkpoint_every=length.interval(config.checkpoint.every), log_every=length.interval(config.track.every),
        watch_every=length.interval(config.run.watch) if config.run.watch else 0,
        image_size=image_size, first_size=first_size, grows_from=grows_from, grows_until=grows_until,
        eval_size=config.evaluate.size or image_size, repeats=config.augment.repeats,
        compiles=compiles, compile_reason=compile_reason,
        is_portable=is_portable, portable_reason=portable_reason, precision_note=_precision_note(config, world),
        balance=config.data.balance,
    )  # fmt: skip


def divide_batch(config: Config, world: int) -> tuple[int, int, int, int]:
    """Return the passes of an update, the images of a pass, the stages and the micro-batches.

    Raises RequestError if the batch does not divide among `world` processes.
    """
    accumulate = _accumulate(config, world)
    micro_batch = config.batch.global_ // (world * accumulate)
    if config.mixes and micro_batch % 2:
        raise RequestError(
            f"augment.mixup and augment.cutmix mix pairs, and a pass has {micro_batch} images",
            "choose a batch.global that gives each pass an even number",
        )
    return accumulate, micro_batch, *_stages(config, world, micro_batch)


def divisors(config: Config, worlds: Iterable[int]) -> list[int]:
    """Return the numbers of processes among `worlds` that divide the batch.

    Raises RequestError, that of the largest, if there is none.
    """
    found, error = [], None
    for world in worlds:
        try:
            divide_batch(config, world)
            found.append(world)
        except RequestError as refused:
            error = refused
    if error and not found:
        raise error
    return found


def divide_resources(config: Config, world: World) -> Resources:
    """Return the workers and threads of a node, divided among its processes."""
    workers_per_node = world.cpus if config.data.workers is None else config.data.workers
    # the order of sums on a CPU depends on the threads, so a deterministic run has 1 on any machine
    threads = 1 if config.is_deterministic else max(1, world.cpus // world.local_size)
    return Resources(
        world=world.size,
        local_world=world.local_size,
        workers_per_node=workers_per_node,
        workers=math.ceil(workers_per_node / world.local_size),
        prefetch=config.data.prefetch,
        threads=config.run.threads or threads,
        eval_batch=config.evaluate.batch,
    )


def _accumulate(config: Config, world: int) -> int:
    """Return the number of passes per update in each process."""
    accumulate = _shards_per_process(config, world) if config.run.exact else config.batch.accumulate
    global_batch, passes = config.batch.global_, world * accumulate
    if global_batch % passes:
        below, above = global_batch // passes * passes, -(-global_batch // passes) * passes
        batches = f"{below} or {above}" if below else f"{above}"
        worlds = "" if global_batch % accumulate else _near_divisors(global_batch // accumulate, world)
        raise RequestError(
            f"batch.global={global_batch} does not divide by {count_of(world, 'process', 'es')} × batch.accumulate="
            f"{accumulate} = {passes}",
            f"the nearest batch.global that works is {batches}{f'; worlds that work are {worlds}' if worlds else ''}",
        )
    if config.parallel == "dataparallel" and world > 1:
        raise RequestError(
            f"parallel=dataparallel uses one process for all GPUs of a machine, not {world}",
            "start one process, or use parallel=ddp",
        )
    return accumulate


def _shards_per_process(config: Config, world: int) -> int:
    """Return the number of shards of each process in exact mode; each shard is one pass."""
    global_batch, shards = config.batch.global_, config.exact.shards
    if global_batch % shards:
        raise RequestError(
            f"batch.global={global_batch} does not divide by exact.shards={shards}",
            f"the nearest exact.shards that work are {_near_divisors(global_batch, shards)}",
        )
    if shards % world:
        raise RequestError(
            f"run.exact=true cuts each batch into exact.shards={shards}, which {count_of(world, 'process', 'es')}"
            " cannot share evenly",
            f"worlds that work are {_near_divisors(shards, world)}",
        )
    if config.batch.accumulate > shards // world:
        raise RequestError(
            f"batch.accumulate={config.batch.accumulate} asks for more passes than exact.shards={shards} gives"
            f" {count_of(world, 'process', 'es')}, {shards // world} each",
            "raise exact.shards",
        )
    return shards // world


def _stages(config: Config, world: int, micro_batch: int) -> tuple[int, int]:
    """Return the number of stages and of micro-batches; (1, 1) if the model is not split."""
    if config.parallel != "stages":
        return 1, 1
    count, micro_batches = config.stages.count, config.stages.micro_batches
    if world % count:
        worlds = [near for near in (world // count * count, (world // count + 1) * count) if near]
        raise RequestError(
            f"stages.count={count} does not divide {world} processes",
            f"worlds that work are {', '.join(map(str, worlds))}",
        )
    images = count * micro_batch
    if micro_batches is None:
        return count, max(parts for parts in range(1, 2 * count + 1) if images % parts == 0)
    if images % micro_batches:
        raise RequestError(
            f"stages.micro_batches={micro_batches} does not divide the {images} images of a copy's pass",
            f"the nearest that work are {_near_divisors(images, micro_batches)}",
        )
    if config.stages.schedule == "1f1b" and micro_batches < count:
        raise RequestError(
            f"stages.micro_batches={micro_batches} is less than stages.count={count}, and 1f1b needs one per stage",
            "raise it, or use stages.schedule=gpipe",
        )
    return count, micro_batches


@dataclass(frozen=True)
class _Length:
    """The length of a training, which durations are converted with."""

    steps_per_epoch: int
    total_steps: int

    def steps(self, duration: Duration) -> int:
        unit = {"epochs": self.steps_per_epoch, "steps": 1, "%": self.total_steps / 100}[duration.unit]
        return round(duration.amount * unit)

    def interval(self, duration: Duration) -> int:
        return max(1, self.steps(duration))


def _length(config: Config, data: DataSize, passes: int) -> _Length:
    """Return the number of steps. passes: forward passes per update, over all processes."""
    global_batch = config.batch.global_
    if data.train_images < global_batch:
        largest = data.train_images // passes * passes
        raise RequestError(
            f"data has {data.train_images:,} images to train, fewer than one batch of batch.global={global_batch}",
            f"set batch.global to at most {largest}" if largest else f"{passes} passes need at least one image each",
        )
    steps_per_epoch = data.train_images // global_batch
    return _Length(steps_per_epoch, config.train.epochs * steps_per_epoch)


def _warmup_and_cooldown(config: Config, length: _Length) -> tuple[int, int]:
    """Return the number of steps of the warm-up and of the cooldown."""
    options = config.schedule
    warmup_steps, cooldown_steps = length.steps(options.warmup), length.steps(options.cooldown)
    training = f"longer than the whole training of {length.total_steps:,} steps ({config.train.epochs} epochs)"
    if warmup_steps > length.total_steps:
        raise RequestError(f"schedule.warmup={options.warmup} is {warmup_steps:,} steps, {training}", "make it shorter")
    if warmup_steps + cooldown_steps > length.total_steps:
        raise RequestError(
            f"schedule.cooldown={options.cooldown} is {cooldown_steps:,} steps and the warm-up {warmup_steps:,},"
            f" together {training}",
            "make it shorter",
        )
    return warmup_steps, cooldown_steps


def _size_at(epoch: int, first_size: int, last_size: int, grows_from: float, grows_until: float) -> int:
    """Return the side of the images in an epoch, in pixels.

    It grows from epoch `grows_from` until epoch `grows_until`, by the rule of FFCV
    (train_imagenet.py, get_resolution).
    """
    if epoch <= grows_from or first_size == last_size:
        return first_size
    if epoch >= grows_until:
        return last_size
    share = (epoch - grows_from) / (grows_until - grows_from)
    nearest = round((first_size + share * (last_size - first_size)) / 32) * 32
    return min(max(nearest, first_size), last_size)


def _growth(config: Config, length: _Length) -> tuple[int, int, float, float]:
    """Return the arguments of `_size_at`. Raises RequestError if growth does not end in time."""
    options, first_size = config.augment, config.augment.first_size or config.augment.size
    grows_from, grows_until = (length.steps(when) / length.steps_per_epoch for when in options.growth)
    if first_size < options.size and not grows_from <= grows_until < config.train.epochs:
        raise RequestError(
            f"augment.growth=[{options.growth[0]}, {options.growth[1]}] is from epoch {grows_from:g} to {grows_until:g}"
            f" of {config.train.epochs}",
            "let the growth end no earlier than it starts, and before the training ends",
        )
    return first_size, options.size, grows_from, grows_until


def _compilation(config: Config, world: World, total_steps: int, num_sizes: int) -> tuple[bool, str]:
    """Return True if the model is compiled, and the reason for compiling it or not.

    num_sizes: of images.
    """
    mode, missing, has_gpu = config.train.compile, world.missing_to_compile, world.uses_gpu(config.run.device)
    if mode == "off":
        return False, "train.compile=off"
    if config.model.batchnorm == "sync" and world.size > 1:
        if mode != "auto":
            raise RequestError(f"train.compile={mode} does not support model.batchnorm=sync", "leave one of them out")
        return False, "model.batchnorm=sync waits for the GPU in each layer, which splits the compiled graph"
    # not with DDP: torch cuts its graphs at the buckets, where CUDA graphs were skipped
    # (pytorch#139207) or crashed (pytorch#128218)
    if mode == "reduce-overhead" and not (has_gpu and world.size == 1):
        found = f"there are {world.size} processes" if world.size > 1 else "there is no GPU"
        raise RequestError(
            f"train.compile=reduce-overhead records CUDA graphs of one process with a GPU, and {found}",
            "start one process with a GPU, or use train.compile=auto",
        )
    if mode != "auto":
        if missing:
            raise RequestError(f"train.compile={mode} needs {missing}", "install it, or set train.compile=auto")
        return True, f"train.compile={mode}"
    if config.parallel != "ddp":
        return False, f"parallel={config.parallel} runs parts of a model, which are not compiled"
    if not has_gpu:
        return False, "no GPU; train.compile=on compiles for the CPU"
    if config.is_deterministic_on_gpus:
        return False, "the run is deterministic, and compiled kernels may change bits; train.compile=on overrides this"
    if missing:
        return False, f"torch.compile needs {missing}, which is missing"
    # A run that is resumed with more train.epochs may reach the number and compile from then on.
    # That breaks no promise, because a deterministic run never gets here.
    if total_steps < _STEPS_TO_REPAY_COMPILATION * num_sizes:
        with_sizes = f" with {num_sizes} image sizes" if num_sizes > 1 else ""
        return False, f"{total_steps:,} steps{with_sizes} are too few to repay a compilation; train.compile=on compiles"
    return True, "there is a GPU"


def _precision_note(config: Config, world: World) -> str:
    """Return a line about fp32 on a GPU, where torch's default is another one, or ""."""
    if config.train.precision != "fp32" or not world.uses_gpu(config.run.device):
        return ""
    return (
        "fp32: TF32 is off, also in convolutions, where torch's default is on; train.precision=tf32 or bf16 is faster"
        " on Ampere and later"
    )


def _near_divisors(number: int, near: int) -> str:
    """Return the six divisors of `number` that are nearest to `near`, ascending, as text."""
    divisors = {n for i in range(1, math.isqrt(number) + 1) if number % i == 0 for n in (i, number // i)}
    return ", ".join(map(str, sorted(sorted(divisors, key=lambda n: abs(n - near))[:6])))
