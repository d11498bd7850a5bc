"""What a resumption needs and what it does not: first weights, the folder's place, the checkpoint of the best model."""

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
from pipeline.record.checkpoint import step_of
from pipeline.record.folder import RunFolder
from pipeline.record.journal import Journal


def test_a_run_resumes_without_its_first_weights(place: Place) -> None:
    tuned = ("run.dir=runs/tuned", "model.init=runs/done")
    assert place.train(*tuned)[0] == 0
    (place.path / "runs/done").rename(place.path / "runs/elsewhere")
    code, said = place.train(*tuned, "train.max_steps=2")
    assert code == 0, said
    assert place.doctor(*tuned, "train.max_steps=2")[0] == 0
    code, said = place.train("run.dir=runs/other", "model.init=runs/done")
    assert code == 2, "a fresh start needs them"
    assert "model.init=runs/done is neither a file or folder here" in said


def test_a_run_that_goes_on_in_another_folder_takes_its_best_model_along(place: Place) -> None:
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
    code, said = place.train(*words)
    assert code == 0, said
    (ended,) = place.events("other", "ended")
    assert ended["best"]["step"] == best["best"]["step"] == 1
    assert [step_of(path) for path in place.checkpoints("other")] == [1, 3]


def test_a_best_model_whose_checkpoint_is_lost_is_chosen_again(place: Place) -> None:
    words = ("run.dir=runs/slow", "optimizer.lr=1e-9")
    assert place.train(*words)[0] == 0
    assert place.train(*words, "train.max_steps=2", "checkpoint.keep=1")[0] == 0
    first, second = place.checkpoints("slow")
    assert place.events("slow", "ended")[-1]["best"]["step"] == step_of(first) == 1
    first.unlink()
    code, said = place.train(*words, "train.max_steps=3")
    assert code == 0
    assert "the checkpoint of the best model, step 1, is not in the run's folder" in said
    best = place.events("slow", "ended")[-1]["best"]
    assert best["step"] > step_of(second)
    assert (place.path / "runs/slow/checkpoints" / best["file"]).exists()


def test_a_restart_resumes_from_the_same_checkpoint_until_the_run_has_one_of_its_own(
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
    assert resumes_from(named) == str(checkpoint), "the folder has a newer one by now, the run has saved nothing yet"
    assert resumes_from(str(checkpoint)) == str(checkpoint)
    assert resumes_from("never") == "auto"
    shutil.copy(checkpoint, run.checkpoints)
    assert resumes_from(named) == str(checkpoint), "a copy of the checkpoint of the best model"
    shutil.copy(checkpoint, run.checkpoints / later.name)
    assert resumes_from(named) == "auto"


def test_a_finished_run_that_moves_to_another_folder_is_saved_there(place: Place) -> None:
    slow = ("optimizer.lr=1e-9", "train.max_steps=2")  # so slow that the first model stays the best
    for last in ("train.max_steps=1", "train.max_steps=2"):  # both are evaluated
        assert place.train("run.dir=runs/slow", *slow, last)[0] == 0
    code, said = place.train("run.dir=runs/other", "run.resume=runs/slow", *slow)
    assert code == 0, said
    assert [step_of(path) for path in place.checkpoints("other")] == [1, 2], "the best and the last"
    assert place.events("other", "ended")[-1]["best"]["step"] == 1
    code, said = place.train("run.dir=runs/other", *slow)
    assert code == 0, said
    assert "already finished" in said


@pytest.mark.parametrize("asks", [True, False])
def test_a_checkpoint_that_takes_long_to_read_keeps_nobody_from_stopping(place: Place, asks: bool) -> None:
    """Reading hangs, as on a storage that does not answer: a signal is obeyed, and else the watchdog ends it."""
    program = f"""\
import sys, time
from pipeline.record import checkpoint
from pipeline.cli.main import main
checkpoint.read_verified = lambda path: print("reading", flush=True) or time.sleep(60)
sys.exit(main({["train", "digits", *SMALL, "run.dir=runs/done", "run.timeout=1"]}))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=place.path, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout
    assert process.stdout.readline() == "reading\n"
    start = time.monotonic()
    if asks:
        process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == (75 if asks else 1), said
    assert ("asked to stop before a step was made" if asks else "rank 0 made no progress for") in said
    assert time.monotonic() - start < (5 if asks else 30)


def test_training_keeps_no_checkpoint_in_memory(place: Place) -> None:
    program = f"""\
import gc, sys
from pipeline.cli.main import main
from pipeline.train import resume, session
train = session.train
def looked_at(*arguments, **options):
    gc.unfreeze()
    print([type(one).__name__ for one in gc.get_objects() if isinstance(one, (resume.Found, session.Prepared))], flush=True)
    return train(*arguments, **options)
session.train = looked_at
sys.exit(main({["train", "digits", *SMALL, "run.dir=runs/done", "train.max_steps=2"]}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=place.path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "resuming from" in done.stderr
    assert done.stdout.splitlines()[0] == "[]"


@pytest.mark.parametrize("code", [2, 3, 4, 75])
def test_a_failure_for_good_is_repeated_by_the_next_start_of_the_same_request(tmp_path: Path, code: int) -> None:
    kinds = {kind.code: kind for kind in (RequestError, NotFiniteError, StorageError, TemporaryError)}
    errors.save_failure(tmp_path, kinds[code]("why"), "a request")
    left = errors.load_failure(tmp_path, "a request")
    assert (left and (left.code, str(left))) == (None if code == 75 else (code, "why"))
    assert errors.load_failure(tmp_path, "another") is None


def test_what_is_found_when_the_model_is_compiled_is_left_for_the_next_start(place: Place) -> None:
    # ranks find it, after every check of a start
    (place.path / "g++").write_text("#!/bin/sh\necho this compiler fails >&2\nexit 1\n")
    (place.path / "g++").chmod(0o755)
    fails = {"PATH": f"{place.path}:{os.environ['PATH']}", "TORCHINDUCTOR_CACHE_DIR": str(place.path / "cache")}
    words = ("run.dir=runs/compiled", "model.arch=squeezenet1_1", "train.compile=on")
    code, said = place.train(*words, **fails)
    assert code == 2, said
    assert "squeezenet1_1 cannot be compiled: train with train.compile=off" in said
    assert "start again with run.resume=never" in said
    for again in (place.doctor, place.train):
        code, said = again(*words)
        assert code == 2
        assert "cannot be compiled" in said
        assert "creating" not in said, "at once"
    assert place.train(*words, "train.compile=off")[0] == 0


@pytest.mark.parametrize("word", ["run.resume=never", "run.resume=runs/done"])
def test_what_replaces_lost_nodes_refuses_to_resume_from_anywhere_but_the_run(place: Place, word: str) -> None:
    for command in (("k8s", "render", "digits"), ("rehearse", "digits", "--nodes", "2")):
        result = place.forked(*command, word, cwd=place.path)
        assert result.code == 2
        assert f"{word} would apply again to each node that replaces a lost one" in result.err
