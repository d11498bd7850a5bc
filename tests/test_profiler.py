"""The profiler records only the requested window of steps."""

import gzip
import json
from pathlib import Path

import pytest
from harness import SMALL, Job

from pipeline.config.load import load
from pipeline.errors import RequestError


def test_the_profile_contains_the_requested_steps(tmp_path: Path, digits: Path) -> None:
    words = ["digits", f"data.root={digits}", *SMALL, "data.workers=0"]
    run = Job(tmp_path / "run", [*words, "train.max_steps=3", "profile.steps=2-3"])
    result = run.run()
    file = run.folder / "report/profile-steps-2-3.json.gz"
    assert f"profile of steps 2 to 3: {file}" in result.err
    names = [event["name"] for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]]
    assert sum(name.startswith("Optimizer.step#") for name in names) == 2
    run.arguments[-2:] = ["train.max_steps=5", "profile.steps=3-5"]
    run.finished()
    assert len([*run.folder.glob("report/profile*")]) == 1, "a run that resumes in the window records nothing"


def test_a_window_of_steps_has_two_notations_and_must_be_ascending() -> None:
    assert load("digits", ["profile.steps=20-24"]).profile.steps == (20, 24)
    assert load("digits", ["profile.steps=[20, 24]"]).profile.steps == (20, 24)
    for wrong in ("24-20", "soon"):
        with pytest.raises(RequestError, match=r"profile\.steps"):
            load("digits", [f"profile.steps={wrong}"])
