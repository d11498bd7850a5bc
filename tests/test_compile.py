"""A compiled run resumes bit for bit; what cannot be compiled is refused, and is no hang.

Dynamo makes one whole graph of each model per image size, and makes it once; the function that
takes the graphs there compiles nothing.
"""

import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch
from harness import SMALL, Job, assert_resumes, plan_of
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor import metrics
from torch._inductor.compile_worker.subproc_pool import SubprocException
from torch._inductor.exc import InductorError

from pipeline.addons.models.compilation import is_fault_of_machine, missing_to_compile, reason_not_to
from pipeline.addons.models.functions import meta_model
from pipeline.config.load import recipe_names
from pipeline.config.sections import Model
from pipeline.group import Group
from pipeline.model.architectures import build
from pipeline.model.loss import Targets
from pipeline.model.normalise import Normalise
from pipeline.parallel.ddp import DDPStrategy
from pipeline.parallel.strategy import Strategy
from pipeline.plan import DataSize, Plan
from pipeline.record.failure import FAILURE
from pipeline.world import World

needs_compiler = pytest.mark.skipif(bool(missing_to_compile()), reason=f"needs {missing_to_compile()}")


@pytest.fixture
def words(digits: Path) -> list[str]:
    return ["digits", f"data.root={digits}", *SMALL, "model.arch=squeezenet1_1", "augment.size=48",
            "optimizer.lr=0.01", "data.workers=0", "train.compile=on"]  # fmt: skip


def compile_with(*body: str) -> str:
    """Return code after which torch compiles graphs with a function of these lines."""
    lines = "".join(f"    {line}\n" for line in body)
    return (
        "import os, signal, time, torch\n"
        f"def compiler(graph, _):\n{lines}"
        "plain = torch.compile\n"
        "torch.compile = lambda module, **options: plain(module, backend=compiler, **options)\n"
    )


@needs_compiler
@pytest.mark.parametrize(
    "more",
    [["train.max_steps=4"],
     pytest.param(["train.max_steps=8", "train.ema=0.9", "batch.accumulate=2"], marks=pytest.mark.full)],
    ids=["by a function", "by inductor"],
)  # fmt: skip
def test_a_compiled_run_resumes_bit_for_bit(tmp_path: Path, words: list[str], more: list[str]) -> None:
    prelude = "" if "train.ema=0.9" in more else compile_with("return graph")
    run = assert_resumes(tmp_path, [*words, *more], 2, nproc=1, prelude=prelude)
    assert "compiled       yes: train.compile=on" in run.log()


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize("channels_last", [False, True])
def test_pixels_are_converted_to_the_same_bits_by_one_kernel(channels_last: bool) -> None:
    images = torch.randint(256, (4, 24, 24, 3), dtype=torch.uint8).permute(0, 3, 1, 2)  # as the loader's
    metrics.generated_kernel_count = 0
    plain, compiled = (
        Normalise(torch.device("cpu"), Model(channels_last=channels_last), compiles=compiles)(images)
        for compiles in (False, True)
    )
    assert metrics.generated_kernel_count == 1
    assert torch.equal(plain, compiled)
    assert plain.stride() == compiled.stride()


@needs_compiler
@pytest.mark.full
def test_a_rank_may_compile_much_longer_than_the_others(tmp_path: Path, words: list[str]) -> None:
    words += ["run.timeout=5", "train.epochs=2", "batch.global=480", "augment.first_size=32",
              "augment.growth=[0 epochs, 1 epochs]"]  # fmt: skip
    slow = ("print('compiling', flush=True)", "time.sleep(7 * int(os.environ['RANK']))", "return graph")
    prelude = compile_with(*slow) + "from pipeline.operate import start\nstart._MARGIN_S = 1\n"
    run = Job(tmp_path / "run", words, nproc=2, prelude=prelude).finished()
    assert run.output().count("compiling") == 12, "each rank, pixels and two parts of the model at two sizes"


@needs_compiler
@pytest.mark.parametrize(
    ("body", "code", "says"),
    [("os.kill(os.getpid(), signal.SIGTERM); raise RuntimeError('it was ended')", 75, "asked to stop before"),
     ("raise OSError(16)", 1, "OSError"),
     ("raise AssertionError", 2, "squeezenet1_1 cannot be compiled: train with train.compile=off")],
)  # fmt: skip
def test_only_a_model_that_cannot_be_compiled_is_a_permanent_failure(
    tmp_path: Path, words: list[str], body: str, code: int, says: str
) -> None:
    run = Job(tmp_path / "run", [*words, "train.max_steps=1"], prelude=compile_with(body))
    result = run.run(code=code)
    assert says in result.err
    assert (run.folder / FAILURE).exists() == (code == 2)
    if code == 2:
        run.prelude = ""
        result = run.run(code=2)
        assert (says in result.err, "creating" in result.err) == (True, False)
        run.arguments.append("train.compile=off")
        run.finished()


@needs_compiler
def test_a_rank_that_cannot_compile_ends_the_others(tmp_path: Path, words: list[str]) -> None:
    prelude = compile_with("assert os.environ['RANK'] == '0', 'no kernel'", "return graph")
    result = Job(tmp_path / "run", words, nproc=2, prelude=prelude).run_in_forks()
    assert (result.code, result.err.count("squeezenet1_1 cannot be compiled: ")) == (2, 1)
    assert "no kernel" in result.error


@pytest.mark.parametrize(
    ("recipe", "pass_s", "queued_s", "reason"),
    [("imagenette", 0.025, 0.01, "it would save about 11 s and take 60 s"), ("resnet50-fast", 1.2, 0.02, ""),
     ("resnet50-fast", 0.15, 0.02, "it would save about 112 s and take 120 s"),
     ("resnet50-90", 0.05, 0.049,
      "the GPU waits for Python, which starts the kernels; try train.compile=reduce-overhead")],
)  # fmt: skip
def test_a_model_is_compiled_if_that_repays(recipe: str, pass_s: float, queued_s: float, reason: str) -> None:
    size = DataSize(9469, 3925, 10) if recipe == "imagenette" else DataSize(1_281_167, 50_000, 1000)
    _, plan = plan_of("data.root=/data", recipe=recipe, data=size)
    assert reason_not_to(plan, pass_s, queued_s) == reason


@pytest.mark.parametrize(
    ("inner", "is_of_machine"),
    [(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"), True),
     (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
     (RuntimeError("Triton Error [CUDA]: device kernel image is invalid"), True),
     (BrokenProcessPool("A process in the process pool was terminated abruptly"), True),
     (SubprocException("Traceback ...\nOSError: [Errno 16] Device or resource busy: 'tmp.pid_7'"), True),
     (CalledProcessError(-9, ["g++"]), True), (CalledProcessError(1, ["g++"]), False),
     (SubprocException("Traceback ...\nCompilationError: at 7:18: unexpected type fp64"), False),
     (NotImplementedError("no lowering for aten.frobnicate"), False)],
)  # fmt: skip
def test_a_fault_of_the_machine_is_told_from_one_of_the_model(inner: Exception, is_of_machine: bool) -> None:
    assert is_fault_of_machine(InductorError(inner, None)) is is_of_machine
    wrapped = RuntimeError("compilation failed")
    wrapped.__cause__ = inner
    assert is_fault_of_machine(BackendCompilerFailed(print, wrapped, None)) is is_of_machine


def test_a_hang_in_a_compilation_is_ended(tmp_path: Path) -> None:
    program = f"""
import time
from pathlib import Path
from pipeline.guards import watchdog
from pipeline.guards.signals import StopRequest
watched = watchdog.Watchdog(1, Path({str(tmp_path / "stacks")!r}), 0, StopRequest())
watched.start()
with watched.allow_pause(2):
    time.sleep(600)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "made no progress for 4 s (run.timeout) and exits" in done.stderr
    assert "most recent call first" in (tmp_path / "stacks").read_text()


class SmallModel(nn.Conv2d):
    """A model that Dynamo traces: it skips torch's own classes."""

    def __init__(self) -> None:
        super().__init__(3, 10, 3)

    def forward(self, pixels: Tensor) -> Tensor:
        return super().forward(pixels).mean((2, 3))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the graphs that are made from now on; they run as they are."""
    found: list[Any] = []
    torch._dynamo.reset()
    counters.clear()

    def keep(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        found.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    return found


def train(strategy: Strategy, plan: Plan, epochs: int) -> None:
    """Run the passes of one update with each image size, that many times."""
    labels = Targets(torch.zeros(plan.micro_batch, dtype=torch.int64))
    for size in epochs * plan.image_sizes:
        for micro in range(plan.accumulate):
            strategy.forward_backward(micro, torch.zeros(plan.micro_batch, 3, size, size), labels)
        strategy.model.zero_grad()


def make_ddp(net: nn.Module | None, *words: str) -> tuple[DDPStrategy, Plan]:
    config, plan = plan_of("train.compile=on", "batch.accumulate=2", "batch.global=4", *words)
    model, group = net or build(config.model, 10), Group(World(), torch.device("cpu"))
    return DDPStrategy(config, plan, model, group), plan


@pytest.mark.usefixtures("alone")
def test_ddp_has_one_graph_per_size_with_and_without_gradient_sync(graphs: list[Any]) -> None:
    sizes = ("augment.first_size=32", "augment.size=64", "augment.growth=[0 epochs, 1 epoch]")
    strategy, plan = make_ddp(None, *sizes)
    train(strategy, plan, epochs=1)
    assert counters["stats"]["unique_graphs"] == len(plan.image_sizes) == 2
    pieces = len(graphs)
    assert pieces > 2, "cut at the buckets, so that one is sent while the next is computed"
    train(strategy, plan, epochs=2)
    assert len(graphs) == pieces, "buckets, passes and sizes seen before are not compiled again"


@pytest.mark.usefixtures("alone")
def test_more_sizes_than_torch_recompiles_by_default_are_each_compiled_once(graphs: list[Any]) -> None:
    sizes = ("augment.first_size=32", "augment.size=384", "augment.growth=[0 epochs, 39 epochs]")
    strategy, plan = make_ddp(SmallModel(), "train.epochs=40", *sizes)
    train(strategy, plan, epochs=2)
    assert len(graphs) == len(plan.image_sizes) == 12


@pytest.mark.parametrize("recipe", recipe_names())
def test_a_recipe_is_one_graph_per_size_without_a_break(
    recipe: str, graphs: list[Any], full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("train.compile=on", "parallel=ddp", "data.root=/data")
    config, plan = plan_of(*words, recipe=recipe, data=DataSize(1_281_167, 50_000, 1000))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, fullgraph=True))  # a break is an error
    strategy = Strategy(config, plan, meta_model(config.model, 1000), Group(World(), torch.device("meta")))
    sizes = plan.image_sizes if full else plan.image_sizes[:2]
    for size in 2 * sizes:
        strategy.forward(torch.empty(2, 3, size, size, device="meta"))
    assert len(graphs) == len(sizes)
