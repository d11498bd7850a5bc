"""A resume needs no pretrained weights, moves between folders, and keeps the best model."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import SMALL, Place
from harness import environment

from pipeline import errors
from pipeline.config.load import load
from pipeline.errors import NotFiniteError, RequestError, StorageError, TemporaryError
from pipeline.operate.launch import _config_after_restart
from pipeline.record.checkpoint_files import step_of
from pipeline.record.folder import RunFolder
from pipeline.record.journal import Journal


def test_a_run_resumes_without_its_pretrained_weights(place: Place) -> None:
    tuned = ("run.dir=runs/tuned", "model.init=runs/done")
    assert place.train(*tuned)[0] == 0
    (place.path / "runs/done").rename(place.path / "runs/elsewhere")
    code, err = place.train(*tuned, "train.max_steps=2")
    assert code == 0, err
    assert place.doctor(*tuned, "train.max_steps=2")[0] == 0
    code, err = place.train("run.dir=runs/other", "model.init=runs/done")
    assert code == 2, "a fresh start needs them"
    assert "model.init=runs/done is neither a file or folder here" in err


def test_a_run_resumed_in_another_folder_keeps_its_best_model(place: Place) -> None:
    (best,) = place.events("done", "ended")
    words = (
        "run.dir=runs/other",
        "run.resume=runs/done",
        "train.max_steps=3",
        "checkpoint.keep=1",
        "optimizer.lr=1e-9",
    )
    shutil.rmtree(place.path / "runs/done")
    assert place.train("run.dir=runs/done", "optimizer.lr=1e-9")[0] == 0  # so slow that no later step is better
    code, err = place.train(*words)
    assert code == 0, err
    (ended,) = place.events("other", "ended")
    assert ended["best"]["step"] == best["best"]["step"] == 1
    assert [step_of(path) for path in place.checkpoints("other")] == [1, 3]


def test_the_best_model_is_chosen_again_if_its_checkpoint_is_lost(place: Place) -> None:
    words = ("run.dir=runs/slow", "optimizer.lr=1e-9")
    assert place.train(*words)[0] == 0
    assert place.train(*words, "train.max_steps=2", "checkpoint.keep=1")[0] == 0
    first, second = place.checkpoints("slow")
    assert place.events("slow", "ended")[-1]["best"]["step"] == step_of(first) == 1
    first.unlink()
    code, err = place.train(*words, "train.max_steps=3")
    assert code == 0
    assert "the checkpoint of the best model, step 1, is not in the run's folder" in err
    best = place.events("slow", "ended")[-1]["best"]
    assert best["step"] > step_of(second)
    assert (place.path / "runs/slow/checkpoints" / best["file"]).exists()


def test_a_restart_resumes_from_the_same_checkpoint_until_the_run_saves_one(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "launch")
    run = RunFolder(place.path / "runs/other")
    run.checkpoints.mkdir(parents=True)

    def resumes_from(word: str) -> str:
        return _config_after_restart(load("digits", [f"run.dir={run.path}", f"run.resume={word}"])).run.resume

    named, (checkpoint,) = str(place.path / "runs/done"), place.checkpoints()
    assert resumes_from(named) == named, "this launch has trained nothing yet"
    Journal(run.journal, pytest.fail).log_event("started", launch="launch", checkpoint=checkpoint.name)
    later = checkpoint.with_name(checkpoint.name.replace("-00000001.", "-00000002."))
    shutil.copy(checkpoint, later)
    assert resumes_from(named) == str(checkpoint), "the folder has a newer checkpoint, but the run has saved none yet"
    assert resumes_from(str(checkpoint)) == str(checkpoint)
    assert resumes_from("never") == "auto"
    shutil.copy(checkpoint, run.checkpoints)
    assert resumes_from(named) == str(checkpoint), "a copy of the checkpoint of the best model"
    shutil.copy(checkpoint, run.checkpoints / later.name)
    assert resumes_from(named) == "auto"


def test_a_finished_run_resumed_in_another_folder_is_saved_there(place: Place) -> None:
    slow = ("optimizer.lr=1e-9", "train.max_steps=2")  # so slow that the first model stays the best
    for last in ("train.max_steps=1", "train.max_steps=2"):  # both are evaluated
        assert place.train("run.dir=runs/slow", *slow, last)[0] == 0
    code, err = place.train("run.dir=runs/other", "run.resume=runs/slow", *slow)
    assert code == 0, err
    assert [step_of(path) for path in place.checkpoints("other")] == [1, 2], "the best and the last"
    assert place.events("other", "ended")[-1]["best"]["step"] == 1
    code, err = place.train("run.dir=runs/other", *slow)
    assert code == 0, err
    assert "already finished" in err


@pytest.mark.parametrize("by_signal", [True, False])
def test_a_run_can_be_stopped_while_it_reads_a_checkpoint(place: Place, by_signal: bool) -> None:
    """Make reading hang, as on dead storage: a signal stops the run, or else the watchdog."""
    program = f"""\
import sys, time
from pipeline.record import checkpoint_files
from pipeline.cli.main import main
checkpoint_files.read_verified = lambda path: print("reading", flush=True) or time.sleep(60)
sys.exit(main({["train", "digits", *SMALL, "run.dir=runs/done", "run.timeout=1"]}))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=place.path, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout
    assert process.stdout.readline() == "reading\n"
    start = time.monotonic()
    if by_signal:
        process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (75 if by_signal else 1), err
    assert ("asked to stop before a step was made" if by_signal else "rank 0 made no progress for") in err
    assert time.monotonic() - start < (5 if by_signal else 30)


def test_training_keeps_no_checkpoint_in_memory(place: Place) -> None:
    program = f"""\
import gc, sys
from pipeline.cli.main import main
from pipeline.train import resume, session
train = session.train
def train_and_inspect(*arguments, **options):
    gc.unfreeze()
    kept = [item for item in gc.get_objects() if isinstance(item, (resume.VerifiedCheckpoint, session.Prepared))]
    print([type(item).__name__ for item in kept], flush=True)
    return train(*arguments, **options)
session.train = train_and_inspect
sys.exit(main({["train", "digits", *SMALL, "run.dir=runs/done", "train.max_steps=2"]}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=place.path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "resuming from" in done.stderr
    assert done.stdout.splitlines()[0] == "[]"


@pytest.mark.parametrize("code", [2, 3, 4, 75])
def test_a_permanent_failure_is_repeated_by_the_next_start_of_the_same_request(tmp_path: Path, code: int) -> None:
    kinds = {kind.code: kind for kind in (RequestError, NotFiniteError, StorageError, TemporaryError)}
    errors.save_failure(tmp_path, kinds[code]("why"), "a request")
    failure = errors.load_failure(tmp_path, "a request")
    assert (failure and (failure.code, str(failure))) == (None if code == 75 else (code, "why"))
    assert errors.load_failure(tmp_path, "another") is None
    if code != 75:
        (tmp_path / "failure.json").rename(tmp_path / "verdict.json")  # as version 0.1 called it
        assert str(errors.load_failure(tmp_path, "a request")) == "why"
    errors.clear_failure(tmp_path)
    assert errors.load_failure(tmp_path, "a request") is None


def test_a_failed_compilation_is_repeated_by_the_next_start(place: Place) -> None:
    # the ranks find it, after all checks of a start
    (place.path / "g++").write_text("#!/bin/sh\necho this compiler fails >&2\nexit 1\n")
    (place.path / "g++").chmod(0o755)
    fails = {"PATH": f"{place.path}:{os.environ['PATH']}", "TORCHINDUCTOR_CACHE_DIR": str(place.path / "cache")}
    words = ("run.dir=runs/compiled", "model.arch=squeezenet1_1", "train.compile=on")
    code, err = place.train(*words, **fails)
    assert code == 2, err
    assert "squeezenet1_1 cannot be compiled: train with train.compile=off" in err
    assert "start again with run.resume=never" in err
    for command in (place.doctor, place.train):
        code, err = command(*words)
        assert code == 2
        assert "cannot be compiled" in err
        assert "creating" not in err, "it fails at once"
    assert place.train(*words, "train.compile=off")[0] == 0


@pytest.mark.parametrize("word", ["run.resume=never", "run.resume=runs/done"])
def test_commands_that_replace_lost_nodes_refuse_every_run_resume_but_auto(place: Place, word: str) -> None:
    for command in (("k8s", "render", "digits"), ("rehearse", "digits", "--nodes", "2")):
        result = place.forked(*command, word, cwd=place.path)
        assert result.code == 2
        assert f"{word} would apply again to each node that replaces a lost one" in result.err
