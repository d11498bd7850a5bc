"""Benchmarks name what they compare; speeds are never asserted."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, bench, run_together
from test_pack import write_jpegs

SCRIPTS = ("loop", "data", "gpu", "anatomy", "top1", "store")
SIZE = ("--rounds", "1", "--steps", "1")
MAX_CALLS = 200  # Python functions of an update beyond those of the minimal loop: once 832, now 88
MODEL = ("model.arch=shufflenet_v2_x0_5", "augment.size=32", "batch.global=32")


def succeed(name: str, *words: str, **options: Any) -> str:
    return bench(name, *words, **options).ended_with(0).out


def rows(text: str) -> dict[str, dict[str, Any]]:
    """Return the rows of `--json` by name; fail if one has other keys."""
    found = json.loads(text)["rows"]
    assert all(row.keys() - {"note"} == {"name", "images_per_s", "ratio", "pixel_diff"} for row in found)
    return {row["name"]: row for row in found}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_jpegs(tmp_path / "images", train=16, val=0, height=120, width=160) / "train"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_describes_itself(name: str) -> None:
    assert f"\n  python benchmarks/{name}.py" in succeed(name, "--help")
    assert set(SCRIPTS) == {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"rounds"}


@pytest.mark.parametrize(
    ("words", "line"),
    [("data --images=nosuch", "--images nosuch"), ("store bucket --images=nosuch", "bucket is not allowed"),
     ("loop nosuch", "'nosuch' is not key=value"), ("gpu --only chekcs", "chekcs"),
     ("top1 nosuch", "recipe 'nosuch' is unknown")],
)  # fmt: skip
def test_a_wrong_request_is_one_line(words: str, line: str) -> None:
    assert line in bench(*words.split()).ended_with(2).error


def test_our_loop_is_compared_with_others(full: bool) -> None:
    names = ["torchvision", "timm", "plain", "loaded"] if full else ["timm", "plain"]
    found = rows(succeed("loop", *SIZE, *MODEL, *(f"--only={name}" for name in names), "--json"))
    assert list(found) == ["reference", *names]
    assert found["reference"]["ratio"] == 1
    assert all(row["images_per_s"] for row in found.values())


@pytest.mark.full
def test_exact_mode_a_recipe_and_our_loader_are_compared(digits: Path, photos: Path) -> None:
    exact = (*SIZE, *MODEL, "run.exact=true", "exact.shards=4", "--only=plain", "--json")
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert list(rows(succeed("loop", *exact, launcher=torchrun))) == ["reference", "plain"]
    words = ("digits", f"data.root={digits}", "--seeds", "1", "train.max_steps=3", "run.device=cpu")
    text = succeed("top1", *words, *MODEL, "track.every=1 steps", "track.report=false")
    assert re.match(r"seed 0, \d+ s: digits [01]\.\d{4}, plain [01]\.\d{4}\n", text)
    found = rows(succeed("data", "--images", str(photos), *SIZE, "--peers", "--json"))
    peers = ["torchvision", "simplejpeg", "dali", "litdata"]
    assert list(found) == ["reference", "plain", "lossless", "lossy", *peers]
    for name, row in found.items():
        assert row["images_per_s"] or (name in peers[2:] and "not installed" in row["note"]), row
    plain, lossless, lossy = (found[name]["pixel_diff"] for name in ("plain", "lossless", "lossy"))
    assert plain == lossless < 0.1 < lossy


def gpu_parts(tmp_path: Path, photos: Path, parts: tuple[str, ...], *more: str) -> str:
    """Run parts on the CPU in miniature, as a user does, where mlflow and docker are missing."""
    for module in ("mlflow", "docker"):
        (tmp_path / f"{module}.py").write_text("raise ImportError\n")
    flags = [*(f"--only={part}" for part in parts), "--quick", "--batch=8", f"--images={photos}"]
    words = ("run.device=cpu", *MODEL[:2], "data.num_images=64", *more)
    file = tmp_path / "rows.txt"
    # one CPU: two threads would wait for each other on a busy machine
    command = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0))), sys.executable]
    command += [str(ROOT / "benchmarks/gpu.py"), *flags, f"--write={file}", *words]
    out = run_together([command], [{"PYTHONPATH": f"{tmp_path}:{ROOT}"}]).ended_with(0).out
    assert file.read_text().splitlines() == out.splitlines()[:-1]
    return out


@pytest.mark.full
def test_the_parts_for_a_gpu_run_on_the_cpu(tmp_path: Path, photos: Path) -> None:
    text = gpu_parts(tmp_path, photos, ("pack", "anatomy", "graphs", "cifar"))
    expected = (
        "pipeline data pack +packed .* 0 bad", r"loaded .*images/s .*CPU [\d.]+ ms an image", "pack +done",
        "machine .*torch 2", r"speed +ours [\d.]+ ms, bare [\d.]+ ms, ratio",
        "hidden waits +not run: needs a GPU", r"calls +ours [\d,]+, bare [\d,]+, (?P<more>[\d,]+) more",
        "anatomy +done", "not run: needs a GPU", "not run: give --cifar DIR",
    )  # fmt: skip
    found = re.search(".*".join(rf"^  {row}" for row in expected), text, re.MULTILINE | re.DOTALL)
    assert found, text
    assert "FAILED" not in text
    assert int(found["more"].replace(",", "")) < MAX_CALLS


@pytest.mark.full
def test_what_stops_and_resumes_a_run_is_checked(tmp_path: Path, photos: Path) -> None:
    more = ("train.max_steps=10", "checkpoint.every=2 steps")
    text = gpu_parts(tmp_path, photos, ("checks", "jpeg"), *more)
    for row in (
        "SIGKILL +ok: exit -9", "SIGTERM +ok: exit 75", "resumed +ok: weights", "deterministic +ok: weights",
        "exact-again +ok: weights", "digits +FAILED: top1=", "doctor +ok", "nan +ok: .*not saved",
        "loaded .*images/s",
    ):  # fmt: skip
        assert re.search(rf"^  {row}", text, re.MULTILINE), text
