"""Slow parts are charged to their own entry of the time accounting, which sums to the wall time."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import read_rows
from torch.optim import SGD

import pipeline.timing
from pipeline.addons.datasets.sources import open_source
from pipeline.addons.models.evaluator import Evaluator
from pipeline.addons.run.timing import CudaStepTimer, advise
from pipeline.config.load import load
from pipeline.data.loader import TrainBatches
from pipeline.guards.signals import StopRequest
from pipeline.operate.request import Checked
from pipeline.operate.start import run_rank
from pipeline.parallel import strategy
from pipeline.planning import make_plan
from pipeline.record.checkpoint import CheckpointWriter
from pipeline.record.folder import RunFolder
from pipeline.record.journal import Journal
from pipeline.timing import ENTRIES, Entry, Seconds, StepTimer
from pipeline.world import World

STEPS = 4
# entry -> function that sleeps (class or module, name), seconds, calls in an epoch
SLOW: dict[Entry, tuple[Any, str, float, int]] = {
    "data": (TrainBatches, "__getitem__", 0.05, STEPS),
    "forward_backward": (strategy, "classification_loss", 0.1, STEPS),
    "optimizer": (SGD, "step", 0.15, STEPS),
    "tracking": (Journal, Journal.log_metrics.__name__, 0.07, STEPS + 1),  # one more for validation
    "validation": (Evaluator, "evaluate", 0.9, 1),
    "checkpoint": (CheckpointWriter, "save", 1.2, 1),
}


def slowed(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Return a function that sleeps and then calls `function`."""

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return function(*arguments, **options)

    return slow


def epochs(folder: Path) -> list[dict[str, float]]:
    """Train a small model and return the time metrics of its epochs."""
    words = ["data.source=synthetic", "data.num_images=32", "data.workers=0", "model.arch=shufflenet_v2_x0_5",
             "augment.size=32", "batch.global=8", "train.epochs=2", "track.uri=none", "track.every=1 step",
             "track.report=false", "run.device=cpu", "evaluate.batch=8", f"run.dir={folder}"]  # fmt: skip
    config = load("digits", words)
    run_folder = RunFolder(folder)
    run_folder.hold()
    source = open_source(config)
    checked = Checked(config, source, make_plan(config, World(), source.size))
    run_rank(config, World(), run_folder, StopRequest(), checked)
    run_folder.release()
    return [
        row["metrics"] for row in read_rows(run_folder.journal) if "time/epoch_s" in row.get("metrics", {})
    ]


def test_a_slow_part_is_charged_to_its_entry_and_all_entries_sum_to_the_wall_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, name, seconds, _ in SLOW.values():
        monkeypatch.setattr(kind, name, slowed(getattr(kind, name), seconds))
    start = time.perf_counter()
    found = epochs(tmp_path / "slow")
    wall = time.perf_counter() - start
    assert len(found) == 2, "one row an epoch"
    assert 0.2 * wall < sum(row["time/epoch_s"] for row in found) < wall
    for row in found:
        assert sum(row[f"time/{entry}_s"] for entry in ENTRIES) == pytest.approx(
            row["time/epoch_s"], rel=0.01
        )
        for entry, (_, _, seconds, times) in SLOW.items():  # without the sleep, most take a few ms
            assert row[f"time/{entry}_s"] >= seconds * times, entry
        assert row["time/other_s"] < 0.2 * row["time/epoch_s"]


def test_consecutive_epochs_account_for_all_time(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = VirtualGpu(monkeypatch)  # of which the host's clock counts here
    timer = StepTimer()
    timer.pop()
    with timer.charge("data"):
        gpu.host += 50
        with timer.charge("copy"):
            gpu.host += 100
            timer.switch_to("communication")
            gpu.host += 150
        gpu.host += 50
    gpu.host += 7
    expected = {"data": 0.1, "copy": 0.1, "communication": 0.15, "other": 0.007}
    assert {entry: spent for entry, spent in timer.pop().items() if spent} == pytest.approx(expected)


class VirtualGpu:
    """A host and a device whose clocks are numbers, in ms: now, and the end of what is queued."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = self.device = 0.0
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: VirtualEvent(self))
        clock = SimpleNamespace(perf_counter=lambda: self.host / 1000)
        monkeypatch.setattr(pipeline.timing, "time", clock)

    def queue(self, ms: float) -> float:
        """Queue work of `ms`; return when it ends."""
        self.device = max(self.device, self.host) + ms
        return self.device

    def train(self, timer: StepTimer, steps: int, loader_ms: float) -> None:
        """Train as `update_once` does, with a step of 80 ms on the device and 30 ms on the host."""
        ready, flags = self.host, [0.0]
        for step in range(steps):
            with timer.charge("data"):
                ready += loader_ms
                self.host = max(self.host, ready)
                self.device = max(self.device, self.host + 1)  # the copy of the batch
            self.host += 1
            with timer.charge("forward_backward"):
                with timer.charge("copy"):
                    self.queue(1)
                flags.append(self.queue(68))
                self.host += 20
            with timer.charge("communication"):
                self.host = max(self.host, flags[-2])
            with timer.charge("optimizer"):
                self.queue(11)
                self.host += 4
            with timer.charge("tracking"):
                self.host = max(self.host + 5, 0 if step % 7 else self.device)  # a report waits


class VirtualEvent:
    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu = gpu

    def record(self) -> None:
        self.time = self._gpu.queue(0)

    def query(self) -> bool:
        return self.time <= self._gpu.host

    def elapsed_time(self, end: "VirtualEvent") -> float:
        return end.time - self.time


@pytest.mark.parametrize(("loader_ms", "waits"), [(78, 0), (82, 0.02), (90, 0.11), (160, 0.5)])
def test_a_gpu_waits_for_data_only_while_it_is_idle(
    loader_ms: float, waits: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = VirtualGpu(monkeypatch)
    timer = CudaStepTimer()
    timer.pop()
    gpu.train(timer, 200, loader_ms)
    gpu.host = gpu.device
    wall, reported = gpu.host / 1000, timer.spent_on("data")
    assert reported / wall == pytest.approx(waits, abs=0.01)
    with timer.charge("validation"):
        gpu.host += 5000
    with timer.charge("tracking"):
        gpu.host += 1000
    spent = timer.pop()
    assert sum(spent.values()) == pytest.approx(wall + 6)
    assert (spent["validation"], spent["data"]) == pytest.approx((5, reported), rel=0.01)
    assert spent["tracking"] == pytest.approx(1, abs=0.02)
    step = spent["copy"] + spent["forward_backward"] + spent["optimizer"]
    assert step == pytest.approx(0.08 * 200, rel=0.01)


@pytest.mark.parametrize(
    ("spent", "says"),
    [
        ({"data": 41, "forward_backward": 59}, "waiting for data 41%: raise data.workers, or pack"),
        ({"communication": 50, "checkpoint": 20}, "waiting for the other processes 71%: raise batch.global"),
        ({"tracking": 3, "forward_backward": 97}, "logging metrics 3%: raise track.every"),
        ({"data": 5, "forward_backward": 80, "validation": 15}, None),
        ({"checkpoint": 0.9, "forward_backward": 1.0}, None),
    ],
)
def test_the_advice_names_the_largest_entry(spent: Seconds, says: str | None) -> None:
    advice = advise({**dict.fromkeys(ENTRIES, 0.0), **spent})
    assert advice is None if says is None else advice and advice[1].startswith(says)
