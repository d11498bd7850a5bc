"""Compare our training loop with a minimal torch loop and with those of torchvision and timm.

  python benchmarks/loop.py model.arch=resnet50 augment.size=224 train.precision=bf16
  torchrun --nproc-per-node 2 benchmarks/loop.py --only plain run.exact=true

Rows, all with the same model, batch and device:

  reference          forward, backward and update, on one batch in memory
  torchvision, timm  the loops of these projects' scripts, with the same batch
  plain              our loop, checks and metrics included, with the same batch
  loaded             our loop with our data loader, which on a CPU uses the same cores

Of several processes only our loop exchanges gradients. If the plan compiles the model, each row
appears once more, compiled. Their ratios refer to the compiled reference, and its own ratio to the
eager one.
"""

import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from statistics import median

import torch
from rounds import Row, Turn, add_size, interleave, run_script, show, workers_cpu_seconds
from torch import nn
from torch.nn import functional

from pipeline.addons.datasets.sources import open_source
from pipeline.cli.arguments import Parser, add_overrides
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.data.batch import Batch
from pipeline.data.interface import Source
from pipeline.data.loader import TrainBatches, batches
from pipeline.data.transfer import to_device
from pipeline.device import choose_device, make_timer
from pipeline.group import Group
from pipeline.guards.nonfinite import make_loss_guard
from pipeline.guards.signals import StopRequest
from pipeline.guards.watchdog import Watchdog
from pipeline.launcher import this_world
from pipeline.model.architectures import build
from pipeline.model.normalise import Normalise
from pipeline.operate.start import form_group
from pipeline.operate.torch_settings import configure_torch
from pipeline.parallel import choose_strategy
from pipeline.parallel.strategy import autocast
from pipeline.plan import Plan
from pipeline.planning import make_plan
from pipeline.record.folder import RunFolder
from pipeline.record.terminal import SILENT
from pipeline.train.job import Job, Process
from pipeline.train.listener import Listener
from pipeline.train.loop import Trainer, update_once
from pipeline.train.optimizer import make_optimizer
from pipeline.train.records import Records
from pipeline.train.state import TrainState

DEFAULTS = ["data.source=synthetic", "data.num_images=4096", "model.arch=resnet18", "augment.size=64",
            "batch.global=64", "train.epochs=1000", "track.uri=none"]  # fmt: skip
LOOPS = ("reference", "torchvision", "timm", "plain", "loaded")


@dataclass(frozen=True)
class Setup:
    """What the loops of a comparison have in common."""

    config: Config
    plan: Plan
    group: Group
    source: Source

    def data(self) -> TrainBatches:
        return TrainBatches(self.source.train, self.config, self.plan, self.group.rank)

    def first_batch(self) -> Batch:
        """Return the first batch, already on the device, so that no step includes the copy."""
        return next(to_device(iter([self.data()[0]]), self.group.device))

    def title(self) -> str:
        config, plan = self.config, self.plan
        model = f"{config.model.arch}, {config.augment.size} px, batch {plan.global_batch}"
        return f"{model}, {config.train.precision}, {plan.world} × {self.group.device.type}"


def prepare(config: Config) -> Setup:
    """Configure torch for this process and open the data."""
    world = this_world()
    configure_torch(
        deterministic=config.is_deterministic_on_gpus, precision=config.train.precision,
        threads=max(1, world.cpus // world.local_size),
    )  # fmt: skip
    group = form_group(config, world, choose_device(config, world))
    source = open_source(config)
    return Setup(config, make_plan(config, world, source.size), group, source)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(setup: Setup, steps: int, run_step: Callable[[], object]) -> Callable[[], float]:
    """Return a turn: it runs `steps` steps and returns images/s."""
    device = setup.group.device

    def turn() -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(steps):
            run_step()
        synchronize(device)
        return setup.plan.global_batch * steps / (time.perf_counter() - start)

    return turn


def make_update(setup: Setup, *listeners: Listener) -> Callable[[Iterator[Batch]], object]:
    """Return the function that makes one update of our loop from a stream of batches."""
    config, plan, group = setup.config, setup.plan, setup.group
    model: nn.Module = build(config.model, plan.num_classes).to(group.device)
    strategy = choose_strategy(config, plan, model, group)
    timer = make_timer(group.device)
    state = TrainState.build(strategy, make_loss_guard(strategy, timer, config.start_again), config)
    stop = StopRequest()
    watchdog = Watchdog(config.run.timeout, Path(os.devnull), group.rank, stop)
    process = Process(group, SILENT, timer, watchdog, stop)
    job = Job(config, plan, setup.source, RunFolder(config.run_dir))
    return partial(update_once, Trainer(job, process, state, Records(list(listeners))))


def plain_step(setup: Setup, batch: Batch, script: str = "") -> Callable[[], None]:
    """Return a function that makes forward, backward and update.

    script: do what `train_one_epoch` of that project does in a step. In train.py (timm 1.0) it
    reads the loss from the device, in references/classification/train.py (torchvision 0.26) also
    two accuracies. Both have torch's default SGD, and precision, memory format and compilation of
    the configuration.
    """
    config, plan, device = setup.config, setup.plan, setup.group.device
    options, precision = config.optimizer, config.train.precision
    model = build(config.model, plan.num_classes).to(device)
    mode = "reduce-overhead" if config.train.compile == "reduce-overhead" else None
    network = torch.compile(model, dynamic=False, mode=mode) if plan.compiles else model
    optimizer = torch.optim.SGD(
        model.parameters(), options.lr, options.momentum,
        weight_decay=options.weight_decay, nesterov=options.nesterov,
    ) if script else make_optimizer(model, config)  # fmt: skip
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    images = Normalise(device, config.model)(batch.images)
    labels = batch.labels.to(device)
    sums = [0.0, 0.0, 0.0]

    def run_step() -> None:
        with autocast(device, precision):
            logits = network(images)
            loss = functional.cross_entropy(logits, labels, label_smoothing=config.train.label_smoothing)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        metrics = [loss] if script else []
        if script == "torchvision":
            with torch.inference_mode():
                correct = logits.topk(min(5, logits.shape[1])).indices.t() == labels
                share = 100 / len(labels)
                metrics += [correct[:k].flatten().sum(dtype=torch.float32) * share for k in (1, 5)]
        for i, metric in enumerate(metrics):
            sums[i] += metric.item()

    return run_step


def make_loaded_turn(setup: Setup, steps: int) -> Turn:
    """Return a turn of our loop with our data loader in its steady state.

    The loader's workers live for one turn, so that they take no CPU from the other rows. A turn
    first trains, untimed, on as many batches as the loader can hold ready. Workers make a batch
    each, so several are ready at about the same time: a turn has a whole number of each worker's.
    """
    plan, device = setup.plan, setup.group.device
    workers = max(1, plan.workers)
    steps = -(-steps // workers) * workers
    data, update = setup.data(), make_update(setup)

    def turn() -> tuple[float, float]:
        with closing(batches(data, range(10**6), plan, pin=device.type == "cuda")) as loader:
            run_step = partial(update, to_device(loader, device))
            for _ in range(plan.workers * plan.prefetch + 2):
                run_step()
            before = workers_cpu_seconds()
            speed = timed(setup, steps, run_step)()
            return speed, (workers_cpu_seconds() - before) / (plan.global_batch * steps)

    return turn


def compare(options: Namespace) -> str:
    config = load("digits", [*DEFAULTS, *options.overrides])
    setup = prepare(config)
    batch = setup.first_batch()
    rows: list[Row] = []
    reference = None
    suffixes = ["", "-compiled"] if setup.plan.compiles else [""]
    for suffix in suffixes[-1:] if options.compiled else suffixes:
        variant = replace(setup, plan=replace(setup.plan, compiles=bool(suffix)))
        for name in LOOPS:
            if name == "reference" or name in (options.only or LOOPS):
                turn = _make_turn(name, variant, options.steps, batch)
                rows.append(Row(f"{name}{suffix}", turn, reference))
            if name == "reference":
                reference = rows[-1]
    interleave(rows, options.rounds)
    setup.group.shutdown()
    for row in rows:
        row.remark = f"{1000 * setup.plan.global_batch / median(row.speeds):,.1f} ms per step"
    return show(setup.title(), rows, options)


def _make_turn(name: str, setup: Setup, steps: int, batch: Batch) -> Turn:
    match name:
        case "loaded":
            return make_loaded_turn(setup, steps)
        case "plain":
            return timed(setup, steps, partial(make_update(setup), repeat(batch)))
        case _:
            return timed(setup, steps, plain_step(setup, batch, "" if name == "reference" else name))


if __name__ == "__main__":
    parser = Parser(description=__doc__)
    add_overrides(parser)
    add_size(parser)
    help = f"compare only this row and the reference (repeat it for more): {', '.join(LOOPS)}"
    parser.add_argument("--compiled", action="store_true", help="only the compiled rows, if there are any")
    parser.add_argument("--only", action="append", choices=LOOPS, metavar="ROW", help=help)
    run_script(parser, compare, has_ranks=True)
