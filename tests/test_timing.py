"""The time of each epoch is accounted for; the profile and the share of a GPU's peak (MFU)."""

import gzip
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from harness import MakeJob, before_each, plan_of, read_rows

import pipeline.timing
from pipeline.addons.run import mfu
from pipeline.addons.run.mfu import MfuMeter, flops_per_image
from pipeline.addons.run.timing import CudaStepTimer, advise
from pipeline.config.sections import Model
from pipeline.group import Group
from pipeline.timing import ENTRIES, Entry, Seconds, StepTimer
from pipeline.world import World

STEPS = 4
# entry -> function that sleeps, seconds, calls in an epoch
SLOW: dict[Entry, tuple[str, float, int]] = {
    "data": ("pipeline.data.loader:TrainBatches.__getitem__", 0.05, STEPS),
    "forward_backward": ("pipeline.parallel.strategy.classification_loss", 0.1, STEPS),
    "optimizer": ("torch.optim:SGD.step", 0.15, STEPS),
    "tracking": ("pipeline.record.journal:Journal.log_metrics", 0.07, STEPS + 1),  # one more for validation
    "validation": ("pipeline.addons.models.evaluator:Evaluator.evaluate", 0.9, 1),
    "checkpoint": ("pipeline.record.checkpoint:CheckpointWriter.save", 1.2, 1),
}


def test_entries_sum_to_the_wall_time(job: MakeJob) -> None:
    words = ("data.source=synthetic", "data.num_images=32", "data.workers=0", "augment.size=32",
             "batch.global=8", "train.epochs=2", "track.every=1 step", "evaluate.batch=8")  # fmt: skip
    sleeps = [before_each(function, f"time.sleep({seconds})") for function, seconds, _ in SLOW.values()]
    run = job(*words, prelude="\n".join(f"exec({code!r}, {{}})" for code in sleeps))
    result = run.run(code=0)
    metrics = [row.get("metrics", {}) for row in read_rows(run.folder / "journal.jsonl")]
    found = [row for row in metrics if "time/epoch_s" in row]
    assert len(found) == 2, "one row an epoch"
    assert 0.2 * result.seconds < sum(row["time/epoch_s"] for row in found) < result.seconds
    for row in found:
        total = sum(row[f"time/{entry}_s"] for entry in ENTRIES)
        assert total == pytest.approx(row["time/epoch_s"], rel=0.01)
        for entry, (_, seconds, times) in SLOW.items():  # without the sleep, most take a few ms
            assert row[f"time/{entry}_s"] >= seconds * times, entry
        assert row["time/other_s"] < 0.2 * row["time/epoch_s"]


class VirtualGpu:
    """A host and a device whose clocks are numbers, in ms: now, and the end of what is queued."""

    host = device = 0.0

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


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> VirtualGpu:
    gpu = VirtualGpu()
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: VirtualEvent(gpu))
    monkeypatch.setattr(pipeline.timing, "time", SimpleNamespace(perf_counter=lambda: gpu.host / 1000))
    return gpu


@pytest.mark.parametrize(("loader_ms", "waits"), [(78, 0), (82, 0.02), (90, 0.11), (160, 0.5)])
def test_a_gpu_waits_for_data_only_while_it_is_idle(gpu: VirtualGpu, loader_ms: float, waits: float) -> None:
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
    [({"data": 41, "forward_backward": 59}, "waiting for data 41% (100 images/s arrive, 169 could be"),
     ({"communication": 50, "checkpoint": 20}, "waiting for the other processes 71%: raise batch.global"),
     ({"tracking": 3, "forward_backward": 97}, "logging metrics 3%: raise track.every"),
     ({"data": 5, "forward_backward": 80, "validation": 15}, None),
     ({"checkpoint": 0.9, "forward_backward": 1.0}, None)],
)  # fmt: skip
def test_the_advice_names_the_largest_entry(spent: Seconds, says: str | None) -> None:
    advice = advise({**dict.fromkeys(ENTRIES, 0.0), **spent}, images=10_000)
    assert advice is None if says is None else advice and advice[1].startswith(says)


def test_the_profile_contains_the_requested_steps(job: MakeJob) -> None:
    run = job("data.workers=0", "train.max_steps=3", "profile.steps=2-3")
    file = run.folder / "report/profile-steps-2-3.json.gz"
    assert f"profile of steps 2 to 3: {file}" in run.run().err
    names = [event["name"] for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]]
    assert sum(name.startswith("Optimizer.step#") for name in names) == 2
    run.arguments[-2:] = ["train.max_steps=5", "profile.steps=3-5"]
    run.finished()
    assert len([*run.folder.glob("report/profile*")]) == 1, "a run that resumes in the window records nothing"


def test_a_resnet50_step_is_three_times_its_published_forward_flops() -> None:
    # torchvision documents 4.089 G multiply-adds for the forward pass. The backward pass takes
    # twice that, except for the gradient of the first layer's input.
    flops = flops_per_image(Model(arch="resnet50"), 1000, 224)
    assert flops == pytest.approx(3 * 2 * 4.089e9, rel=0.02)


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [("NVIDIA H100 PCIe", "fp16", 756e12), ("NVIDIA A100-SXM4-80GB", "tf32", 156e12),
     ("NVIDIA L4", "bf16", 121e12), ("NVIDIA A100-SXM4-80GB", "fp32", None), ("Some GPU", "bf16", None),
     ("NVIDIA L40", "bf16", None), ("NVIDIA RTX A1000", "bf16", None), ("NVIDIA GB200", "bf16", None),
     ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None)],
)  # fmt: skip
def test_a_device_without_a_known_peak_has_no_mfu(
    monkeypatch: pytest.MonkeyPatch, name: str, precision: str, peak: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    config, plan = plan_of(f"train.precision={precision}")
    flops = 1000 * flops_per_image(config.model, 10, 32)
    meter = MfuMeter(config, replace(plan, world=2), Group(World(), torch.device("cuda")))
    monkeypatch.setattr(mfu, "flops_per_image", lambda *_: pytest.fail("it counts again"))
    assert meter.metrics(1000, 32) == ({} if peak is None else {"time/mfu": pytest.approx(flops / peak / 2)})
    for group in (Group(World(), torch.device("cpu")), Group(World(2, 2, 1, 1), torch.device("cuda"))):
        assert MfuMeter(config, plan, group).metrics(1000, 32) == {}
