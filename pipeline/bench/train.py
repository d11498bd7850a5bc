"""`pipeline bench train`, `track` and `comm`: the speed of our training loop against others."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import repeat
from multiprocessing import active_children
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import group as groups
from pipeline import randomness, supervision
from pipeline.bench.rounds import Loop, Row, interleave, show
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.data.batch import Batch
from pipeline.data.loader import TrainBatches, batches
from pipeline.data.sources import Source, open_source
from pipeline.data.transfer import to_device
from pipeline.device import choose_device
from pipeline.errors import RequestError, TemporaryError
from pipeline.files import atomic_write
from pipeline.group import Group
from pipeline.guards.nonfinite import make_loss_guard
from pipeline.guards.signals import StopRequest
from pipeline.guards.watchdog import Watchdog
from pipeline.model.architectures import Normalise, build
from pipeline.parallel import choose_strategy
from pipeline.parallel.strategy import autocast, compile_mode
from pipeline.plan import Plan, make_plan
from pipeline.record import sender
from pipeline.record.folder import RunFolder
from pipeline.record.journal import Journal
from pipeline.record.terminal import NullTerminal
from pipeline.telemetry.mfu import MfuMeter, make_mfu_meter
from pipeline.telemetry.timing import StepTimer, make_timer
from pipeline.train.job import Job, Process
from pipeline.train.listener import Listener, Update
from pipeline.train.loop import update_once
from pipeline.train.optimizer import make_optimizer
from pipeline.train.records import Records
from pipeline.train.state import TrainState
from pipeline.train.trainer import Trainer
from pipeline.world import from_environment

_DEFAULTS = [
    "data.source=synthetic", "data.num_images=4096", "model.arch=resnet18", "augment.size=64", "batch.global=64",
    "train.epochs=1000", "track.uri=none",
]  # fmt: skip
LOOPS = ("reference", "torchvision", "timm", "plain", "loaded")
COMPILED = "-compiled"
"""End of the name of a row whose model is compiled."""


def bench_train(overrides: list[str], rounds: int, steps: int, *, only: list[str] | None = None, as_json: bool) -> str:
    """Return images/s of our training loop against a minimal torch loop and two known scripts.

    Rows:

    - `reference`: the minimal loop. Forward, backward and update with the same model, optimizer and
      device, on one batch in memory.
    - `torchvision`, `timm`: the loops of these projects' training scripts, with the same batch.
    - `plain`: our loop, checks and metrics included, with the same batch in memory. Its ratio is
      what the loop itself costs.
    - `loaded`: our loop with our data loader, which on a CPU uses the same cores.

    If the plan compiles the model, each row appears once more, compiled. Their ratios refer to the
    compiled reference, and its own ratio to the eager reference if that is compared.

    only: names of rows to compare; their references are compared, too. Raises RequestError if the
    plan does not compile a model that `only` names.
    """
    config = load("digits", [*_DEFAULTS, *overrides])
    plan, group, source = prepare(config, deterministic=config.is_deterministic_on_gpus)
    if not plan.compiles and any(name.endswith(COMPILED) for name in only or ()):
        raise RequestError(
            f"--only {' '.join(only or ())}: nothing is compiled here ({plan.compile_reason}): leave the rows that end"
            f" in {COMPILED} out, or set train.compile=on"
        )
    batch = _batch_on_device(TrainBatches(source.train, config, plan, group.rank), group.device)
    timed = partial(Loop, group.device, plan.global_batch, steps)
    rows: list[Row] = []
    loops: list[Loop] = []
    reference = None
    with TemporaryDirectory() as folder:
        for compiles in (False, True) if plan.compiles else (False,):
            variant, suffix = replace(plan, compiles=compiles), COMPILED if compiles else ""
            chosen = [name for name in LOOPS if not only or name + suffix in only]
            for name in dict.fromkeys(["reference", *chosen] if chosen else []):
                journal = Path(folder) / f"{name}{suffix}.jsonl"
                match name:
                    case "loaded":
                        loops.append(_LoadedLoop(config, variant, group, source, steps, journal))
                    case "plain":
                        loops.append(timed(_our_step, config, variant, group, source, repeat(batch), journal))
                    case _:
                        build_step = {"torchvision": _torchvision_step, "timm": _timm_step}.get(name, _plain_step)
                        loops.append(timed(build_step, config, variant, group, batch))
                rows.append(Row(f"{name}{suffix}", loops[-1], reference))
                if name == "reference":
                    reference = rows[-1]
        interleave(rows, rounds, show_progress=True)
    efficiency = make_mfu_meter(config, plan.num_classes, plan.world, group.device)
    for row, loop in zip(rows, loops, strict=True):
        row.remark = _remark(plan, loop, median(row.speeds), efficiency)
        if isinstance(loop, _LoadedLoop) and row.reference:
            row.remark += f"   {loop.describe(median(row.reference.speeds))}"
    return show(_title(config, plan, str(group.device), rounds, steps), rows, as_json=as_json)


def bench_track(overrides: list[str], rounds: int, steps: int, *, as_json: bool) -> str:
    """Return images/s of our training loop, with one batch in memory, with and without tracking.

    Rows: `reference` reports no metrics. `tracked` reports like a run, each `track.every`: it sums
    the metrics and writes a row of the journal, which the sender process sends to MLflow, to a
    temporary database or to the server that `track.uri` or MLFLOW_TRACKING_URI names. The sender
    also runs during the turns of `reference`, when it has at most the rows of the last half second
    left to send. The ratio is imprecise on a noisy machine, so the time that journal and sender
    take is also measured directly.

    Raises TemporaryError if MLflow lacks a row.
    """
    config = load("digits", [*_DEFAULTS, "track.uri=auto", "track.required=true", "track.experiment=bench", *overrides])
    plan, group, source = prepare(config, deterministic=config.is_deterministic_on_gpus)
    batch = _batch_on_device(TrainBatches(source.train, config, plan, group.rank), group.device)
    timed = partial(Loop, group.device, plan.global_batch, steps)
    with TemporaryDirectory() as scratch:
        folder = RunFolder(Path(scratch) / "bench")
        folder.path.mkdir()
        atomic_write(folder.config, config.to_yaml().encode())
        silent = replace(plan, log_every=plan.last_step)
        timer = make_timer(group.device)
        reference = Row("reference", timed(_our_step, config, silent, group, source, repeat(batch)))
        loop = timed(_our_step, config, plan, group, source, repeat(batch), folder.journal, timer)
        tracked = Row("tracked", loop, reference)
        tracker = sender.start(config, folder)  # after the loop has made the journal
        if tracker is None:
            raise RequestError("there is nothing to measure with track.uri=none: leave it out")
        tracker.wait_until_ready()
        before = tracker.cpu_seconds()
        interleave([reference, tracked], rounds)
        sender_seconds = tracker.cpu_seconds() - before
        if not tracker.close(lambda _: None):
            raise TemporaryError("MLflow did not receive every row, so the result would be wrong: try again")
    seconds_per_step = timer.seconds["tracking"] / (rounds + 1) / steps
    sender_share = sender_seconds / sum(plan.global_batch * steps / speed for speed in tracked.speeds)
    tracked.remark = f"{1000 * seconds_per_step:.2f} ms per step in the loop, {sender_share:.1%} of a CPU in the sender"
    details = f"metrics every {plan.log_every} steps, {group.device}"
    return show(_title(config, plan, details, rounds, steps), [reference, tracked], as_json=as_json)


def bench_comm(overrides: list[str], rounds: int, steps: int, *, as_json: bool) -> str:
    """Return images/s of the whole job for each kind of gradient exchange.

    All rows run in the processes of one group, with one batch in memory. `reference` is
    DistributedDataParallel (one process exchanges nothing). `exact` is exact mode, which makes more
    and smaller passes and also sends more.
    """
    words = [*_DEFAULTS, "exact.shards=16", *overrides]
    config, exact = load("digits", [*words, "run.exact=false"]), load("digits", [*words, "run.exact=true"])
    _, group, source = prepare(config, deterministic=False)
    world = from_environment()
    rows: list[Row] = []
    with TemporaryDirectory() as folder:
        for name, variant in (("reference", config), ("exact", exact)):
            plan = make_plan(variant, world, source.size)
            batch = _batch_on_device(TrainBatches(source.train, variant, plan, group.rank), group.device)
            parts = variant, plan, group, source, repeat(batch), Path(folder) / f"{name}.jsonl"
            loop = Loop(group.device, plan.global_batch, steps, _our_step, *parts)
            rows.append(Row(name, loop, rows[0] if rows else None))
        interleave(rows, rounds)
    group.shutdown()
    details = f"{world.size} processes, {exact.exact.shards} shards, {group.device}"
    return show(_title(config, plan, details, rounds, steps), rows, as_json=as_json)


def prepare(config: Config, *, deterministic: bool) -> tuple[Plan, Group, Source]:
    """Configure torch for this process; return its plan, group and source."""
    world = from_environment()
    threads = max(1, world.cpus // world.local_size)
    randomness.configure_torch(deterministic=deterministic, precision=config.train.precision, threads=threads)
    group = groups.start(config, world, choose_device(config, world))
    source = open_source(config)
    return make_plan(config, world, source.size), group, source


def _batch_on_device(data: TrainBatches, device: torch.device) -> Batch:
    """Return the first batch, already on the device, so that no step includes the copy."""
    return next(to_device(iter([data[0]]), device))


def _remark(plan: Plan, loop: Loop, speed: float, efficiency: MfuMeter) -> str:
    parts = [f"{1000 * plan.global_batch / speed:,.1f} ms per step"]
    metrics = efficiency.metrics(speed, plan.image_size)
    if metrics:
        parts.append(f"MFU {metrics['time/mfu']:.1%}")
    if loop.resident_bytes:
        parts.append(f"{(loop.resident_bytes + loop.step_bytes) / 2**30:.1f} GiB")
    return "   ".join(parts)


def _title(config: Config, plan: Plan, details: str, rounds: int, steps: int) -> str:
    model = f"{config.model.arch}, {config.augment.size} px, batch {plan.global_batch}, {config.train.precision}"
    return f"{model}, {details}; {rounds} interleaved rounds of {steps} steps"


def _torchvision_step(config: Config, plan: Plan, group: Group, batch: Batch) -> Callable[[], None]:
    """Return the step of torchvision's script, with the flags that make it fastest.

    `train_one_epoch` in references/classification/train.py (torchvision 0.26) reads the loss and
    two accuracies from the device in each step. The script has flags for neither bf16,
    channels-last nor torch.compile; here it gets what the configuration says.
    """
    update = _plain_step(config, plan, group, batch, is_fused=False)
    labels = batch.labels.to(group.device)
    sums = [0.0, 0.0, 0.0]

    def run_step() -> None:
        loss, logits = update()
        with torch.inference_mode():
            correct = logits.topk(min(5, logits.shape[1])).indices.t() == labels
            percent = [correct[:k].flatten().sum(dtype=torch.float32) * (100 / len(labels)) for k in (1, 5)]
        for i, metric in enumerate([loss, *percent]):
            sums[i] += metric.item()

    return run_step


def _timm_step(config: Config, plan: Plan, group: Group, batch: Batch) -> Callable[[], None]:
    """Return the step of timm's script with --amp, --channels-last and --torchcompile.

    `train_one_epoch` in train.py (timm 1.0) reads the loss from the device in each step.
    """
    update = _plain_step(config, plan, group, batch, is_fused=False)
    losses: list[float] = []

    def run_step() -> None:
        loss, _ = update()
        losses.append(loss.item())

    return run_step


def _plain_step(
    config: Config, plan: Plan, group: Group, batch: Batch, *, is_fused: bool = True
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that makes forward, backward and update, and returns loss and logits.

    is_fused: use our optimizer; otherwise SGD as torch makes it by default, as the scripts do.
    """
    device, precision = group.device, config.train.precision
    model = build(config.model, plan.num_classes).to(device)
    network = torch.compile(model, dynamic=False, mode=compile_mode(config.train)) if plan.compiles else model
    optimizer = make_optimizer(model, config) if is_fused else _default_sgd(model, config)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    images = Normalise(device, channels_last=config.model.channels_last)(batch.images)
    labels = batch.labels.to(device)

    def update() -> tuple[Tensor, Tensor]:
        with autocast(device, precision):
            logits = network(images)
            loss = functional.cross_entropy(logits, labels, label_smoothing=config.train.label_smoothing)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss, logits

    return update


def _default_sgd(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    options = config.optimizer
    return torch.optim.SGD(
        model.parameters(), options.lr, options.momentum, weight_decay=options.weight_decay, nesterov=options.nesterov
    )


def _our_step(
    config: Config, plan: Plan, group: Group, source: Source, stream: Iterator[Batch], journal: Path | None = None,
    timer: StepTimer | None = None,
) -> Callable[[], object]:  # fmt: skip
    """Return a function that makes one update, by the loop's own `update_once`."""
    model: nn.Module = build(config.model, plan.num_classes).to(group.device)
    strategy = choose_strategy(config, plan, model, group)
    timer = timer or make_timer(group.device)
    state = TrainState.build(strategy, make_loss_guard(strategy, timer, config.start_again), config)
    stop = StopRequest()
    watchdog = Watchdog(config.run.timeout, Path(os.devnull), group.rank, stop)
    process = Process(group, NullTerminal(), timer, watchdog, stop)
    job = Job(config, plan, source, RunFolder(config.run_dir))
    trainer = Trainer(job, process, state, Records([ToJournalOnly(journal)] if journal else []))
    return partial(update_once, trainer, stream)


class _LoadedLoop(Loop):
    """Our loop with our data loader in its steady state.

    The loader's workers live for one turn, so that they take no CPU from the other rows. A turn
    first trains, untimed, on as many batches as the loader can hold ready. After that, batches are
    ready only if the loader is faster than the loop. Workers make a batch each, and so finish
    several at about the same time: a turn has a whole number of batches of each worker.
    """

    def __init__(self, config: Config, plan: Plan, group: Group, source: Source, steps: int, journal: Path) -> None:
        workers = max(1, plan.workers)
        self._plan, self._data = plan, TrainBatches(source.train, config, plan, group.rank)
        self._loader: Iterator[Batch] = iter(())
        self._timer = make_timer(group.device)
        self._costs: list[tuple[float, float]] = []
        """The share of waiting for data, and the workers' CPU seconds per image, in each turn."""
        steps = -(-steps // workers) * workers
        arguments = config, plan, group, source, self._stream(), journal, self._timer
        super().__init__(group.device, plan.global_batch, steps, _our_step, *arguments)

    def __call__(self) -> float:
        loader = batches(self._data, range(10**6), self._plan, pin=self._device.type == "cuda")
        self._loader = to_device(loader, self._device)
        try:
            for _ in range(self._plan.workers * self._plan.prefetch + 2):
                self._run_step()
            waited, cpu_seconds = self._timer.seconds["data"], _workers_cpu_seconds()
            speed = super().__call__()
            images = self._images * self._steps
            share = (self._timer.seconds["data"] - waited) * speed / images
            self._costs.append((share, (_workers_cpu_seconds() - cpu_seconds) / images))
        finally:
            loader.close()
        return speed

    def _stream(self) -> Iterator[Batch]:
        while True:
            yield next(self._loader)

    def describe(self, speed: float) -> str:
        """Return the wait for data, and the cores that the loader needs for `speed` images/s."""
        share, seconds = (median(costs) for costs in zip(*self._costs, strict=True))
        cores = f"{seconds * speed:.1f} cores for {speed:,.0f} images/s"
        return f"waits for data {share:.0%}, {1000 * seconds:.2f} ms of a core per image: {cores}"


def _workers_cpu_seconds() -> float:
    return sum(supervision.cpu_seconds(process.pid) for process in active_children() if process.pid)


class ToJournalOnly(Listener):
    """Writes metrics to a journal."""

    def __init__(self, path: Path) -> None:
        self._journal = Journal(path, lambda _: None)

    def stepped(self, update: Update) -> None:
        if update.metrics:
            self._journal.log_metrics(update.step, update.metrics)
