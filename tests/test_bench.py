"""Benchmarks name what they compare; speeds are never asserted."""

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from harness import pipeline
from test_pack import encoded, photo

from pipeline import machine
from pipeline.bench import gpu
from pipeline.bench import train as bench_train
from pipeline.data.batch import Batch
from pipeline.record.journal import Journal
from pipeline.telemetry.mfu import NullMfuMeter

SETTINGS = ("--rounds", "1", "--steps", "1", "model.arch=shufflenet_v2_x0_5", "augment.size=32", "batch.global=32")


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("train",), ["reference", "torchvision", "plain", "loaded"]),
        pytest.param(("track", "track.every=1 step"), ["reference", "tracked"], marks=pytest.mark.full),
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
    monkeypatch.setattr(bench_train, "batches", lambda *_, **__: iter(()))  # the row of the loader alone
    monkeypatch.setattr(bench_train, "_plain_step", lambda config, plan, group, batch: fed.append(batch))
    monkeypatch.setattr(
        bench_train, "_our_step", lambda config, plan, group, source, stream, *_: fed.extend(islice(stream, 1))
    )
    monkeypatch.setattr(bench_train, "interleave", lambda rows, _: [row.speeds.append(1.0) for row in rows])
    monkeypatch.setattr(bench_train.randomness, "configure_torch", lambda **_: None)
    monkeypatch.setattr(bench_train.sender, "start", lambda *_: IdleSender())
    getattr(bench_train, f"bench_{name}")(["run.device=cpu", "augment.size=32", "batch.global=32"], 1, 1, as_json=True)
    assert len(fed) == (3 if name == "train" else 2)
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


class FakeSuite(gpu._Suite):
    """A suite that returns prepared outputs instead of running commands."""

    def __init__(self, folder: Path, *outputs: str) -> None:
        super().__init__(folder, [], 256, 224, NullMfuMeter())
        self.outputs = list(outputs)

    def _run(self, title: str, *arguments: str) -> str:
        if arguments[0] == "train":
            run = next(Path(word.removeprefix("run.dir=")) for word in arguments if word.startswith("run.dir="))
            run.mkdir(parents=True)
            metrics = {"system/one/gpu_peak_mib": 2048.0, "system/two/gpu_peak_mib": 3072.0, "time/images_per_s": 800.0}
            Journal(run / "journal.jsonl", lambda _: None).log_metrics(4, metrics)
        return self.outputs.pop(0)


@pytest.mark.parametrize(
    ("digests", "remark"),
    [
        (["0123456789"], "3.0 GiB"),
        (["0123456789", "0123456789"], "identical weights: 01234567  3.0 GiB"),
        (["0123456789", "abcdefabcd"], "weights differ: 01234567 abcdefab  3.0 GiB"),
    ],
)
def test_bench_gpu_reports_the_weights_and_memory_of_a_training(
    tmp_path: Path, digests: list[str], remark: str
) -> None:
    suite = FakeSuite(tmp_path, *(f"done step=16 weights=sha256:{digest}" for digest in digests))
    suite.train("deterministic", times=len(digests))
    (row,) = suite.rows
    assert (row.images_per_s, row.remark) == (800, remark)
    assert suite.table().endswith(f" 800      320.0       –       –  {remark}")


@pytest.mark.parametrize(
    ("missing", "words", "names"),
    [
        ("", (), ["bf16: reference", "bf16: plain"]),
        ("a compiler (gcc)", (), ["bf16: reference", "bf16: plain", "bf16: compiled"]),
        ("a compiler (gcc)", ("train.compile=off",), ["bf16: reference", "bf16: plain"]),
    ],
)
def test_bench_gpu_names_what_torch_compile_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, words: tuple[str, ...], names: list[str]
) -> None:
    monkeypatch.setattr(machine, "missing_to_compile", lambda: missing)
    rows = [{"name": name, "images_per_s": 800.0, "ratio": 1.0} for name in ("reference", "plain")]
    suite = FakeSuite(tmp_path, json.dumps({"rows": rows}))
    suite.compare_loops("bf16", *words)
    assert [row.name for row in suite.rows] == names
    assert len(names) == 2 or suite.rows[-1].remark == "torch.compile needs a compiler (gcc), which is missing here"


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
    words = ("--images", str(tmp_path / "images"), "--rounds", "1", "--steps", "1", "--write", str(tmp_path / "docs"))
    result = pipeline("bench", "data", *words, "--json")
    assert result.code == 0, result.err
    rows = json.loads(result.out)["rows"]
    assert [row["name"] for row in rows] == ["reference", "plain", "lossless", "lossy"]
    assert all(set(row) == {"name", "images_per_s", "ratio", "pixel_diff"} for row in rows)
    assert (rows[0]["ratio"], rows[0]["pixel_diff"]) == (1, 0)
    assert rows[1]["pixel_diff"] == rows[2]["pixel_diff"] < 0.1 < rows[3]["pixel_diff"]
    assert "pipeline bench data --images images --rounds 1 --steps 1\n" in (tmp_path / "docs/loaders.md").read_text()
    assert (tmp_path / "docs/loaders.svg").exists()
