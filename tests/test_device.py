"""Requests that depend on GPUs are checked on a machine without one."""

import os
import re
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from fake_cuda import GLOO_FOR_NCCL
from harness import environment, in_ranks, plan_of, refused

from pipeline import device, machine
from pipeline.addons.ops.model import check_model_builds
from pipeline.config.load import load
from pipeline.device import choose_device
from pipeline.errors import RequestError
from pipeline.operate import request, start
from pipeline.operate.start import form_group
from pipeline.world import World

DETERMINISTIC, EXACT = "run.deterministic=true", "run.exact=true"


@pytest.mark.parametrize(
    ("visible", "hides"),
    [("1,0", False), ("GPU-8932f937", False), ("", True), ("-1", True), ("NoDevFiles", True)],
)
def test_gpus_that_the_environment_hides_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, hides: bool
) -> None:
    (tmp_path / "nvidia0").touch()  # the device file of a GPU
    monkeypatch.setattr(machine, "_DEVICES", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    here = World(has_gpu=machine.has_gpu())
    assert here.has_gpu != hides
    if hides:
        assert choose_device(load("digits", []), here) == torch.device("cpu")
        line = refused(lambda: request.check_device(load("digits", ["run.device=cuda"]), here))
        assert re.match("run.device=cuda, .*CUDA_VISIBLE_DEVICES", line)


@pytest.mark.parametrize(
    ("words", "size", "algorithm", "is_refused"),
    [(DETERMINISTIC, 2, "NVLS", True), (DETERMINISTIC, 2, "ring,tree", True),
     (DETERMINISTIC, 2, "RING", False), (DETERMINISTIC, 1, "NVLS", False), (EXACT, 2, "NVLS", False),
     (f"{DETERMINISTIC} run.device=cpu", 2, "NVLS", False)],
)  # fmt: skip
def test_an_nccl_algorithm_without_a_fixed_order_is_refused(
    monkeypatch: pytest.MonkeyPatch, words: str, size: int, algorithm: str, is_refused: bool
) -> None:
    monkeypatch.setenv("NCCL_ALGO", algorithm)
    config, group = load("digits", words.split()), World(size=size, local_size=size)
    request.check_device(config, group)
    check = partial(request.check_device, config, replace(group, has_gpu=True))
    if is_refused:
        assert re.match(f"NCCL_ALGO={algorithm} .*{DETERMINISTIC}", refused(check))
    else:
        check()


def test_nccl_has_a_fixed_order_before_the_group_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(start, "form_group", lambda *_: seen.append(os.environ["NCCL_ALGO"]))
    monkeypatch.setenv("NCCL_ALGO", "NVLS")  # as on another node: only rank 0 has checked its own
    for word in ("run.seed=1", EXACT, DETERMINISTIC):
        start.join(load("digits", ["run.device=cpu", word]), World())
    assert seen == ["NVLS", "NVLS", "Ring"]


def check_gradients(arch: str, size: int, words: str = "", *, has_gpu: bool = True) -> None:
    """Make the checks of a start with a model."""
    model = (f"model.arch={arch}", f"augment.size={size}", "batch.global=8")
    config, plan = plan_of(*model, *words.split(), has_gpu=has_gpu)
    check_model_builds(config, plan, World(has_gpu=has_gpu), is_resumed=True)


@pytest.mark.parametrize(
    ("arch", "words", "size"),
    [("alexnet", DETERMINISTIC, 64), ("vgg11", f"{EXACT} exact.shards=4", 64),
     ("vgg11_bn", DETERMINISTIC, 224)],  # 224: the layer does not change the size
)  # fmt: skip
def test_a_gpu_refuses_a_layer_without_a_deterministic_gradient(arch: str, words: str, size: int) -> None:
    line = refused(lambda: check_gradients(arch, size, words))
    assert f"{arch} has the layer AdaptiveAvgPool2d" in line
    check_gradients(arch, size)
    check_gradients(arch, size, f"{words} run.device=cpu")
    check_gradients(arch, size, words, has_gpu=False)
    check_gradients(arch, size, f"{words} model.init=DEFAULT model.freeze=backbone")  # it has no gradient


@pytest.mark.parametrize("arch", ["resnet18", "googlenet", "densenet121", "swin_t", "vit_b_16", "maxvit_t"])
def test_other_models_have_deterministic_gradients(arch: str) -> None:
    check_gradients(arch, 224, DETERMINISTIC)


LAUNCHED = {"RANK": "0", "WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("gpus", "rank", "env", "expected"),
    [(4, 3, LAUNCHED, 3), (4, 3, {**LAUNCHED, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 3),
     (1, 3, {**LAUNCHED, "CUDA_VISIBLE_DEVICES": "3"}, 0), (1, 3, LAUNCHED, None),
     (1, 0, {"CUDA_VISIBLE_DEVICES": "3"}, None)],
)  # fmt: skip
def test_a_process_may_see_all_gpus_or_only_its_own(
    monkeypatch: pytest.MonkeyPatch, gpus: int, rank: int, env: dict[str, str], expected: int | None
) -> None:
    for name, answer in {"is_available": True, "device_count": gpus, "set_device": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(device, "_compute", lambda _: None)
    for name in ("CUDA_VISIBLE_DEVICES", *LAUNCHED):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    choose = partial(choose_device, load("digits", []), World(4, 4, rank, rank, has_gpu=True))
    if expected is None:
        assert refused(choose).startswith(f"4 processes on this machine but {gpus} usable GPUs: start one")
    else:
        assert choose() == torch.device("cuda", expected)


def _join_with_gpu(rank: int, address: str, *uuids: str) -> None:
    """Join a group of two processes, whose GPUs have these UUIDs; exit with the error's code."""
    dist.Backend._plugins["NCCL"] = GLOO_FOR_NCCL
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=uuids[rank])  # type: ignore[assignment, misc]
    code = 0
    try:
        form_group(load("digits", []), World(2, 2, rank, rank, init_method=address), torch.device("cuda", 0))
    except RequestError as error:
        says = r"ranks 0 and 1 use the same GPU \(.+, GPU-0\): start one process per GPU"
        code = error.code if re.match(says, str(error)) and error.is_collective else 1
    dist.all_reduce(torch.zeros(1))  # neither leaves before the other has raised
    os._exit(code)


@pytest.mark.parametrize(("uuids", "code"), [(("GPU-0", "GPU-0"), 2), (("GPU-0", "GPU-1"), 0)])
def test_two_processes_on_one_gpu_are_refused_by_both(uuids: tuple[str, str], code: int) -> None:
    assert in_ranks(_join_with_gpu, 2, *uuids) == [code, code]


@pytest.mark.parametrize(
    ("gpus", "visible", "count"), [(4, None, 4), (4, "0,2", 2), (4, "", 2), (4, "-1", 2), (0, None, 2)]
)
def test_make_train_uses_each_visible_gpu(tmp_path: Path, gpus: int, visible: str | None, count: int) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\nfor i in $(seq {gpus}); do echo GPU $i: a card; done\n")
    smi.chmod(0o755)
    env = environment(PATH=f"{tmp_path}:{os.environ['PATH']}")
    env.pop("CUDA_VISIBLE_DEVICES", None)
    env |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    make = ["make", "-n", "-C", str(Path(__file__).parent.parent), "train"]
    done = subprocess.run(make, env=env, capture_output=True, text=True, check=True)
    assert f"--nproc-per-node {count} " in done.stdout
