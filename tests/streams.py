"""The data stream of a whole group, made in one process: the ranks one after another."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.data.batch import Batch
from pipeline.data.loader import TrainBatches, batches
from pipeline.data.sources import Source, open_source
from pipeline.group import Group
from pipeline.guards.nonfinite import make_loss_guard
from pipeline.guards.signals import StopRequest
from pipeline.guards.watchdog import Watchdog
from pipeline.model.architectures import build
from pipeline.parallel import choose_strategy
from pipeline.plan import Plan, make_plan
from pipeline.randomness import seed_network
from pipeline.record.terminal import NullTerminal
from pipeline.telemetry.profiler import NullProfiler
from pipeline.telemetry.timing import StepTimer
from pipeline.train.records import NullRecords
from pipeline.train.state import TrainState
from pipeline.train.trainer import Trainer
from pipeline.world import World


@dataclass(frozen=True)
class GlobalBatch:
    """What one update sees."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]
    pixels: str
    """Digest over all pixels."""
    trace: str
    """Digest over the digests of its samples, as trace.jsonl has it."""
    mix: str
    """Digest over how its images are mixed."""


def prepare(root: Path, world: int, *overrides: str) -> tuple[Config, Plan, Source]:
    config = load("digits", [f"data.root={root}", "batch.global=48", "run.trace=true", *overrides])
    source = open_source(config)
    return config, make_plan(config, World(size=world, local_size=world, cpus=2), source.size), source


def make_trainer(root: Path, *overrides: str) -> Trainer:
    """Return a trainer of one process on the CPU that records nothing."""
    config, plan, source = prepare(root, 1, *overrides)
    seed_network(0, "weights")
    strategy = choose_strategy(config, plan, build(config.model, 10), Group(World(), torch.device("cpu")))
    timer = StepTimer()
    state = TrainState.build(strategy, make_loss_guard(strategy, timer), config)
    return Trainer.build(
        config, plan, state, source, NullRecords(), NullTerminal(), timer=timer, stop=StopRequest(),
        watchdog=Watchdog(300, Path(os.devnull), 0), profiler=NullProfiler(),
    )  # fmt: skip


def stream(root: Path, steps: range, *overrides: str, world: int = 1) -> tuple[list[GlobalBatch], set[tuple[int, str]]]:
    """The global batches of `steps`, and every defect that any process met."""
    config, plan, source = prepare(root, world, *overrides)
    positions = range(steps.start * plan.accumulate, steps.stop * plan.accumulate)
    ranks = []
    for rank in range(world):
        ranks.append(list(batches(TrainBatches(source.train, config, plan, rank), positions, plan, pin=False)))
        assert len(ranks[-1]) == len(positions)
    made = []
    for step in range(len(steps)):
        passes = [one for rank in ranks for one in rank[step * plan.accumulate : (step + 1) * plan.accumulate]]
        made.append(joined(passes))
    return made, {defect for rank in ranks for one in rank for defect in one.defects}


def joined(passes: list[Batch]) -> GlobalBatch:
    return GlobalBatch(
        ids=tuple(sample for one in passes for sample in one.ids.tolist()),
        labels=tuple(label for one in passes for label in one.labels.tolist()),
        pixels=hashlib.sha256(b"".join(one.images.numpy().tobytes() for one in passes)).hexdigest(),
        mix=hashlib.sha256(b"".join(one.mix.numpy().tobytes() for one in passes)).hexdigest(),
        trace=hashlib.sha256(b"".join(one.digests.numpy().tobytes() for one in passes)).hexdigest(),
    )
