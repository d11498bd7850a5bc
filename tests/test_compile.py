"""A compiled run resumes bit for bit; a missing compiler is reported before anything starts."""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from equivalence import COMPILED
from harness import SMALL, Job, assert_resumes, pipeline
from torch import nn

from pipeline.config.load import load
from pipeline.group import Group
from pipeline.machine import missing_to_compile
from pipeline.parallel import choose_strategy
from pipeline.plan import DataSize
from pipeline.planning import make_plan
from pipeline.record.failure import FAILURE
from pipeline.world import World

SMALLER = [*SMALL, "model.arch=squeezenet1_1", "augment.size=48", "optimizer.lr=0.01", "data.workers=0"]


@pytest.mark.full
@pytest.mark.skipif(bool(missing_to_compile()), reason=f"torch.compile needs {missing_to_compile()}")
def test_a_compiled_run_resumes_bit_for_bit(tmp_path: Path, digits: Path) -> None:
    # the graphs of test_equivalence, so that the compiler's cache has them the second time
    words = [
        "digits",
        f"data.root={digits}",
        *SMALL,
        *COMPILED[1].words.split(),
        "batch.global=96",
        "train.ema=0.9",
    ]
    uninterrupted = assert_resumes(tmp_path, [*words, "train.epochs=1"], 5, nproc=1)
    assert "compiled       yes: train.compile=on" in uninterrupted.log()


def test_every_image_size_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        compiled.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    words = ["train.compile=on", "train.epochs=40", "augment.first_size=32", "augment.size=384",
             "augment.growth=[0 epochs, 39 epochs]"]  # fmt: skip
    config = load("digits", words)
    plan = make_plan(config, World(), DataSize(960, 96, 10))
    assert plan.image_sizes == list(range(32, 385, 32)), "more than torch recompiles by default"
    strategy = choose_strategy(config, plan, nn.Conv2d(3, 1, 3), Group(World(), torch.device("cpu")))
    for _ in range(2):
        for size in plan.image_sizes:
            strategy.forward(torch.zeros(1, 3, size, size))
    assert len(compiled) == len(plan.image_sizes), "each once"


@pytest.mark.full
@pytest.mark.skipif(bool(missing_to_compile()), reason=f"torch.compile needs {missing_to_compile()}")
def test_a_rank_may_compile_much_longer_than_the_others(tmp_path: Path, digits: Path) -> None:
    words = ["digits", f"data.root={digits}", *SMALLER, "train.compile=on", "run.timeout=5", "batch.global=480",
             "train.epochs=2", "augment.first_size=32", "augment.growth=[0 epochs, 1 epochs]"]  # fmt: skip
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if 'RANK' in os.environ:\n"
        "    import time, torch\n"
        "    from pipeline.train import session\n"
        "    session._MARGIN_S = 1\n"
        "    def compile_slowly(graph, _):\n"
        "        print('compiling', flush=True)\n"
        "        time.sleep(7 * int(os.environ['RANK']))\n"
        "        return graph\n"
        "    plain = torch.compile\n"
        "    torch.compile = lambda module, **options: plain(module, backend=compile_slowly, **options)\n"
    )
    run = Job(
        tmp_path / "run", words, nproc=2, env={"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    )
    assert run.run().code == 0, run.log()
    assert run.output().count("compiling") == 8, "each rank, two parts of the model at two sizes"


@pytest.mark.skipif(bool(missing_to_compile()), reason=f"torch.compile needs {missing_to_compile()}")
def test_a_signal_that_ends_the_compiler_is_no_permanent_failure(tmp_path: Path, digits: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "if 'train' in sys.orig_argv:\n"
        "    import torch\n"
        "    def fail(graph, _):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        raise RuntimeError('the compiler was ended')\n"
        "    plain = torch.compile\n"
        "    torch.compile = lambda module, **options: plain(module, backend=fail, **options)\n"
    )
    words = ["digits", f"data.root={digits}", *SMALLER, "train.compile=on"]
    run = Job(tmp_path / "run", words, env={"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"})
    result = run.run()
    assert (result.code, result.error) == (
        75,
        "asked to stop before a step was made: the same command starts again",
    )
    assert not (run.folder / FAILURE).exists()


def test_a_hang_in_a_compilation_is_ended(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from pipeline.guards import watchdog\n"
        "from pipeline.guards.signals import StopRequest\n"
        "watched = watchdog.Watchdog(1, Path(sys.argv[1]), 0, StopRequest())\n"
        "watched.start()\n"
        "with watched.allow_pause(2):\n"
        "    time.sleep(30)\n"
    )
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "stacks")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert 3 < time.monotonic() - start < 20
    assert "made no progress for 4 s (run.timeout, and 2 s to compile) and exits" in done.stderr
    assert "most recent call first" in (tmp_path / "stacks").read_text()


@pytest.mark.full
def test_train_compile_is_refused_without_a_compiler(tmp_path: Path) -> None:
    words = ("digits", f"run.dir={tmp_path / 'run'}", "train.compile=on", f"data.root={tmp_path / 'digits'}")
    result = pipeline("train", *words, PATH=str(tmp_path), CXX="", CC="")
    assert result.code == 2
    assert result.error.startswith("train.compile=on needs a compiler (g")
    assert not (tmp_path / "run" / "checkpoints").exists()
