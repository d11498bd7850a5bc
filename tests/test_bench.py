"""Benchmarks name what they compare; speeds are never asserted."""

import json
import os
import re
import time
from collections.abc import Iterator
from itertools import islice, pairwise
from multiprocessing import active_children
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from harness import pipeline
from test_pack import encoded, photo

from pipeline.bench import gpu
from pipeline.bench import train as bench_train
from pipeline.cli import bench as cli_bench
from pipeline.config.load import load
from pipeline.data.batch import Batch
from pipeline.data.loader import TrainBatches
from pipeline.data.shared_memory import Allocate
from pipeline.errors import RequestError

ROOT = Path(__file__).parent.parent
SETTINGS = ("--rounds", "1", "--steps", "1", "model.arch=shufflenet_v2_x0_5", "augment.size=32", "batch.global=32")


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("train",), ["reference", "torchvision", "timm", "plain", "loaded"]),
        pytest.param(("comm", "--nproc", "2", "exact.shards=4"), ["reference", "exact"], marks=pytest.mark.full),
    ],
)
def test_a_benchmark_prints_its_rows(words: tuple[str, ...], names: list[str]) -> None:
    result = pipeline("bench", *words, *SETTINGS, "--json")
    assert result.code == 0, result.err
    rows = json.loads(result.out)["rows"]
    assert [row["name"] for row in rows] == names
    assert all(set(row) == {"name", "images_per_s", "ratio", "pixel_diff"} for row in rows)
    assert rows[0]["ratio"] == 1
    assert all(row["images_per_s"] > 0 for row in rows)


@pytest.mark.parametrize("name", ["train", "track", "comm"])
def test_a_loop_without_a_loader_is_fed_batches_on_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mark every batch that `to_device` moves: on a GPU a step would wait for the copy."""
    fed: list[Batch] = []

    def mark(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
        return (batch._replace(labels=torch.full_like(batch.labels, -2)) for batch in batches)

    monkeypatch.setattr(bench_train, "to_device", mark)
    monkeypatch.setattr(bench_train, "_plain_step", lambda config, plan, group, batch, **_: fed.append(batch))
    monkeypatch.setattr(
        bench_train, "_our_step", lambda config, plan, group, source, stream, *_: fed.extend(islice(stream, 1))
    )
    monkeypatch.setattr(bench_train, "interleave", lambda rows, *_, **__: [row.speeds.append(1.0) for row in rows])
    monkeypatch.setattr(bench_train.randomness, "configure_torch", lambda **_: None)
    monkeypatch.setattr(bench_train.sender, "start", lambda *_: IdleSender())
    only = {"only": ["torchvision", "timm", "plain"]} if name == "train" else {}
    words = ["run.device=cpu", "augment.size=32", "batch.global=32"]
    getattr(bench_train, f"bench_{name}")(words, 1, 1, **only, as_json=True)
    assert len(fed) == (4 if name == "train" else 2)
    assert all((batch.labels == -2).all() for batch in fed)


class IdleSender:
    """A sender process that has sent everything."""

    def wait_until_ready(self) -> None: ...

    def cpu_seconds(self) -> float:
        return 0.0

    def close(self, log: object) -> bool:
        return True


@pytest.mark.full
def test_the_cost_of_tracking_is_printed_beside_the_ratio() -> None:
    result = pipeline("bench", "track", "track.every=1 step", *SETTINGS)
    found = re.search(r"  tracked .* ([\d.]+) ms per step in the loop, [\d.]+% of a CPU in the sender", result.out)
    assert found, result.out + result.err
    assert float(found[1]) > 0


def test_the_loader_is_measured_in_its_steady_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a worker take 0.1 s a batch, and rest between two turns: no batch may be ready before."""
    make_batch = TrainBatches.make_batch

    def make_slowly(self: TrainBatches, position: int, allocate: Allocate) -> Batch:
        time.sleep(0.1)
        return make_batch(self, position, allocate)

    def make_step(config: Any, plan: Any, group: Any, source: Any, stream: Any, journal: Any, timer: Any) -> object:
        def receive() -> None:
            with timer.charge("data"):
                next(stream)

        return receive

    monkeypatch.setattr(TrainBatches, "make_batch", make_slowly)
    monkeypatch.setattr(bench_train, "_our_step", make_step)
    monkeypatch.setattr(bench_train.randomness, "configure_torch", lambda **_: None)
    config = load("digits", ["run.device=cpu", "data.source=synthetic", "data.workers=1", "batch.global=8"])  # 32 px
    plan, group, source = bench_train.prepare(config, deterministic=False)
    loop = bench_train._LoadedLoop(config, plan, group, source, 3, Path(os.devnull))
    for _ in range(2):
        assert loop() < 1.3 * 8 / 0.1
        assert not active_children(), "workers would slow down the other rows"
        time.sleep(0.3)
    text = loop.describe(500)
    found = re.fullmatch(r"waits for data (\d+)%, .* of a core per image: ([\d.]+) cores for 500 images/s", text)
    assert found, text
    assert int(found[1]) > 90
    assert 0 < float(found[2]) < 10


def test_rows_of_a_model_that_is_not_compiled_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_train.randomness, "configure_torch", lambda **_: None)
    with pytest.raises(RequestError, match=r"^--only plain-compiled: nothing is compiled here \(no GPU"):
        bench_train.bench_train(["run.device=cpu"], 1, 1, only=["plain-compiled"], as_json=True)


@pytest.mark.full
def test_the_plain_loop_trains_the_network_of_the_recipe(digits: Path) -> None:
    words = ("digits", f"data.root={digits}", "--same-network", "--seeds", "1", "train.max_steps=3", "run.device=cpu")
    result = pipeline("bench", "top1", *words, *SETTINGS[4:], "track.every=1 steps", "track.report=false")
    assert result.code == 0, result.err
    name, top1, speed = "plain shufflenet_v2_x0_5", r"[01]\.\d{4}", r"\d+ images/s"
    seed, means, cost = result.out.splitlines()
    assert re.fullmatch(rf"seed 0, \d+ s: digits {top1}, {speed}; {name} {top1}, {speed}", seed)
    assert re.fullmatch(rf"mean top-1 in the same time: digits {top1} \(.*\), {name} {top1} \(.*\)", means)
    assert re.fullmatch(rf"speed of the steps: [\d.]+ \([\d.]+ to [\d.]+\) of {name}'s", cost)


# ---- bench gpu


class FakeSuite(gpu._Suite):
    """A suite that records commands; the weights of trainings, and their top-1, are prepared."""

    def __init__(self, folder: Path, *digests: str) -> None:
        super().__init__(folder, [], 256, "-compiled", None, None)
        self.digests, self.commands = list(digests), []

    def run(self, *arguments: str, is_shown: bool = False, setup: str = "") -> CompletedProcess[str]:
        self.commands.append(arguments)
        line = f"done top1=0.9800 top5=1.0000 weights=sha256:{self.digests.pop(0)}\n" if arguments[0] == "train" else ""
        return CompletedProcess(arguments, 0, line, "")

    def interrupt(self, run: str, number: int, words: list[str]) -> tuple[int, float]:
        return 75, 1.0


STOPPED = "ok: exit 75 after 1.0 s"
SAME, DIFFERENT = "ok: identical weights a", "FAILED: weights b differ from a"


@pytest.mark.parametrize(
    ("digests", "rows"),
    [
        ("xaacca", ["ok", "ok: top1=0.9800", SAME, "ok: identical weights c", STOPPED, SAME]),
        ("xabccb", ["ok", "ok: top1=0.9800", DIFFERENT, "ok: identical weights c", STOPPED, DIFFERENT]),
    ],
)
def test_the_checks_compare_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], digests: str, rows: list[str]
) -> None:
    suite = FakeSuite(tmp_path, *digests)
    gpu._checks(suite)
    assert [re.sub(r"^ {2}\S.{19} | \[0 s\]$", "", line) for line in capsys.readouterr().out.splitlines()] == rows
    trainings = [command for command in suite.commands if command[0] == "train"]
    assert all({"track.uri=none", "track.report=false"} <= set(command) for command in trainings)


def test_the_headline_is_first_and_compares_compiled_loops(tmp_path: Path) -> None:
    suite = FakeSuite(tmp_path)
    next(iter(gpu.PARTS.values()))[0](suite)
    (command,) = suite.commands
    assert command[:2] == ("bench", "train")
    compared = [row for flag, row in pairwise(command) if flag == "--only"]
    assert compared == ["reference-compiled", "plain-compiled"]
    assert "train.precision=bf16" in command


def test_after_the_time_limit_nothing_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_TIME_LIMIT_S", 0)
    suite = FakeSuite(tmp_path)
    for part, _ in gpu.PARTS.values():
        part(suite)
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == len(suite.failed) == 14
    assert all("FAILED: not run: no time left" in row for row in rows)
    assert not suite.commands


TABLE = r"(  {} +[\d,.]+ images/s   ratio .*\n)"
PARTS_OUTPUT = {
    "headline": "".join(TABLE.format(row) for row in ("reference", "plain")) + r"  headline +5 rounds \[\d+ s\]\n",
    "bf16": "".join(TABLE.format(row) for row in ("reference", "torchvision", "timm", "plain")),
    "fp16": "".join(TABLE.format(row) for row in ("reference", "torchvision", "timm", "plain")),
    "jpeg": r"  photos +16 JPEGs .*\n.*\n" + "".join(TABLE.format(row) for row in ("reference", "plain", "loaded")),
    "checks": (
        r"  doctor +ok .*\n  digits +FAILED: top1=0\.\d+ is below 0.97 .*\n"
        r"  deterministic twice +ok: identical weights (\w{8}) .*\n  exact twice +ok: identical weights \w{8} .*\n"
        r"  SIGTERM +ok: exit 75 after [\d.]+ s .*\n  SIGTERM and SIGKILL +ok: identical weights \1 .*\n"
    ),
    "memory": r"  largest pass +64 images .*\n  batch cut to fit +not cut: .*\n  profile +20 steps, [\d.]+ MiB; .*\n",
}


@pytest.mark.full
@pytest.mark.parametrize(
    "part",
    # `jpeg` runs the code of the three other comparisons
    [pytest.param(part, marks=[] if part in ("jpeg", "checks") else [pytest.mark.long]) for part in PARTS_OUTPUT],
)
def test_a_part_of_bench_gpu_runs_on_a_cpu_without_mlflow(part: str, tmp_path: Path) -> None:
    """Run the part in miniature, where mlflow and docker cannot be imported."""
    for module in ("mlflow", "docker"):
        (tmp_path / f"{module}.py").write_text("raise ImportError\n")
    words = ["run.device=cpu", "model.arch=shufflenet_v2_x0_5", "augment.size=32", "data.num_images=64"]
    if part == "checks":
        words += ["train.max_steps=10", "checkpoint.every=2 steps"]
    flags = ["--only", part, "--batch", "8", "--write", str(tmp_path / "kept")]
    result = pipeline("bench", "gpu", *flags, *words, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert result.code == 0, result.err
    assert re.search(PARTS_OUTPUT[part], result.out), result.out + result.err
    assert (tmp_path / "kept/profile-steps-21-40.json.gz").exists() == (part == "memory")
    assert ("FAILED: digits" if part == "checks" else "nothing failed") in result.out.splitlines()[-1]


def test_the_command_line_knows_every_row_and_part() -> None:
    assert cli_bench.LOOPS == bench_train.LOOPS
    assert cli_bench.PARTS == tuple(gpu.PARTS) == tuple(PARTS_OUTPUT)


def test_bench_gpu_refuses_a_missing_folder_of_images(tmp_path: Path) -> None:
    result = pipeline("bench", "gpu", "--images", str(tmp_path / "none"), "run.device=cpu", timeout=60)
    assert result.code == 2
    assert result.error.startswith(f"--images {tmp_path / 'none'} is not a folder")


@pytest.mark.full
def test_bench_data_prints_its_rows_and_pixel_differences(tmp_path: Path) -> None:
    for number in range(16):
        path = tmp_path / "images" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(photo(120, 160, number), subsampling=0, quality=90))
    words = ("--images", str(tmp_path / "images"), "--rounds", "1", "--write", str(tmp_path / "docs"))
    result = pipeline("bench", "data", *words, "--steps", "40", "--gpu-images-per-s", "2500")
    assert result.code == 0, result.err
    assert len(re.findall(r"CPU [\d.]+ ms an image, [\d,]+ images/s a core", result.out)) == 5
    numbers = ", ".join(rf"[\d.]+ with {name}" for name in ("reference", "plain", "lossless", "lossy"))
    assert re.search(rf"\ncores that feed a GPU which trains 2,500 images/s: {numbers}\n", result.out)
    stages = ["read", "open", "cut", "decode", "resize", "draw", "augment", "collate", "hand over", "sum"]
    assert re.search(r"\n  one worker, ms an image +" + " +".join(stages) + r"\n", result.out), result.out
    profiled = re.findall(r"\n  (plain|lossless|lossy) ((?: +[\d.]+){10})(?=\n)", result.out)
    assert [name for name, _ in profiled] == ["plain", "lossless", "lossy"]
    for _, line in profiled:
        *parts, total = map(float, line.split())
        assert min(parts) > 0
        assert total == pytest.approx(sum(parts), abs=0.01)
    result = pipeline("bench", "data", *words, "--steps", "1", "--json")
    assert result.code == 0, result.err
    rows = json.loads(result.out)["rows"]
    assert [row["name"] for row in rows] == ["reference", "plain", "lossless", "lossy"]
    assert all(set(row) == {"name", "images_per_s", "ratio", "pixel_diff"} for row in rows)
    assert (rows[0]["ratio"], rows[0]["pixel_diff"]) == (1, 0)
    assert rows[1]["pixel_diff"] == rows[2]["pixel_diff"] < 0.1 < rows[3]["pixel_diff"]
    assert "pipeline bench data --images images --rounds 1 --steps 1\n" in (tmp_path / "docs/loaders.md").read_text()
    assert (tmp_path / "docs/loaders.svg").exists()
