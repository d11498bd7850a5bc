"""What will happen: configuration + world + size of the data -> every size, step and rate of the run.

Promise: all arithmetic on sizes is here and nowhere else, it is pure, and it is printed. The older guides do the same by
hand (`batch / ngpus`, `ceil(workers / ngpus)`); here a remainder is refused by name, with the nearest values that work.

A *step* is one update of the weights from one global batch; it is the only position a run has. An epoch is
`images // global_batch` steps: the last, smaller rest of a shuffled epoch is left out (another rest each epoch).
"""

import hashlib
import math
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.config.schema import Config, Duration
from pipeline.errors import RequestError
from pipeline.world import World


@dataclass(frozen=True)
class DataSize:
    train_images: int
    val_images: int
    num_classes: int

    def describe(self) -> str:
        """Return the sizes as text for a message."""
        return f"{self.train_images:,} images to train, {self.val_images:,} held out, {self.num_classes:,} classes"


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What each process of a job has: all that an evaluation alone needs to know."""

    world: int
    local_world: int
    workers_per_node: int
    workers: int
    """Loader processes of each process."""
    prefetch: int
    threads: int
    eval_batch: int


@dataclass(frozen=True, kw_only=True)
class Plan(Resources):
    """A training run."""

    global_batch: int
    process_batch: int
    micro_batch: int
    accumulate: int
    stages: int
    """Parts that the model is cut into; the world holds world / stages copies of it."""
    micro_batches: int
    """Parts that a copy's pass is cut into on its way through the stages."""
    train_images: int
    val_images: int
    num_classes: int
    steps_per_epoch: int
    total_steps: int
    """The schedule's length."""
    last_step: int
    """Where this run stops: total_steps, or earlier by train.max_steps."""
    peak_lr: float
    schedule: str
    warmup_steps: int
    decay_steps: int
    """From the end of the warm-up to the begin of the cooldown."""
    final: float
    drop_steps: int
    gamma: float
    evaluate_every: int
    checkpoint_every: int
    report_every: int
    watch_every: int
    """0: never."""
    image_size: int
    """The largest: of the last epochs."""
    first_size: int
    grows_from: float
    grows_until: float
    """Epochs between which the side of an image grows from first_size to image_size."""
    eval_size: int
    repeats: int
    compiles: bool
    why_compiled: str
    """Or why not."""

    def epoch(self, step: int) -> int:
        """Epoch that the update after `step` belongs to, from 0."""
        return step // self.steps_per_epoch

    def size(self, step: int) -> int:
        """Side of the images of the update after `step`, in pixels: FFCV's rule (train_imagenet.py, get_resolution)."""
        epoch = self.epoch(step)
        if epoch <= self.grows_from or self.first_size == self.image_size:
            return self.first_size
        if epoch >= self.grows_until:
            return self.image_size
        share = (epoch - self.grows_from) / (self.grows_until - self.grows_from)
        nearest = round((self.first_size + share * (self.image_size - self.first_size)) / 32) * 32
        return min(max(nearest, self.first_size), self.image_size)

    @property
    def sizes(self) -> list[int]:
        """Return every side that training images have, in pixels, in ascending order."""
        return sorted({self.size(step) for step in range(0, self.total_steps, self.steps_per_epoch)})

    def compiles_at(self, step: int, *, is_first: bool) -> bool:
        """Return True if the update after `step` may compile the model: the first of a start, and each with a new size."""
        return self.compiles and (is_first or self.size(step) != self.size(step - 1))

    def learning_rate(self, step: int) -> float:
        """Rate of the update that follows `step` updates. A function of the step, so nothing of it is ever saved."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        share = min(1.0, (step - self.warmup_steps) / max(1, self.decay_steps))
        match self.schedule:
            case "cosine":
                return self.peak_lr * (self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * share)))
            case "linear":
                return self.peak_lr * (self.final + (1 - self.final) * (1 - share))
            case "step":
                return self.peak_lr * self.gamma ** (step // self.drop_steps)
            case _:
                return self.peak_lr

    def evaluates_at(self, step: int) -> bool:
        return step > 0 and (step % self.evaluate_every == 0 or step >= self.last_step)

    def saves_at(self, step: int) -> bool:
        return step > 0 and (step % self.checkpoint_every == 0 or step >= self.last_step)

    def reports_at(self, step: int) -> bool:
        return step % self.report_every == 0 or step == self.last_step

    def watches_at(self, step: int) -> bool:
        return self.watch_every > 0 and step % self.watch_every == 0

    @property
    def batches_ahead_bytes(self) -> int:
        """Memory in /dev/shm for the batches (uint8 pixels) that a node's workers hold ready, one in use and one just come:
        of training, and of an evaluation besides."""
        held = self.local_world * (self.workers * self.prefetch + 2) if self.workers else 0
        return held * 3 * (self.micro_batch * self.image_size**2 + self.eval_batch * self.eval_size**2)

    @property
    def bn_batch(self) -> int:
        """Images that go through the model at once, which is what batch norm sees."""
        return self.micro_batch * self.stages // self.micro_batches

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> str:
        """The plan as people read it, arithmetic included."""
        nodes = self.world // self.local_world
        rows = [
            ("data", f"{self.train_images:,} images to train, {self.val_images:,} held out, {self.num_classes:,} classes"),
            ("world", f"{_count(self.world, 'process', 'es')} on {_count(nodes, 'node')},"
                      f" {_count(self.threads, 'thread')} each"),
            ("batch", f"{self.global_batch} = {self.world} × {self.accumulate} × {self.micro_batch}"
                      " (processes × accumulation × images a pass)"),
            *([("stages", f"{self.world} = {self.world // self.stages} × {self.stages} (copies × stages); a copy's pass of"
                          f" {self.micro_batch * self.stages} images = {self.micro_batches} × {self.bn_batch}"
                          " (micro-batches × images)")] if self.stages > 1 else []),
            ("workers", f"{self.workers} a process = ⌈{self.workers_per_node} a node / {self.local_world}⌉,"
                        f" {_mib(self.batches_ahead_bytes)} of /dev/shm a node"),
            ("epoch", f"{self.steps_per_epoch:,} steps = ⌊{self.train_images:,} / {self.global_batch}⌋"
                      f" ({self.train_images % self.global_batch:,} images left out, others each epoch)"),
            ("steps", f"{self.last_step:,}" + (f" of {self.total_steps:,}" if self.last_step < self.total_steps else "")
                      + f" ({self.last_step / self.steps_per_epoch:.4g} epochs)"),
            ("images", f"{self.image_size} px"
                       + (f", {self.first_size} px up to epoch {self.grows_from:g}, growing until {self.grows_until:g}"
                          if self.first_size < self.image_size else "")
                       + (f", {self.repeats} views of each in a batch" if self.repeats > 1 else "")
                       + f"; {self.eval_size} px in validation"),
            ("compiled", f"{'yes' if self.compiles else 'no'}: {self.why_compiled}"),
            ("learning rate", f"{self.peak_lr:.6g} at {self.global_batch} images a batch, {self.schedule}"
                              + (f", after {self.warmup_steps:,} steps of warm-up" if self.warmup_steps else "")),
            ("validation", f"every {self.evaluate_every:,} steps, {math.ceil(self.val_images / self.eval_batch):,} batches"
                           f" of {self.eval_batch}, each image once"),
            ("checkpoint", f"every {self.checkpoint_every:,} steps"),
        ]  # fmt: skip
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)


def request_digest(config: Config, world: World) -> str:
    """Return what tells one request from another: a SHA-256 over the configuration and the number of processes.

    `run.resume` says where a request resumes, not what it asks for.
    """
    asked = config.model_dump_json(exclude={"run": {"resume"}})
    return hashlib.sha256(f"{asked} {world.size} {world.local_size}".encode()).hexdigest()


def memory_row(config: Config, parameters: int, world: int) -> str:
    """What each process holds for the whole of a training, as a row of the table; activations come on top."""
    moments = config.optimizer.moments
    copies = 2 + moments
    whole = 4 * parameters * copies
    row = (
        f"  memory         {parameters:,} parameters × 4 bytes × {copies} (weights, gradients, {moments} of the optimizer)"
        f" = {_mib(whole)}"
    )
    parts = {"fsdp": world, "stages": config.stages.count}.get(config.parallel, 1)
    if parts == 1:
        return f"{row} a process, activations besides"
    return (
        f"{row}, of which a process has about 1/{parts} = {_mib(whole // parts)}, activations besides; rank 0 has"
        f" {_mib(4 * parameters * (1 + moments))} more in host memory while it saves, twice if on a CPU"
    )


def make_plan(config: Config, world: World, data: DataSize) -> Plan:
    """The plan, or a RequestError that names the key, the numbers and what would work."""
    global_batch, accumulate = config.batch.global_, config.batch.accumulate
    if config.run.exact:
        accumulate = _shards_per_process(config, world.size)
    else:
        _check_divides(global_batch, world.size, accumulate)
    if config.parallel == "dataparallel" and world.size > 1:
        raise RequestError(
            f"parallel=dataparallel is one process for all GPUs of a machine, not {world.size}: start one, or take ddp"
        )
    stages, micro_batches = _stages(config, world.size, global_batch // (world.size * accumulate))
    if data.train_images < global_batch:
        share = world.size * accumulate
        largest = data.train_images // share * share
        raise RequestError(
            f"data has {data.train_images:,} images to train, fewer than one batch of batch.global={global_batch}: "
            + (f"set batch.global to at most {largest}" if largest else f"that is not one for each of {share} passes")
        )
    steps_per_epoch = data.train_images // global_batch
    total_steps = config.train.epochs * steps_per_epoch

    def steps(duration: Duration) -> int:
        unit = {"epochs": steps_per_epoch, "steps": 1, "%": total_steps / 100}[duration.unit]
        return round(duration.amount * unit)

    warmup_steps = steps(config.schedule.warmup)
    if warmup_steps > total_steps:
        raise RequestError(
            f"schedule.warmup={config.schedule.warmup} is {warmup_steps:,} steps, longer than the whole training of"
            f" {total_steps:,} steps ({config.train.epochs} epochs): make it shorter"
        )
    cooldown_steps = steps(config.schedule.cooldown)
    if warmup_steps + cooldown_steps > total_steps:
        raise RequestError(
            f"schedule.cooldown={config.schedule.cooldown} is {cooldown_steps:,} steps, which with {warmup_steps:,} of"
            f" warm-up is longer than the whole training of {total_steps:,} steps ({config.train.epochs} epochs): make it"
            " shorter"
        )
    grows_from, grows_until = (steps(when) / steps_per_epoch for when in config.augment.growth)
    first_size = config.augment.first_size or config.augment.size
    if first_size < config.augment.size and not grows_from <= grows_until < config.train.epochs:
        raise RequestError(
            f"augment.growth=[{config.augment.growth[0]}, {config.augment.growth[1]}] is from epoch {grows_from:g} to"
            f" {grows_until:g} of {config.train.epochs}: the side must begin to grow before it ends to, and before the"
            " training does"
        )
    compiles, why_compiled = _compilation(config, world)
    plan = Plan(
        **vars(share_resources(config, world)),
        global_batch=global_batch,
        process_batch=global_batch // world.size,
        micro_batch=global_batch // (world.size * accumulate),
        accumulate=accumulate,
        stages=stages,
        micro_batches=micro_batches,
        train_images=data.train_images,
        val_images=data.val_images,
        num_classes=data.num_classes,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        last_step=min(total_steps, config.train.max_steps or total_steps),
        peak_lr=config.optimizer.lr * global_batch / 256,
        schedule=config.schedule.name,
        warmup_steps=warmup_steps,
        decay_steps=total_steps - warmup_steps - cooldown_steps,
        final=config.schedule.final,
        drop_steps=max(1, steps(config.schedule.every)),
        gamma=config.schedule.gamma,
        evaluate_every=max(1, steps(config.evaluate.every)),
        checkpoint_every=max(1, steps(config.checkpoint.every)),
        report_every=max(1, steps(config.track.every)),
        watch_every=max(1, steps(config.run.watch)) if config.run.watch else 0,
        image_size=config.augment.size,
        first_size=first_size,
        grows_from=grows_from,
        grows_until=grows_until,
        repeats=config.augment.repeats,
        compiles=compiles,
        why_compiled=why_compiled,
        eval_size=config.evaluate.size or config.augment.size,
    )
    if config.mixes and plan.micro_batch % 2:
        raise RequestError(
            f"augment.mixup and augment.cutmix mix pairs, and a pass has {plan.micro_batch} images: choose batch.global, so"
            " that each pass has an even number"
        )
    if world.shared_memory is not None and plan.batches_ahead_bytes > world.shared_memory:
        raise RequestError(
            f"loader workers hold {_mib(plan.batches_ahead_bytes)} of batches ready and /dev/shm has"
            f" {_mib(world.shared_memory)}: give it more (docker: --shm-size), or set data.workers, data.prefetch or"
            " evaluate.batch lower (data.workers=0 needs none)"
        )
    return plan


def share_resources(config: Config, world: World) -> Resources:
    """Workers and threads of a node, shared out to its processes."""
    workers_per_node = world.cpus if config.data.workers is None else config.data.workers
    return Resources(
        world=world.size,
        local_world=world.local_size,
        workers_per_node=workers_per_node,
        workers=math.ceil(workers_per_node / world.local_size),
        prefetch=config.data.prefetch,
        threads=_threads(config, world),
        eval_batch=config.evaluate.batch,
    )


def _threads(config: Config, world: World) -> int:
    # The number of threads changes the order of sums on a CPU, so a run that promises its bits takes a number that no
    # machine changes: one, unless told.
    if config.run.threads is not None:
        return config.run.threads
    return 1 if config.is_deterministic else max(1, world.cpus // world.local_size)


def _check_divides(global_batch: int, world: int, accumulate: int) -> None:
    share = world * accumulate
    if global_batch % share == 0:
        return
    below, above = global_batch // share * share, -(-global_batch // share) * share
    work = f"{below} or {above}" if below else f"{above}"
    worlds = [] if global_batch % accumulate else _near_divisors(global_batch // accumulate, world)
    raise RequestError(
        f"batch.global={global_batch} does not divide by {_count(world, 'process', 'es')} × batch.accumulate={accumulate}"
        f" = {share}: the nearest batch.global that works is {work}"
        + (f"; worlds that work are {', '.join(map(str, worlds))}" if worlds else "")
    )


def _shards_per_process(config: Config, world: int) -> int:
    """Passes of each process in exact mode: one for each shard that it has."""
    global_batch, shards = config.batch.global_, config.exact.shards
    if global_batch % shards:
        raise RequestError(
            f"batch.global={global_batch} does not divide by exact.shards={shards}: the nearest exact.shards that work are"
            f" {', '.join(map(str, _near_divisors(global_batch, shards)))}"
        )
    if shards % world:
        raise RequestError(
            f"run.exact=true cuts each batch into exact.shards={shards}, which {_count(world, 'process', 'es')} cannot"
            f" share evenly: worlds that work are {', '.join(map(str, _near_divisors(shards, world)))}"
        )
    if config.batch.accumulate > shards // world:
        raise RequestError(
            f"batch.accumulate={config.batch.accumulate} asks for more passes than exact.shards={shards} gives"
            f" {_count(world, 'process', 'es')}, {shards // world} each: raise exact.shards"
        )
    return shards // world


def _stages(config: Config, world: int, micro_batch: int) -> tuple[int, int]:
    """Parts of the model, and parts of a copy's pass; (1, 1) where the model is in one."""
    if config.parallel != "stages":
        return 1, 1
    count, asked = config.stages.count, config.stages.micro_batches
    if world % count:
        worlds = [near for near in (world // count * count, (world // count + 1) * count) if near]
        raise RequestError(
            f"stages.count={count} wants as many processes for each copy of the model, and {world} cannot be shared out so:"
            f" worlds that work are {', '.join(map(str, worlds))}"
        )
    images = count * micro_batch
    if asked is None:
        return count, max(parts for parts in range(1, 2 * count + 1) if images % parts == 0)
    if images % asked:
        raise RequestError(
            f"stages.micro_batches={asked} does not divide the {images} images of a copy's pass: the nearest that work are"
            f" {', '.join(map(str, _near_divisors(images, asked)))}"
        )
    if config.stages.schedule == "1f1b" and asked < count:
        raise RequestError(
            f"stages.micro_batches={asked} is fewer than stages.count={count}, and 1f1b wants one for each stage: raise it,"
            " or take stages.schedule=gpipe"
        )
    return count, asked


def _compilation(config: Config, world: World) -> tuple[bool, str]:
    """Whether the model is compiled, and why, or why not. RequestError if it shall be and cannot."""
    wanted, lack = config.train.compile, world.missing_to_compile
    if wanted == "off":
        return False, "train.compile=off"
    if wanted == "on":
        if lack:
            raise RequestError(
                f"train.compile=on: torch.compile wants {lack}: install it, or leave train.compile at auto"
            )
        return True, "train.compile=on"
    if config.parallel != "ddp":
        return False, f"parallel={config.parallel} runs parts of a model, which are left as they are"
    if config.run.device == "cpu" or not world.has_gpu:
        return False, "there is no GPU to gain by it; train.compile=on compiles for a CPU"
    if config.is_deterministic:
        return False, "the run promises its bits, which kernels chosen anew may not keep; train.compile=on tries"
    if lack:
        return False, f"torch.compile wants {lack}, which is not here"
    return True, "there is a GPU"


def _near_divisors(number: int, near: int) -> list[int]:
    divisors = {n for i in range(1, math.isqrt(number) + 1) if number % i == 0 for n in (i, number // i)}
    return sorted(sorted(divisors, key=lambda n: abs(n - near))[:6])


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else plural)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
