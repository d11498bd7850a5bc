"""A window of steps is traced, and nothing else is."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from pipeline.config.load import load
from pipeline.errors import RequestError
from pipeline.telemetry.profiler import Profiler


@pytest.mark.parametrize("start", [0, 1])
def test_the_steps_that_are_asked_for_are_in_the_trace(tmp_path: Path, start: int) -> None:
    said: list[str] = []
    profile = Profiler(start + 1, 3, tmp_path / "report", torch.device("cpu"), said.append)
    for step in range(5):
        if step:
            torch.full((step, 7), 1.0).sum()
            with torch.profiler.record_function(f"step {step}"):
                pass
        profile.at_step(step)
    file = tmp_path / "report" / f"profile-steps-{start + 1}-3.json.gz"
    assert said == [f"profile of steps {start + 1} to 3: {file}"]
    names = {event["name"] for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    assert {name for name in names if name.startswith("step ")} == {f"step {n}" for n in range(start + 1, 4)}


def test_a_run_that_goes_on_within_the_window_has_no_trace(tmp_path: Path) -> None:
    profile = Profiler(2, 4, tmp_path, torch.device("cpu"), print)
    for step in range(3, 6):
        profile.at_step(step)
    assert not list(tmp_path.iterdir())


def test_a_window_is_read_in_either_way_and_has_an_order() -> None:
    assert load("digits", ["profile.steps=20-24"]).profile.steps == (20, 24)
    assert load("digits", ["profile.steps=[20, 24]"]).profile.steps == (20, 24)
    assert load("digits", []).profile.steps is None
    with pytest.raises(RequestError, match="give the smaller number first"):
        load("digits", ["profile.steps=24-20"])
    with pytest.raises(RequestError, match=r"profile.steps=soon is not allowed"):
        load("digits", ["profile.steps=soon"])
