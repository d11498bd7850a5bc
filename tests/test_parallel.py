"""fsdp and stages have the checkpoints, weights and predictions of DDP; all ranks skip overflows.

With `model.batchnorm=average` batch norm's running statistics are the mean over the processes, and
with `sync` each process normalises with those of all.
"""

import copy
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import harness
import pytest
import torch
from harness import SLOW, Job, MakeJob, Result, assert_resumes, before_each, plan_of, quick, refused
from torch import nn
from torchvision import models
from torchvision.models.convnext import CNBlockConfig

from pipeline.addons.models.functions import meta_model
from pipeline.addons.models.trained import weights_digest
from pipeline.addons.shard.dataparallel import AutocastModel
from pipeline.addons.shard.fsdp import FSDPStrategy
from pipeline.addons.shard.partition import StageModule, remove_layers, split_into_stages
from pipeline.config.load import load
from pipeline.config.sections import Model
from pipeline.group import Group
from pipeline.model.architectures import build
from pipeline.parallel.ddp import synchronise_batch_norm
from pipeline.world import World

COMMON = ("batch.accumulate=2", "train.clip=0.5", "train.ema=0.9", "model.channels_last=true")
FSDP = ("parallel=fsdp", *COMMON)
STAGES = ("parallel=stages", *COMMON, "augment.mixup=0.2")


def words(digits: Path, *more: str) -> list[str]:
    return ["digits", f"data.root={digits}", *SLOW, "train.max_steps=12", "evaluate.every=6 steps",
            "checkpoint.every=4 steps", *more]  # fmt: skip


def make_fsdp(group: Group, *words: str) -> FSDPStrategy:
    config, plan = plan_of("parallel=fsdp", *words, size=group.world.size)
    return FSDPStrategy(config, plan, build(config.model, 10), group)


@pytest.mark.full
@pytest.mark.parametrize("mode", [FSDP, pytest.param(STAGES, marks=pytest.mark.long)], ids=["fsdp", "stages"])
def test_a_resumed_run_has_the_same_weights_and_checkpoints_of_the_whole_model(
    tmp_path: Path, digits: Path, mode: tuple[str, ...]
) -> None:
    run = assert_resumes(tmp_path, words(digits, *mode), 6)
    evaluated = quick("evaluate", str(run.folder)).done  # in one process
    expected = harness.DONE.match(run.output())
    assert evaluated["weights"] == expected["weights"]
    assert abs(float(evaluated["top1"]) - float(expected["top1"])) <= 1 / 120
    contents = run.contents()
    assert evaluated["weights"] == weights_digest(contents["average"]) != weights_digest(contents["model"])
    whole = build(load("digits", list(SLOW)).model, 10).state_dict()
    for part in ("model", "average"):
        assert list(contents[part]) == list(whole)
        assert contents[part]._metadata == whole._metadata, "and with the versions of its modules"


@pytest.mark.long
@pytest.mark.parametrize("parallel", ["parallel=fsdp fsdp.shard=node train.clip=0.5", "parallel=stages"])
def test_a_run_in_parts_resumes_at_other_world_sizes(tmp_path: Path, digits: Path, parallel: str) -> None:
    start: Callable[[Job], Result] = harness.two_nodes if "fsdp" in parallel else Job.run_in_forks
    arguments = words(digits, *parallel.split(), "train.ema=0.9")
    expected = start(Job(tmp_path / "uninterrupted", arguments, nproc=4)).done
    run = Job(tmp_path / "run", [*arguments, "train.max_steps=6"], nproc=4)
    assert start(run).done["step"] == "6"
    run.arguments.pop()
    assert start(run).done == expected, "a resume has the same bits"
    sizes = ((15, 2), (18, 1), (21, 2)) if "fsdp" in parallel else ((15, 2), (18, 4))
    for step, run.nproc in sizes:  # a checkpoint has all weights
        run.arguments.append(f"train.max_steps={step}")
        assert run.run_in_forks().done["step"] == str(step)


def test_slices_within_a_machine_need_the_ranks_of_a_machine() -> None:
    for local_size, hosts in ((1, ["a", "a", "b", "b"]), (2, ["a", "b", "a", "b"])):
        group = Group(World(size=4, local_size=local_size), torch.device("cpu"))
        group.hosts = hosts
        line = refused(partial(make_fsdp, group, "fsdp.shard=node"))
        assert re.match(f"fsdp.shard=node needs .* not ranks on {', '.join(hosts)}", line)


def test_stages_that_do_not_divide_are_refused_with_values_that_work() -> None:
    for wrong, says in (
        (["stages.count=3"], "worlds that work are 3, 6"),
        (["stages.micro_batches=7"], "the nearest that work are 2, 3, 4, 6, 8, 12"),
        (["stages.count=4", "stages.micro_batches=2"], "is less than"),
    ):
        line = refused(partial(plan_of, "parallel=stages", *wrong, size=4))
        assert (says in line, wrong[-1] in line) == (True, True), line
    _, made = plan_of("parallel=stages", "batch.accumulate=2", size=4)
    assert (made.stages, made.micro_batch, made.micro_batches, made.bn_batch) == (2, 12, 4, 6)


def test_a_replica_in_its_own_thread_has_the_precision_of_training() -> None:
    replica, images = AutocastModel(nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 8, 8)

    def dtype(is_enabled: bool) -> torch.dtype:
        with torch.autocast("cpu", enabled=is_enabled):  # as in torch.nn.parallel.parallel_apply
            return replica(images, torch.float16).dtype

    with ThreadPoolExecutor() as threads:
        assert [*threads.map(dtype, (True, False))] == [torch.float16, torch.float32]


SMALL_MODELS: dict[str, Callable[[], nn.Module]] = {
    arch: partial(build, Model(arch=arch), 10)
    for arch in ("resnet18", "mobilenet_v2", "mobilenet_v3_small", "shufflenet_v2_x0_5", "regnet_y_400mf")
} | {
    "vit": partial(models.VisionTransformer, 64, 16, num_layers=4, num_heads=2, hidden_dim=32, mlp_dim=64),
    "swin": partial(models.SwinTransformer, [4, 4], 24, [1, 2], [2, 2], [4, 4]),
    "convnext": partial(models.ConvNeXt, [CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 1)]),
}


@pytest.mark.parametrize("arch", SMALL_MODELS)
def test_the_stages_in_sequence_are_the_model_and_send_contiguous_tensors(arch: str) -> None:
    torch.manual_seed(0)
    model = SMALL_MODELS[arch]().eval()
    images = torch.randn(2, 3, 64, 64)
    stages = split_into_stages(model, arch, 3, 64)
    found: list[str] = []
    for stage in range(3):
        part = copy.deepcopy(model)
        for other in {0, 1, 2} - {stage}:
            remove_layers(part, stages[other])
        assert any(True for _ in part.parameters())
        found += part.state_dict()
    assert sorted(found) == sorted(model.state_dict()), "each weight is in exactly one stage"
    for layout in (torch.contiguous_format, torch.channels_last):
        x = images.to(memory_format=layout)
        expected = model.to(memory_format=layout)(x)
        for layers in stages:
            x = x.detach().requires_grad_()
            output = StageModule(model, layers)(x)
            # as torch.distributed.pipelining does
            (gradient,) = torch.autograd.grad(output.square().sum(), x)
            assert output.is_contiguous(), "only contiguous tensors can be sent"
            assert gradient.is_contiguous()
            x = output
        assert layout == torch.channels_last or torch.equal(x, expected)


def test_stages_cost_about_the_same_and_no_more_than_there_are_layers() -> None:
    def split(arch: str, count: int, size: int) -> list[int]:
        """Return the number of blocks of a ResNet in each stage."""
        stages = split_into_stages(meta_model(Model(arch=arch), 1000), arch, count, size)
        return [sum(name.startswith("layer") for layer in stage for name in layer.owns) for stage in stages]

    assert split("resnet50", 4, 224) == [4, 4, 4, 4]
    line = refused(partial(split, "resnet18", 13, 64))
    assert re.match("stages.count=13 is too large for resnet18: .* at most 11", line)
    line = refused(partial(split, "squeezenet1_0", 2, 64))
    assert line.startswith("parallel=stages cannot split model.arch=squeezenet1_0: ")


@pytest.mark.usefixtures("alone")
def test_fsdp_predicts_before_it_trains_and_with_the_average_as_it_is_now() -> None:
    group, images = Group(World(), torch.device("cpu")), torch.randn(4, 3, 32, 32)
    strategy = make_fsdp(group, SLOW[-1], "train.ema=0.9")
    with torch.inference_mode():
        assert not strategy.make_predictor(strategy.model)(images).requires_grad
    with strategy.gradient_sync(0):
        strategy.forward(images).sum().backward()  # type: ignore[no-untyped-call]
    assert all(param.grad is not None for param in strategy.model.parameters())

    average = strategy.make_ema().eval()
    shards = list(average.fc.parameters())  # type: ignore[union-attr]
    predict = strategy.make_predictor(average)
    before = predict(images)
    with torch.no_grad():
        for shard in shards:
            shard.mul_(0.5)
    assert torch.allclose(predict(images), 0.5 * before), "not as it was gathered"


def test_all_processes_refuse_a_save_if_a_buffer_is_not_finite(job: MakeJob) -> None:
    prelude = before_each(
        "pipeline.train.loop.save",
        "buffers = words[0].state.model.named_buffers()",
        "first = next(buffer for name, buffer in buffers if 'running_var' in name)",
        "if os.environ['RANK'] == '1': first.fill_(float('inf'))",
    )
    run = job("parallel=fsdp", "train.max_steps=2", "run.timeout=20", nproc=2, prelude=prelude)
    result = run.run_in_forks()
    refusals = result.err.count("weights are not finite at step 2: not saved")
    assert (result.code, refusals) == (3, 1), result.err
    assert not list((run.folder / "checkpoints").iterdir())


def test_fp16_skips_overflows_on_all_ranks_and_resumes_bit_identically(tmp_path: Path) -> None:
    words = ["digits", *SLOW[:-1], "data.source=synthetic", "data.num_images=480", "data.workers=0",
             "train.precision=fp16", "train.clip=1", "train.epochs=1", "run.watch=1 steps"]  # fmt: skip
    contents = assert_resumes(tmp_path, words, 5).contents()
    assert 0 < contents["scaler"]["scale"] < 2.0**16, "an overflow has lowered the scale"
    weights = [tensor for tensor in contents["model"].values() if tensor.is_floating_point()]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights)


def test_averaged_batch_norm_statistics_equal_those_of_the_global_batch(job: MakeJob) -> None:
    words = ("train.max_steps=2", "data.workers=0", "run.deterministic=false", "train.ema=0.5")
    found = []
    for nproc, kind in ((1, "local"), (2, "average"), (2, "local")):
        run = job(*words, "checkpoint.every=1 steps", f"model.batchnorm={kind}", nproc=nproc)
        assert run.run_in_forks().code == 0
        found.append(run.contents(1))  # before any evaluation
    for part in ("model", "average"):
        # The first batch norm: its input does not depend on other statistics.
        name = next(name for name in found[0][part] if name.endswith("running_mean"))
        whole, averaged, local = (contents[part][name] for contents in found)
        torch.testing.assert_close(averaged, whole, rtol=0, atol=1e-6)
        assert (local - whole).abs().max() > 1e-4


@pytest.mark.parametrize("arch", ["timm/regnety_002", "shufflenet_v2_x0_5"])
def test_synchronised_batch_norm_keeps_weights_and_activations(arch: str) -> None:
    model = build(Model(arch=arch), 10).eval()
    images = torch.randn(2, 3, 64, 64)
    expected, layers = model(images), sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    weights = weights_digest(model.state_dict())
    synchronise_batch_norm(model)
    assert sum(isinstance(module, nn.SyncBatchNorm) for module in model.modules()) == layers > 0
    assert torch.equal(model(images), expected)
    assert weights_digest(model.state_dict()) == weights
