"""Make the data stream of all ranks in one process, one rank after another."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.addons.datasets.resident_images import load_images
from pipeline.addons.datasets.sources import open_source
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.data.batch import Batch
from pipeline.data.interface import Source
from pipeline.data.loader import TrainBatches, batches
from pipeline.group import Group
from pipeline.guards.signals import StopRequest
from pipeline.guards.watchdog import Watchdog
from pipeline.plan import Plan
from pipeline.planning import make_plan
from pipeline.record.folder import RunFolder
from pipeline.record.terminal import SILENT
from pipeline.timing import StepTimer
from pipeline.train.job import Job, Process
from pipeline.train.loop import Trainer
from pipeline.train.records import Records
from pipeline.train.session import build_state
from pipeline.world import World


@dataclass(frozen=True)
class GlobalBatch:
    """One optimizer step's samples, over all ranks and passes; `trace` is as in trace.jsonl."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]
    pixels: str
    trace: str
    mix: str


def prepare(root: Path, world: int, *overrides: str) -> tuple[Config, Plan, Source]:
    """Return configuration, plan and data source of the digits recipe for `world` processes."""
    config = load("digits", [f"data.root={root}", "batch.global=48", "run.trace=true", *overrides])
    source = open_source(config)
    return config, make_plan(config, World(size=world, local_size=world, cpus=2), source.size), source


def train_batches(root: Path, *overrides: str) -> TrainBatches:
    """Return the batches of one process, each made when it is asked for."""
    config, plan, source = prepare(root, 1, *overrides)
    return TrainBatches(source.train, config, plan, 0)


def make_trainer(root: Path, *overrides: str) -> Trainer:
    """Return a trainer of one process on the CPU that records nothing."""
    config, plan, source = prepare(root, 1, *overrides)
    group, stop = Group(World(), torch.device("cpu")), StopRequest()
    process = Process(group, SILENT, StepTimer(), Watchdog(300, Path(os.devnull), 0, stop), stop)
    job = Job(config, plan, source, RunFolder(config.run_dir))
    job, state = build_state(job, process, None, is_resumed=False)
    return Trainer(job, process, state, Records())


def stream(
    root: Path, steps: range, *overrides: str, world: int = 1
) -> tuple[list[GlobalBatch], set[tuple[int, str]]]:
    """Return the global batches of `steps` and all image defects that any rank found."""
    config, plan, source = prepare(root, world, *overrides)
    count = plan.accumulate
    positions = range(steps.start * count, steps.stop * count)
    ranks = []
    for rank in range(world):
        data = TrainBatches(source.train, config, plan, rank)
        if config.data.resident == "on":
            resident = load_images(data, config, torch.device("cpu"), print, lambda: False)
            ranks.append(list(resident.augment(batches(resident.draws, positions, plan, pin=False))))
        else:
            ranks.append(list(batches(data, positions, plan, pin=False)))
    made = [
        joined([batch for rank in ranks for batch in rank[first : first + count]])
        for first in range(0, len(positions), count)
    ]
    return made, {defect for rank in ranks for batch in rank for defect in batch.defects}


def joined(passes: list[Batch]) -> GlobalBatch:
    """Join the batches of all ranks and passes into one global batch."""

    def digest(tensors: Iterator[torch.Tensor]) -> str:
        return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()

    return GlobalBatch(
        ids=tuple(sample for batch in passes for sample in batch.ids.tolist()),
        labels=tuple(label for batch in passes for label in batch.labels.tolist()),
        pixels=digest(batch.images for batch in passes),
        mix=digest(batch.mix for batch in passes),
        trace=digest(batch.digests for batch in passes),
    )
