"""Making the plan of a run, from the configuration, the world and the data.

Promise: all arithmetic on sizes is in this module, it is pure, and it is printed. Other training
scripts do it by hand (`batch / ngpus`, `ceil(workers / ngpus)`). Here a size that does not divide
evenly is an error, which names the nearest values that work.
"""

import hashlib
import math
from dataclasses import replace
from functools import partial

from pipeline.config.schema import Config
from pipeline.config.values import Duration
from pipeline.errors import RequestError, count_of
from pipeline.lazy import addon
from pipeline.plan import BatchSizes, DataSize, ImageSizes, Plan, Resources, Schedule
from pipeline.world import World


def make_plan(config: Config, world: World, data: DataSize) -> Plan:
    """Return the plan, or raise RequestError with the key, the numbers and what works instead."""
    batch = divide_batch(config, world.size)
    schedule = _schedule(config, data, passes=world.size * batch.accumulate)
    images = _image_sizes(config, schedule)
    compiles, compile_reason = addon("models.compilation").compilation(config, world)
    is_portable, portable_reason = addon("run.portable").portability(config, world)
    plan = Plan(
        **vars(divide_resources(config, world)),
        **vars(batch),
        **vars(schedule),
        **vars(images),
        **vars(data),
        balance=config.data.balance,
        compiles=compiles,
        compile_reason=compile_reason,
        is_portable=is_portable,
        portable_reason=portable_reason,
        normalised=f"{config.model.mean} and {config.model.std}, model.init={config.model.init}"
        if config.model.mean
        else "",
    )
    return replace(plan, not_resident=addon("datasets.resident_limits").why_not(config, plan, world))


def divide_batch(config: Config, world: int) -> BatchSizes:
    """Return the parts of the batch. Raises RequestError if it does not divide among `world`."""
    if config.parallel == "dataparallel" and world > 1:
        raise RequestError(
            f"parallel=dataparallel uses one process for all GPUs of a machine, not {world}",
            "start one process, or use parallel=ddp",
        )
    global_batch = config.batch.global_
    accumulate = _shards_per_process(config, world) if config.run.exact else config.batch.accumulate
    micro_batch = _micro_batch(global_batch, world, accumulate)
    if config.mixes and micro_batch % 2:
        raise RequestError(
            f"augment.mixup and augment.cutmix mix pairs, and a pass has {micro_batch} images",
            "choose a batch.global that gives each pass an even number",
        )
    sizes = BatchSizes(
        global_batch=global_batch,
        process_batch=global_batch // world,
        micro_batch=micro_batch,
        accumulate=accumulate,
    )
    if config.parallel != "stages":
        return sizes
    stages, micro_batches = addon("shard.plan").divide_into_stages(config, world, micro_batch)
    return replace(sizes, stages=stages, micro_batches=micro_batches)


def _micro_batch(global_batch: int, world: int, accumulate: int) -> int:
    """Return the images of one pass."""
    passes = world * accumulate
    if global_batch % passes:
        below = global_batch // passes * passes
        batches = f"{below} or {below + passes}" if below else f"{passes}"
        worlds = "" if global_batch % accumulate else near_divisors(global_batch // accumulate, world)
        raise RequestError(
            f"batch.global={global_batch} does not divide by {count_of(world, 'process', 'es')} ×"
            f" batch.accumulate={accumulate} = {passes}",
            f"the nearest batch.global that works is {batches}"
            + (f"; worlds that work are {worlds}" if worlds else ""),
        )
    return global_batch // passes


def _shards_per_process(config: Config, world: int) -> int:
    """Return the number of shards of each process in exact mode; each shard is one pass."""
    global_batch, shards = config.batch.global_, config.exact.shards
    passes = world * config.batch.accumulate
    if global_batch % shards or shards % world or shards < passes:
        works = [n for n in range(passes, global_batch + 1) if global_batch % n == 0 and n % world == 0]
        nearest = sorted(sorted(works, key=lambda n: abs(n - shards))[:6])
        worlds = f"worlds that work are {near_divisors(shards, world)}"
        raise RequestError(
            f"exact.shards={shards} does not divide batch.global={global_batch} among"
            f" {count_of(world, 'process', 'es')} with batch.accumulate={config.batch.accumulate}",
            f"exact.shards that work are {', '.join(map(str, nearest))}" if works else worlds,
        )
    return shards // world


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


def _schedule(config: Config, data: DataSize, passes: int) -> Schedule:
    """Return the schedule. passes: forward passes per update, over all processes."""
    options, global_batch = config.schedule, config.batch.global_
    if data.train_images < global_batch:
        largest = data.train_images // passes * passes
        remedy = f"set batch.global to at most {largest}"
        raise RequestError(
            f"data has {data.train_images:,} images to train, fewer than batch.global={global_batch}",
            remedy if largest else f"{passes} passes need at least one image each",
        )
    steps_per_epoch = data.train_images // global_batch
    total = config.train.epochs * steps_per_epoch
    steps = partial(_steps, steps_per_epoch, total)
    warmup, cooldown = steps(options.warmup), steps(options.cooldown)
    if warmup + cooldown > total:
        raise RequestError(
            f"schedule.warmup={options.warmup} and schedule.cooldown={options.cooldown} are together"
            f" longer than the whole training of {total:,} steps ({config.train.epochs} epochs)",
            "make it shorter",
        )
    return Schedule(
        steps_per_epoch=steps_per_epoch,
        total_steps=total,
        last_step=min(total, config.train.max_steps or total),
        peak_lr=config.optimizer.lr * global_batch / 256,
        schedule=options.name,
        warmup_steps=warmup,
        decay_steps=total - warmup - cooldown,
        final_lr_fraction=options.final_lr_fraction,
        drop_steps=max(1, steps(options.every)),
        gamma=options.gamma,
        evaluate_every=max(1, steps(config.evaluate.every)),
        checkpoint_every=max(1, steps(config.checkpoint.every)),
        log_every=max(1, steps(config.track.every)),
        watch_every=max(1, steps(config.run.watch)) if config.run.watch else 0,
        unfreeze_step=max(1, steps(config.model.freeze_until)) if config.model.freeze_until else 0,
        patience=config.train.patience or 0,
    )


def _steps(steps_per_epoch: int, total_steps: int, duration: Duration) -> int:
    unit = {"epochs": steps_per_epoch, "steps": 1, "%": total_steps / 100}[duration.unit]
    return round(duration.amount * unit)


def _image_sizes(config: Config, schedule: Schedule) -> ImageSizes:
    """Return the sizes of images. Raises RequestError if their growth does not end in time."""
    options, first_size = config.augment, config.augment.first_size or config.augment.size
    steps = partial(_steps, schedule.steps_per_epoch, schedule.total_steps)
    grows_from, grows_until = (steps(when) / schedule.steps_per_epoch for when in options.growth)
    if first_size < options.size and not grows_from <= grows_until < config.train.epochs:
        raise RequestError(
            f"augment.growth=[{options.growth[0]}, {options.growth[1]}] is from epoch {grows_from:g} to"
            f" {grows_until:g} of {config.train.epochs}",
            "let the growth end no earlier than it starts, and before the training ends",
        )
    return ImageSizes(
        image_size=options.size,
        first_size=first_size,
        grows_from=grows_from,
        grows_until=grows_until,
        eval_size=config.evaluate.size or options.size,
        repeats=options.repeats,
    )


def near_divisors(number: int, near: int) -> str:
    """Return the six divisors of `number` that are nearest to `near`, ascending, as text."""
    divisors = {n for i in range(1, math.isqrt(number) + 1) if number % i == 0 for n in (i, number // i)}
    return ", ".join(map(str, sorted(sorted(divisors, key=lambda n: abs(n - near))[:6])))


def request_digest(config: Config, world: World) -> str:
    """Return a SHA-256 that identifies a request: its configuration and its number of processes.

    `run.resume` is left out: it says from where to resume, not what to train.
    """
    fields = config.model_dump_json(exclude={"run": {"resume"}})
    return hashlib.sha256(f"{fields} {world.size} {world.local_size}".encode()).hexdigest()
