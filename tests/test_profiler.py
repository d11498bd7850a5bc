"""The profiler records only the requested window of steps."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from pipeline.addons.ops.profiler import Profiler
from pipeline.config.load import load
from pipeline.errors import RequestError


@pytest.mark.parametrize("start", [0, 1])
def test_the_profile_contains_the_requested_steps(tmp_path: Path, start: int) -> None:
    lines: list[str] = []
    profile = Profiler(start + 1, 3, tmp_path / "report", torch.device("cpu"), lines.append)
    for step in range(5):
        if step:
            torch.full((step, 7), 1.0).sum()
            with torch.profiler.record_function(f"step {step}"):
                pass
        profile.at_step(step)
    file = tmp_path / "report" / f"profile-steps-{start + 1}-3.json.gz"
    assert lines == [f"profile of steps {start + 1} to 3: {file}"]
    names = {event["name"] for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    assert {name for name in names if name.startswith("step ")} == {f"step {n}" for n in range(start + 1, 4)}


def test_a_run_that_resumes_inside_the_window_writes_no_profile(tmp_path: Path) -> None:
    profile = Profiler(2, 4, tmp_path, torch.device("cpu"), print)
    for step in range(3, 6):
        profile.at_step(step)
    assert not list(tmp_path.iterdir())


def test_a_window_of_steps_has_two_notations_and_must_be_ascending() -> None:
    assert load("digits", ["profile.steps=20-24"]).profile.steps == (20, 24)
    assert load("digits", ["profile.steps=[20, 24]"]).profile.steps == (20, 24)
    assert load("digits", []).profile.steps is None
    with pytest.raises(RequestError, match="give the smaller number first"):
        load("digits", ["profile.steps=24-20"])
    with pytest.raises(RequestError, match=r"profile.steps=soon is not allowed"):
        load("digits", ["profile.steps=soon"])
