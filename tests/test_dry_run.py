"""Every recipe, precision and strategy trains on a fake CUDA device, one step behind its host.

The cases run in one process, which has a library loaded before torch:
`LD_PRELOAD=… python tests/test_dry_run.py NAME …` prints a line of JSON for each.
"""

import json
import os
import shutil
import subprocess
import sys
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import fake_cuda
import pytest
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

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None, reason="the fake CUDA device needs a C compiler (cc)"
)

UPDATES = 2
GPUS = 8
IMAGENET = DataSize(1_281_167, 50_000, 1000)
COMMON = (
    "batch.global=32", "data.source=synthetic", f"data.num_images={IMAGENET.train_images}", "data.workers=0",
    "evaluate.batch=4", "train.compile=off", "track.uri=none", "track.every=1 step",
    f"run.watch={UPDATES + 1} steps",
)  # fmt: skip
READABLE = {"Group.all_reduce": 0.0, "all_finite": 1.0, "DeviceLossGuard._read": 0.0, "Metrics.report": 0.0}
"""The functions in which the host may wait, and the value that it reads there."""


class Case(NamedTuple):
    request: str
    gpus: int = 1
    nodes: int = 1


CASES = {f"recipe {name}": Case(name, GPUS) for name in recipe_names()} | {
    "recipe vit-l16": Case("vit-l16 model.arch=vit_s_16", GPUS),  # a quarter of the time
    **{f"precision {name}": Case(f"digits train.precision={name}") for name in ("fp32", "tf32", "bf16")},
    "precision fp16": Case("digits train.precision=fp16 train.clip=1 optimizer.name=adamw"),
    "compilation that does not repay": Case("digits train.compile=auto"),
    "graph": Case(
        "digits train.compile=reduce-overhead augment.mixup=0.2 train.ema=0.9 train.clip=1"
        " train.class_weights=balanced train.precision=fp16 optimizer.name=adamw"
    ),
    "mixed": Case("digits augment.mixup=0.2 augment.cutmix=1 train.loss=bce model.channels_last=true"),
    "frozen": Case("digits model.init=DEFAULT model.freeze=backbone train.precision=fp16"),
    "ddp": Case("digits batch.accumulate=2 train.ema=0.99 train.clip=1 train.exchange=bf16", GPUS),
    "fsdp": Case("digits parallel=fsdp batch.accumulate=2 train.ema=0.99 train.clip=1", GPUS),
    "fsdp bf16": Case("digits parallel=fsdp train.precision=bf16 optimizer.name=adamw", GPUS),
    "fsdp, two nodes": Case(
        "digits parallel=fsdp fsdp.shard=node optimizer.name=adamw train.clip=1", GPUS, nodes=2
    ),
    "resident": Case("cifar10-96 data.num_images=64 train.max_steps=none"),
    "exact": Case("digits run.exact=true exact.shards=16", GPUS),
    "lamb": Case("digits optimizer.name=lamb"),
    "muon": Case("digits optimizer.name=muon"),
}
QUICK = {
    "recipe digits", "precision fp16", "graph", "compilation that does not repay", "mixed",
    "frozen", "ddp", "fsdp", "resident", "exact", "muon",
}  # fmt: skip
"""The cases that run without --full: each strategy, and each way in which an update may differ."""


class FakeGroup(Group):
    """A group of processes of which this one runs: it sends nothing, and receives ones."""

    def all_reduce(self, counts: Tensor) -> Tensor:
        super().all_reduce(counts)
        return torch.ones(counts.shape, dtype=counts.dtype)


class LocalDDP(nn.Module):
    """DistributedDataParallel without its reducer, which is C++ and reads the gradients."""

    no_sync = nullcontext

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, pixels: Tensor) -> Tensor:
        return self.module(pixels)

    def register_comm_hook(self, state: object, hook: object) -> None: ...


def run(case: Case, updates: list[str], evaluation: list[str]) -> None:
    """Evaluate, as a run that resumes before an evaluation does, train, report, and save.

    The functions in which the host waits for the device are appended to the lists.
    """
    device = torch.device("cuda", 0)
    world = World(size=case.gpus, local_size=case.gpus // case.nodes, cpus=16, has_gpu=True)
    recipe, *words = case.request.split()
    config = load(recipe, [*COMMON, *words])
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
        with cuda.watch(evaluation):
            trainer.evaluator.evaluate(0, process.terminal, process.asked_to_stop)
        with cuda.watch(updates):
            for _ in range(UPDATES):
                loop.update_once(trainer, stream)
        loop.update_once(trainer, stream)  # after which a comparison of the weights is due
        loop.save(trainer, is_last=True)
        assert fake_cuda.FakeGraph.replays == (UPDATES if "reduce-overhead" in case.request else 0)
        fake_cuda.FakeGraph.replays = 0


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    fake_cuda.install()
    torch.compile = lambda function, **_: function  # type: ignore[assignment]
    ddp.DistributedDataParallel = LocalDDP  # type: ignore[misc, assignment]
    loader.pin_batch = lambda batch: batch  # a tensor of the host cannot be pinned without a GPU
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=GPUS)
    for name in names:
        updates: list[str] = []
        evaluation: list[str] = []
        error = ""
        try:
            run(CASES[name], updates, evaluation)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        print(json.dumps({name: [error, updates, evaluation]}), flush=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, full: bool) -> dict[str, list[Any]]:
    library = tmp_path_factory.mktemp("library") / "fake_cuda.so"
    source = Path(__file__).with_name("fake_cuda.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    env = {**os.environ, "LD_PRELOAD": str(library), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, __file__, *(name for name in CASES if full or name in QUICK)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[Any]] = {}
    for line in done.stdout.splitlines():
        found |= json.loads(line) if line.startswith("{") else {}
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in CASES]
)
def test_an_update_waits_only_for_the_loss_and_the_report_of_the_one_before(
    results: dict[str, Any], name: str
) -> None:
    error, updates, evaluation = results[name]
    assert error == ""
    # each update is reported: the first after the second, without asking for the second's loss
    assert updates == ["DeviceLossGuard._read"] * UPDATES + ["Metrics.report"]
    assert evaluation == ["Group.all_reduce"], "once at the end"


if __name__ == "__main__":
    main(sys.argv[1:])
