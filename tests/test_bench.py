"""Benchmarks say what they compare with what; figures are never asserted."""

import json
from pathlib import Path

import pytest
from harness import pipeline
from test_pack import encoded, photo

QUICK = (
    "--rounds",
    "1",
    "--steps",
    "1",
    "model.arch=shufflenet_v2_x0_5",
    "augment.size=32",
    "batch.global=32",
    "--json",
)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("train",), ["reference", "torchvision", "plain", "loaded"]),
        pytest.param(("track", "track.every=1 step"), ["reference", "tracked"], marks=pytest.mark.full),
        pytest.param(("comm", "--nproc", "2"), ["reference", "exact"], marks=pytest.mark.full),
    ],
)
def test_a_benchmark_has_its_rows(words: tuple[str, ...], names: list[str]) -> None:
    result = pipeline("bench", *words, *QUICK)
    assert result.code == 0, result.err
    rows = json.loads(result.out)["rows"]
    assert [row["name"] for row in rows] == names
    assert all(set(row) == {"name", "images_per_s", "ratio", "pixel_diff"} for row in rows)
    assert rows[0]["ratio"] == 1
    assert all(row["images_per_s"] > 0 for row in rows)


@pytest.mark.full
def test_the_bench_of_the_loader_has_its_rows_and_their_pixels(tmp_path: Path) -> None:
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
    assert "pipeline bench data --images images --rounds 1 --steps 1\n" in (tmp_path / "docs/benchmarks.md").read_text()
    assert (tmp_path / "docs/benchmarks.svg").exists()
