"""Benchmarks say what they compare with what; figures are never asserted."""

import json

import pytest
from harness import pipeline

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
        (("train",), ["reference", "plain", "loaded"]),
        (("comm", "--nproc", "2"), ["reference", "exact"]),
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
