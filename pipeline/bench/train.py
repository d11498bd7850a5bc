"""`pipeline bench`: throughput, always beside what it is compared with, in interleaved rounds.

A figure on a shared machine says little; a ratio of medians from rounds that alternate says what our code costs.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import group as groups
from pipeline import randomness
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.data.batch import Batch
from pipeline.data.loader import TrainBatches, batches
from pipeline.data.sources import open_source
from pipeline.data.transfer import to_device
from pipeline.device import choose_device
from pipeline.errors import TemporaryError
from pipeline.files import atomic_write
from pipeline.group import Group
from pipeline.guards.nonfinite import watch_losses
from pipeline.guards.stragglers import start_pace, start_watch
from pipeline.model.architectures import Normalise, build
from pipeline.parallel import Strategy, choose
from pipeline.parallel.strategy import autocast
from pipeline.plan import Plan, make_plan
from pipeline.record import sender
from pipeline.record.folder import RunFolder
from pipeline.record.journal import Journal
from pipeline.record.terminal import NullTerminal
from pipeline.telemetry.mfu import NullEfficiency, measure_efficiency
from pipeline.telemetry.timing import Clock, Waiting, start_clock
from pipeline.train.metrics import Report
from pipeline.train.state import TrainState
from pipeline.train.step import Step
from pipeline.world import from_environment

DEFAULTS = [
    "data.source=synthetic", "data.num_images=4096", "model.arch=resnet18", "augment.size=64", "batch.global=64",
    "train.epochs=1000", "track.uri=none",
]  # fmt: skip


_COMPILED = "-compiled"


@dataclass
class _Loop:
    """Steps, and what they take of a GPU's memory."""

    run: Callable[[int], None]
    held: int
    """Bytes at rest: weights, moments."""
    above: int = 0
    """The most that its steps took besides."""

    @classmethod
    def built(cls, device: torch.device, build: Callable[..., Callable[[int], None]], *arguments: Any) -> "_Loop":
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        run = build(*arguments)
        return cls(run, torch.cuda.memory_allocated(device) - before if device.type == "cuda" else 0)


def bench_train(overrides: list[str], rounds: int, steps: int, *, as_json: bool) -> str:
    """Images/s of our training step, loader, checks and reports included, against the barest torch loop.

    The barest loop has the same model, batch, optimizer and device, and one batch in memory: forward, backward, update,
    and nothing else. Rows: `reference` is that loop; `torchvision` is the one of torchvision's references, which asks the
    device for three figures after each step; `plain` is ours with the same batch in memory, so that the ratio is what the
    loop itself costs; `loaded` is ours fed by its loader, which on a CPU takes its time from the same cores.
    Where the plan compiles, each is there once more, compiled; their ratio is to the compiled reference, whose own is to
    the eager one.
    """
    config = load("digits", [*DEFAULTS, *overrides])
    plan, alone, data = _prepare(config)
    device, batch = alone.device, _first(data, alone.device)
    loops: dict[str, _Loop] = {}
    with TemporaryDirectory() as folder:
        for kind, one in (("", replace(plan, compiles=False)), *([(_COMPILED, plan)] if plan.compiles else [])):
            loaded = to_device(batches(data, range(10**6), plan, pin=device.type == "cuda"), device)
            loops[f"reference{kind}"] = _Loop.built(device, _barest_loop, config, one, alone, batch)
            loops[f"torchvision{kind}"] = _Loop.built(device, _torchvision_loop, config, one, alone, batch)
            for name, fed in (("plain", repeat(batch)), ("loaded", loaded)):
                journal = _journal(Path(folder) / f"{name}{kind}.jsonl")
                loops[f"{name}{kind}"] = _Loop.built(device, _our_loop, config, one, alone, fed, journal)
        speeds = _interleave(loops, plan.global_batch, rounds, steps, device)
    title = f"{_title(config, plan)}, {device}"
    efficiency = measure_efficiency(config, plan.num_classes, plan.world, device)
    remarks = {name: _remark(plan, loop, statistics.median(speeds[name]), efficiency) for name, loop in loops.items()}
    return _answer(speeds, title, rounds, steps, remarks, as_json=as_json)


def bench_track(overrides: list[str], rounds: int, steps: int, *, as_json: bool) -> str:
    """Images/s of our training step, one batch in memory, with tracking and without. TemporaryError if MLflow lacks a row.

    Rows: `reference` reports nothing. `tracked` reports as a run does, every `track.every`: sums, a row of the journal, and
    beside it the sender, to a database of its own or to the server that `track.uri` or MLFLOW_TRACKING_URI names. The
    sender is there in both loops' turns; in the reference's it finds at most the last half a second's rows to send.
    Beside the ratio, which a noisy machine blurs, stands what the two of them took themselves.
    """
    config = load("digits", [*DEFAULTS, "track.uri=auto", "track.required=true", "track.experiment=bench", *overrides])
    plan, alone, data = _prepare(config)
    batch = _first(data, alone.device)
    with TemporaryDirectory() as scratch:
        folder = RunFolder(Path(scratch) / "bench")
        folder.path.mkdir()
        atomic_write(folder.config, config.to_yaml().encode())
        journal = _journal(folder.journal)
        tracker = sender.start(config, folder)
        tracker.wait_ready()
        silent = replace(plan, report_every=plan.last_step)
        clock = start_clock(alone.device)
        loops = {
            "reference": _Loop.built(alone.device, _our_loop, config, silent, alone, repeat(batch), None),
            "tracked": _Loop.built(alone.device, _our_loop, config, plan, alone, repeat(batch), journal, clock),
        }
        before = tracker.cpu_seconds()
        speeds = _interleave(loops, plan.global_batch, rounds, steps, alone.device)
        of_sender = tracker.cpu_seconds() - before
        if not tracker.finish(lambda _: None):
            raise TemporaryError("MLflow did not take everything, so this is not what tracking costs: try again")
    title = f"{_title(config, plan)}, a report every {plan.report_every} steps, {alone.device}"
    of_loop = clock.seconds["tracking"] / (rounds + 1) / steps
    share = of_sender / sum(plan.global_batch * steps / speed for speed in speeds["tracked"])
    remarks = {"tracked": f"   {1000 * of_loop:.2f} ms a step in the loop, {share:.1%} of a CPU in the sender"}
    return _answer(speeds, title, rounds, steps, remarks, as_json=as_json)


def bench_comm(overrides: list[str], rounds: int, steps: int, *, as_json: bool) -> str:
    """Images/s of the whole job with each way that gradients can meet, one batch in memory, in the processes of one group.

    Rows: `reference` is DistributedDataParallel (in one process: no exchange), `exact` is exact mode, which makes more and
    smaller passes besides sending more.
    """
    place = from_environment()
    config = load("digits", [*DEFAULTS, "exact.shards=16", *overrides, "run.exact=false"])
    exact = load("digits", [*DEFAULTS, "exact.shards=16", *overrides, "run.exact=true"])
    randomness.configure_torch(
        deterministic=False, precision=config.train.precision, threads=max(1, place.cpus // place.local_size)
    )
    device = choose_device(config, place)
    group = groups.start(config, place, device)
    source = open_source(config)
    loops = {}
    with TemporaryDirectory() as folder:
        for name, one in (("reference", config), ("exact", exact)):
            plan = make_plan(one, place, source.size)
            batch = _first(TrainBatches(source.train, one, plan, group.rank), device)
            journal = _journal(Path(folder) / f"{name}.jsonl")
            loops[name] = _Loop(_our_loop(one, plan, group, repeat(batch), journal), 0)
        speeds = _interleave(loops, config.batch.global_, rounds, steps, device)
    title = f"{_title(config, plan)}, {place.size} processes, {exact.exact.shards} shards, {device}"
    group.finish()
    return _answer(speeds, title, rounds, steps, {}, as_json=as_json)


def _prepare(config: Config) -> tuple[Plan, Group, TrainBatches]:
    """What the loops of one process want: torch's switches set, a device, data."""
    place = from_environment()
    randomness.configure_torch(
        deterministic=config.is_deterministic, precision=config.train.precision, threads=place.cpus
    )
    group = groups.start(config, place, choose_device(config, place))
    source = open_source(config)
    plan = make_plan(config, place, source.size)
    return plan, group, TrainBatches(source.train, config, plan, group.rank)


def _first(data: TrainBatches, device: torch.device) -> Batch:
    """One batch, on the device already: to bring it there is no part of a step that is compared without its loader."""
    return next(to_device(iter([data[0]]), device))


def _journal(path: Path) -> Journal:
    return Journal(path, lambda _: None)


def _remark(plan: Plan, loop: _Loop, speed: float, efficiency: NullEfficiency) -> str:
    figures = efficiency.figures(speed, plan.image_size)
    parts = [f"{1000 * plan.global_batch / speed:,.1f} ms a step"]
    parts += [f"MFU {figures['time/mfu']:.1%}"] if figures else []
    parts += [f"{(loop.held + loop.above) / 2**30:.1f} GiB"] if loop.held else []
    return "".join(f"   {part}" for part in parts)


def _title(config: Config, plan: Plan) -> str:
    return f"{config.model.arch}, {config.augment.size} px, batch {plan.global_batch}, {config.train.precision}"


def _answer(
    speeds: dict[str, list[float]], title: str, rounds: int, steps: int, remarks: dict[str, str], *, as_json: bool
) -> str:
    """Rows for people or machines; ratios are to the row `reference` of the same round, of its kind."""

    def base(name: str) -> list[float]:
        is_other = name.endswith(_COMPILED) and not name.startswith("reference")
        return speeds["reference" + _COMPILED * is_other]

    ratios = {name: [a / b for a, b in zip(speeds[name], base(name), strict=True)] for name in speeds}
    rows = [
        {
            "name": name,
            "images_per_s": round(statistics.median(speeds[name]), 1),
            "ratio": round(statistics.median(ratios[name]), 4),
            "pixel_diff": 0.0,
        }
        for name in speeds
    ]
    if as_json:
        return json.dumps({"rows": rows})
    lines = [f"{title}; {rounds} interleaved rounds of {steps} steps, medians"]
    for row in rows:
        spread = ratios[str(row["name"])]
        lines.append(
            f"  {row['name']:<18} {row['images_per_s']:>10,.1f} images/s   ratio {row['ratio']:.3f}"
            f" ({min(spread):.3f} to {max(spread):.3f}){remarks.get(str(row['name']), '')}"
        )
    return "\n".join(lines)


def _barest_loop(config: Config, plan: Plan, group: Group, batch: Batch) -> Callable[[int], None]:
    update = _plain_update(config, plan, group, batch)

    def run(steps: int) -> None:
        for _ in range(steps):
            update()

    return run


def _torchvision_loop(config: Config, plan: Plan, group: Group, batch: Batch) -> Callable[[int], None]:
    """What `train_one_epoch` in torchvision's references/classification/train.py adds to each step: accuracies and loss,
    read from the device at once."""
    update = _plain_update(config, plan, group, batch)
    labels = batch.labels.to(group.device)
    sums = [0.0, 0.0, 0.0]

    def run(steps: int) -> None:
        for _ in range(steps):
            loss, logits = update()
            with torch.inference_mode():
                right = logits.topk(min(5, logits.shape[1])).indices.t() == labels
                figures = [loss, *(right[:k].flatten().sum(dtype=torch.float32) * (100 / len(labels)) for k in (1, 5))]
            for at, figure in enumerate(figures):
                sums[at] += figure.item()

    return run


def _plain_update(config: Config, plan: Plan, group: Group, batch: Batch) -> Callable[[], tuple[Tensor, Tensor]]:
    """Forward, backward, update: the loss and the logits."""
    device = group.device
    model = build(config.model, plan.num_classes).to(device)
    runs = torch.compile(model, dynamic=False) if plan.compiles else model
    optimizer = TrainState.build(Strategy(model, group, plan), config).optimizer
    images = Normalise(device, channels_last=config.model.channels_last)(batch.images)
    labels = batch.labels.to(device)

    def update() -> tuple[Tensor, Tensor]:
        with autocast(device, config):
            logits = runs(images)
            loss = functional.cross_entropy(logits, labels, label_smoothing=config.train.label_smoothing)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss, logits

    return update


def _our_loop(
    config: Config,
    plan: Plan,
    group: Group,
    fed: Iterator[Batch],
    journal: Journal | None,
    clock: Clock | None = None,
) -> Callable[[int], None]:
    """The body of train/loop.py's loop: every part of a step that is neither an evaluation nor a save."""
    model: nn.Module = build(config.model, plan.num_classes).to(group.device)
    strategy = choose(config, plan, model, group)
    state = TrainState.build(strategy, config)
    clock = clock or start_clock(group.device)
    step = Step(state, strategy, config, plan, clock)
    losses = watch_losses(strategy)
    waiting = Waiting(fed, clock)
    pace = start_pace(strategy, clock, lambda _: None)
    watch = start_watch(strategy, plan)
    report = Report(plan, group, NullTerminal(), clock, pace, NullEfficiency(), journal, None)

    def run(steps: int) -> None:
        for _ in range(steps):
            pace.start()
            loss, used = step.forward_backward(waiting)
            with clock.on("communication"):
                group.any_rank(False, losses.look(state.step + 1, loss, used), any(one.defects for one in used))
            with clock.on("optimizer"):
                step.update(losses.guard)
            with clock.on("tracking"):
                report.updated(state)
            watch.updated(state.step)

    return run


def _interleave(
    loops: dict[str, _Loop], images: int, rounds: int, steps: int, device: torch.device
) -> dict[str, list[float]]:
    """Images/s of each loop in each round, the loops taking turns; a round before the first is not counted."""
    speeds: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(rounds + 1):
        names = list(loops) if number % 2 else list(reversed(loops))  # who comes second finds warmer caches
        for name in names:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
                at_rest = torch.cuda.memory_allocated(device)
            start = time.perf_counter()
            loops[name].run(steps)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                loops[name].above = torch.cuda.max_memory_allocated(device) - at_rest
            if number:
                speeds[name].append(images * steps / (time.perf_counter() - start))
    return speeds
