"""Train and evaluate on a fake CUDA device.

Usage: LD_PRELOAD=… python tests/dry_run.py [NAME …]. Each case prints a line of JSON: its
name, the functions in which the host waited for the device in the updates and in the
evaluation, and the error that ended it.
"""

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import fake_cuda
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipeline.addons.datasets.resident_images import load_images
from pipeline.addons.datasets.sources import open_source
from pipeline.addons.datasets.synthetic import SyntheticImages
from pipeline.config.load import load, recipe_names
from pipeline.data import loader, transfer
from pipeline.data.loader import TrainBatches, batches
from pipeline.device import make_timer
from pipeline.group import Group
from pipeline.guards.signals import StopRequest
from pipeline.guards.watchdog import Watchdog
from pipeline.parallel import ddp
from pipeline.plan import DataSize
from pipeline.planning import make_plan
from pipeline.record.folder import RunFolder
from pipeline.record.terminal import SILENT
from pipeline.train import loop, session
from pipeline.train.job import Job, Process
from pipeline.train.loop import Trainer
from pipeline.train.records import Records
from pipeline.world import World

UPDATES = 2
GPUS = 8
IMAGENET = DataSize(1_281_167, 50_000, 1000)
COMMON = (
    "batch.global=32", "data.source=synthetic", f"data.num_images={IMAGENET.train_images}", "data.workers=0",
    "evaluate.batch=4", "train.compile=off", "track.uri=none", f"track.every={UPDATES + 1} steps",
    f"run.watch={UPDATES + 1} steps",
)  # fmt: skip
READABLE = {"Group.all_reduce": 0.0, "all_finite": 1.0, "DeviceLossGuard._was_bad": 0.0}
"""The functions in which the host may wait, and the value that it reads there."""


@dataclass(frozen=True)
class Case:
    recipe: str
    words: tuple[str, ...] = ()
    gpus: int = 1
    nodes: int = 1


@dataclass
class Result:
    name: str
    updates: list[str] = field(default_factory=list)
    evaluation: list[str] = field(default_factory=list)
    error: str = ""


SMALLER = {"vit-l16": ("model.arch=vit_s_16",)}  # a quarter of the time
CASES = {
    **{f"recipe {name}": Case(name, SMALLER.get(name, ()), GPUS) for name in recipe_names()},
    **{
        f"precision {name}": Case("digits", (f"train.precision={name}",)) for name in ("fp32", "tf32", "bf16")
    },
    "precision fp16": Case("digits", ("train.precision=fp16", "train.clip=1", "optimizer.name=adamw")),
    "compilation that does not repay": Case("digits", ("train.compile=auto",)),
    "mixed": Case(
        "digits", ("augment.mixup=0.2", "augment.cutmix=1", "train.loss=bce", "model.channels_last=true")
    ),
    "frozen": Case("digits", ("model.init=DEFAULT", "model.freeze=backbone", "train.precision=fp16")),
    "ddp": Case(
        "digits", ("batch.accumulate=2", "train.ema=0.99", "train.clip=1", "train.exchange=bf16"), GPUS
    ),
    "fsdp": Case("digits", ("parallel=fsdp", "batch.accumulate=2", "train.ema=0.99", "train.clip=1"), GPUS),
    "fsdp bf16": Case("digits", ("parallel=fsdp", "train.precision=bf16", "optimizer.name=adamw"), GPUS),
    "fsdp, two nodes": Case(
        "digits", ("parallel=fsdp", "fsdp.shard=node", "optimizer.name=adamw", "train.clip=1"), GPUS, nodes=2
    ),
    "resident": Case("cifar10-96", ("data.num_images=64", "train.max_steps=none")),
    "exact": Case("digits", ("run.exact=true", "exact.shards=16"), GPUS),
    "lamb": Case("digits", ("optimizer.name=lamb",)),
    "muon": Case("digits", ("optimizer.name=muon",)),
}


class FakeGroup(Group):
    """A group of processes of which this one runs: it sends nothing, and receives ones."""

    def all_reduce(self, counts: Tensor) -> Tensor:
        super().all_reduce(counts)
        return torch.ones(counts.shape, dtype=counts.dtype)


class LocalDDP(nn.Module):
    """DistributedDataParallel without its reducer, which is C++ and reads the gradients."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, pixels: Tensor) -> Tensor:
        logits: Tensor = self.module(pixels)
        return logits

    def register_comm_hook(self, state: object, hook: object) -> None:
        pass

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield


def run(case: Case, result: Result) -> None:
    """Evaluate, as a run that resumes before an evaluation does, train, report, and save."""
    device = torch.device("cuda", 0)
    world = World(size=case.gpus, local_size=case.gpus // case.nodes, cpus=16, has_gpu=True)
    config = load(case.recipe, [*COMMON, *case.words])
    source = open_source(config)
    assert isinstance(source.val, SyntheticImages)
    source = replace(source, val=replace(source.val, count=10))
    size = replace(IMAGENET, train_images=config.data.num_images, num_classes=config.data.num_classes)
    plan = make_plan(config, world, size)
    with FakeTensorMode(allow_non_fake_inputs=True), fake_cuda.FakeCuda(READABLE) as cuda:
        stop = StopRequest()
        watchdog = Watchdog(300, Path(os.devnull), 0, stop)
        process = Process(FakeGroup(world, device), SILENT, make_timer(device), watchdog, stop)
        job = Job(config, plan, source, RunFolder(config.run_dir))
        job, state = session.build_state(job, process, None, is_resumed=config.model.init is not None)
        plan = job.plan
        trainer = Trainer(job, process, state, Records())
        data = TrainBatches(source.train, config, plan, rank=0)
        resident = None
        if not plan.not_resident:
            resident = load_images(data, config, device, process.terminal.log, lambda: False)
        maker = resident.draws if resident else data
        stream = transfer.to_device(batches(maker, range(100), plan, pin=False), device)
        stream = resident.augment(stream) if resident else stream
        with cuda.watch(result.evaluation):
            trainer.evaluator.evaluate(0, process.terminal, process.asked_to_stop)
        with cuda.watch(result.updates):
            for _ in range(UPDATES):
                loop.update_once(trainer, stream)
        loop.update_once(trainer, stream)  # after which a report and a comparison of the weights are due
        loop.save(trainer, is_last=True)


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    fake_cuda.install()
    ddp.DistributedDataParallel = LocalDDP  # type: ignore[misc, assignment]
    loader.pin_batch = lambda batch: batch  # a tensor of the host cannot be pinned without a GPU
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=GPUS)
    for name in names or CASES:
        result = Result(name)
        try:
            run(CASES[name], result)
        except Exception as error:
            result.error = f"{type(error).__name__}: {error}"
        print(json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
