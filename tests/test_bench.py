"""Benchmarks name what they compare; speeds are never asserted."""

import json
import re
from pathlib import Path

import pytest
from harness import bench
from test_pack import encoded, photo

ROOT = Path(__file__).parent.parent
SCRIPTS = ("loop", "data", "comm", "track", "gpu", "top1", "store")
SIZE = ("--rounds", "1", "--steps", "1")
MODEL = ("model.arch=shufflenet_v2_x0_5", "augment.size=32", "batch.global=32")


def rows(text: str) -> list[dict[str, object]]:
    """Return the rows of `--json`; fail if one has other keys."""
    found: list[dict[str, object]] = json.loads(text)["rows"]
    assert all(row.keys() - {"note"} == {"name", "images_per_s", "ratio", "pixel_diff"} for row in found)
    return found


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number in range(16):
        path = tmp_path / "images" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(photo(120, 160, number), subsampling=0, quality=90))
    return tmp_path / "images"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_describes_itself(name: str) -> None:
    result = bench(name, "--help")
    assert result.code == 0, result.err
    assert f"\n  python benchmarks/{name}.py" in result.out or name == "comm"
    assert set(SCRIPTS) == {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"rounds", "peers"}


@pytest.mark.parametrize(
    ("words", "line"),
    [("data --images=nosuch", "--images nosuch"), ("store bucket --images=nosuch", "bucket is not allowed"),
     ("loop nosuch", "'nosuch' is not key=value"), ("gpu --only chekcs", "chekcs"),
     ("top1 nosuch", "recipe 'nosuch' is unknown")],
)  # fmt: skip
def test_a_wrong_request_is_one_line(words: str, line: str) -> None:
    name, *rest = words.split()
    result = bench(name, *rest)
    assert result.code == 2
    assert line in result.error


def test_our_loop_is_compared_with_others() -> None:
    result = bench("loop", *SIZE, *MODEL, "--json")
    assert result.code == 0, result.err
    found = rows(result.out)
    assert [row["name"] for row in found] == ["reference", "torchvision", "timm", "plain", "loaded"]
    assert found[0]["ratio"] == 1
    assert all(row["images_per_s"] for row in found)


@pytest.mark.full
def test_exact_mode_tracking_and_a_recipe_are_compared(digits: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    result = bench("comm", *SIZE, *MODEL, "exact.shards=4", "--json", launcher=torchrun)
    assert result.code == 0, result.err
    assert [row["name"] for row in rows(result.out)] == ["reference", "exact"]
    result = bench("track", "track.every=1 step", *SIZE, *MODEL)
    assert re.search(r"  tracked .* [\d.]+ ms per step in the loop", result.out), result.out + result.err
    words = ("digits", f"data.root={digits}", "--seeds", "1", "train.max_steps=3", "run.device=cpu")
    result = bench("top1", *words, *MODEL, "track.every=1 steps", "track.report=false")
    assert result.code == 0, result.err
    assert re.fullmatch(r"seed 0, \d+ s: digits [01]\.\d{4}, plain [01]\.\d{4}", result.out.splitlines()[0])


@pytest.mark.full
def test_a_part_runs_without_mlflow(tmp_path: Path, photos: Path) -> None:
    """Run the parts in miniature on a CPU, where mlflow and docker cannot be imported."""
    for module in ("mlflow", "docker"):
        (tmp_path / f"{module}.py").write_text("raise ImportError\n")
    words = ["run.device=cpu", *MODEL[:2], "data.num_images=64"]
    expected = {
        "jpeg": ("reference .*images/s", "plain .*images/s", "loaded .*images/s"),
        "checks": ("doctor +ok", "digits +FAILED: top1=", "deterministic-again +ok: weights",
                   "exact-again +ok: weights", "SIGTERM +ok: exit 75", "SIGKILL +ok: exit -9",
                   "resumed +ok: weights"),
    }  # fmt: skip
    for part, found in expected.items():
        flags = ["--only", part, "--batch", "8", "--images", str(photos)]
        more = ["train.max_steps=10", "checkpoint.every=2 steps"] if part == "checks" else []
        result = bench("gpu", *flags, *words, *more, PYTHONPATH=f"{tmp_path}:{ROOT}")
        assert result.code == 0, result.err
        for text in found:
            assert re.search(rf"^  {text}", result.out, re.MULTILINE), result.out + result.err


@pytest.mark.full
def test_our_loader_is_compared_with_others(photos: Path) -> None:
    result = bench("data", "--images", str(photos), *SIZE, "--peers", "--json")
    assert result.code == 0, result.err
    found = {str(row["name"]): row for row in rows(result.out)}
    peers = ["torchvision", "simplejpeg", "spdl", "dali", "litdata"]
    assert list(found) == ["reference", "plain", "lossless", "lossy", *peers]
    for name, row in found.items():
        assert row["images_per_s"] or (name in peers[2:] and "not installed" in str(row["note"])), row
    assert (found["reference"]["ratio"], found["reference"]["pixel_diff"]) == (1, 0)
    plain, lossless, lossy = (
        float(str(found[name]["pixel_diff"])) for name in ("plain", "lossless", "lossy")
    )
    assert plain == lossless < 0.1 < lossy
