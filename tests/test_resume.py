"""A resume needs no pretrained weights, moves between folders, and keeps the best model."""

import os
import shutil
import signal

import forked
import pytest
from harness import environment, kill, quick, save_checkpoint, wait_until
from place import SMALL, Place

from pipeline.addons.deploy.restart import config_after_restart
from pipeline.config.load import load
from pipeline.record.checkpoint_contents import decode
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
    assert "model.init=runs/done does not exist" in err


def test_a_run_resumed_in_another_folder_keeps_its_best_model(place: Place) -> None:
    slow = ("optimizer.lr=1e-9", "checkpoint.keep=1")  # so slow that the first model stays the best
    for steps in (1, 2):  # both are evaluated
        assert place.train("run.dir=runs/slow", *slow, f"train.max_steps={steps}")[0] == 0
    (best, _) = (event["best"]["step"] for event in place.events("slow", "ended"))
    for steps, kept in ((2, [1, 2]), (3, [1, 3])):  # a finished run is copied, and then continued
        words = ("run.dir=runs/other", "run.resume=runs/slow" if steps == 2 else "run.resume=auto")
        code, err = place.train(*words, *slow, f"train.max_steps={steps}")
        assert code == 0, err
        assert [step_of(path) for path in place.checkpoints("other")] == kept, "the best and the last"
        assert place.events("other", "ended")[-1]["best"]["step"] == best == 1
    code, err = place.train("run.dir=runs/other", *slow, "train.max_steps=3")
    assert (code, "already finished" in err) == (0, True), err


def test_a_run_resumes_after_its_recipe_was_renamed(place: Place) -> None:
    recipe = place.path / "first.yaml"
    recipe.write_text("run: {dir: runs/named}\n")
    assert quick("train", "first.yaml", *SMALL, cwd=place.path).code == 0
    recipe.rename(place.path / "second.yaml")
    resumed = quick("train", "second.yaml", *SMALL, "train.max_steps=2", cwd=place.path)
    assert resumed.code == 0, resumed.err
    starts = [(row["step"], row["tags"]["recipe"]) for row in place.events("named", "started")]
    assert starts == [(0, "first"), (1, "second")]


def test_a_checkpoint_of_another_run_is_refused(place: Place) -> None:
    """The folder's own files would be taken for its best model, and the journal continued."""
    slow = ("optimizer.lr=1e-9", "train.max_steps=3")  # so slow that the first model stays the best
    for steps in (1, 2):
        assert place.train("run.dir=runs/slow", *slow, f"train.max_steps={steps}")[0] == 0
    lone = place.path / "lone"
    lone.mkdir()
    shutil.copy(place.checkpoints("slow")[-1], lone)
    for command in (place.doctor, place.train):
        code, err = command("run.dir=runs/done", "run.resume=lone", *slow)
        assert (code, "run.resume=lone is of another run than that in runs/done" in err) == (2, True), err
    for _ in range(2):  # the second start of the command resumes from the same checkpoint
        code, err = place.train("run.dir=runs/new", "run.resume=lone", *slow)
        assert code == 0, err
    best = place.events("new", "ended")[-1]["best"]
    assert best["step"] >= 2, "the file of step 1 is not there: the best is chosen again"
    assert (place.path / "runs/new/checkpoints" / best["file"]).exists()
    (copy,) = lone.iterdir()
    code, err = place.train("run.dir=runs/slow", f"run.resume={copy}", *slow)
    assert code == 0, f"a copy of its own checkpoint: {err}"


def test_a_run_whose_checkpoints_are_lost_is_never_trained_again_silently(place: Place) -> None:
    for path in place.checkpoints():
        path.unlink()
    before = (place.path / "runs/done/journal.jsonl").read_bytes()
    code, err = place.train("run.dir=runs/done", "train.max_steps=2")
    assert code == 4, err
    assert "runs/done holds no checkpoint, and its journal names step-0000" in err
    assert (place.path / "runs/done/journal.jsonl").read_bytes() == before


def test_a_restart_resumes_from_the_same_checkpoint_until_the_run_saves_one(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "launch")
    run = RunFolder(place.path / "runs/other")
    run.checkpoints.mkdir(parents=True)

    def resumes_from(word: str) -> str:
        return config_after_restart(load("digits", [f"run.dir={run.path}", f"run.resume={word}"])).run.resume

    named, (checkpoint,) = str(place.path / "runs/done"), place.checkpoints()

    def log_start(word: str, launch: str) -> None:
        journal.log_event("started", launch=launch, resume=word, checkpoint=checkpoint.name)

    journal = Journal(run.journal, pytest.fail)
    assert resumes_from(named) == named, "this launch has trained nothing yet"
    log_start(named, "an earlier launch")
    assert resumes_from(named) == named
    log_start(named, "launch")
    shutil.copy(checkpoint, checkpoint.with_name(checkpoint.name.replace("-00000001.", "-00000002.")))
    assert resumes_from(named) == str(checkpoint), "not the newer one: the run has saved none yet"
    shutil.copy(checkpoint, run.checkpoints)
    assert resumes_from(named) == "auto", "the start has copied it"
    assert resumes_from("never") == "never", "it was asked for after a failure, under the same --rdzv-id"
    log_start("never", "launch")
    assert resumes_from("never") == "auto"


@pytest.mark.fault("J3")
@pytest.mark.parametrize("kind", ["empty folder", "link to nothing"])
def test_a_restart_waits_for_data_that_is_away(place: Place, kind: str) -> None:
    images, resume = place.path / "images", ("run.dir=runs/done", "train.max_steps=2")
    images.rename(place.path / "away")
    images.mkdir() if kind == "empty folder" else images.symlink_to("/nowhere/images")
    code, err = place.train(*resume)
    assert code == 75, err
    assert "data.root=images is missing or empty, and the run in runs/done was trained on it" in err
    if kind == "empty folder":
        assert place.train("run.dir=runs/new")[0] == 2, "no earlier start had this data"
        images.rmdir()
    else:
        images.unlink()
    (place.path / "away").rename(images)
    code, err = place.train(*resume)
    assert code == 0, err


@pytest.mark.parametrize("run", ["images/val/class-0001/runs/x", "store/runs/x"])
def test_a_run_folder_among_the_images_is_refused(place: Place, run: str) -> None:
    classes, store = place.path / "images/train/class-0001", place.path / "store"
    classes.rename(store)
    classes.symlink_to(store)
    code, err = place.train(f"run.dir={run}")
    assert (code, f"run.dir={run} is among the images of data.root=images" in err) == (2, True), err
    assert not (place.path / run / "journal.jsonl").exists()
    assert place.train("run.dir=images/runs")[0] == 0, "beside train/ and val/ there are no images"


def test_a_damaged_copy_of_the_checkpoint_is_replaced(place: Place) -> None:
    (place.path / "runs/new/checkpoints").mkdir(parents=True)
    (checkpoint,) = place.checkpoints()
    (place.path / "runs/new/checkpoints" / checkpoint.name).write_bytes(b"x")
    words = ("run.dir=runs/new", "checkpoint.every=1000 epochs", "train.max_steps=2")
    assert place.train("run.resume=runs/done", *words)[0] == 0
    assert (place.path / "runs/new/checkpoints" / checkpoint.name).read_bytes() == checkpoint.read_bytes()


NET = """\
from torch import nn

def net(num_classes):
    return nn.Sequential(nn.Conv2d(3, {width}, 3), nn.BatchNorm2d({width}), nn.AdaptiveAvgPool2d(1),
                         nn.Flatten(), nn.Linear({width}, num_classes))
"""


def test_a_function_whose_model_has_other_shapes_is_refused(place: Place) -> None:
    words, code = ("run.dir=runs/own", "model.arch=own_net:net"), place.path / "own_net.py"
    code.write_text(NET.format(width=8))
    assert place.train(*words)[0] == 0
    code.write_text(NET.format(width=16))
    for command in (place.doctor, place.train):
        status, err = command(*words, "train.max_steps=2")
        assert (status, "0.weight: [8, 3, 3, 3] -> [16, 3, 3, 3] and 6 more" in err) == (2, True), err


def test_a_checkpoint_without_a_part_is_refused(place: Place) -> None:
    (path,) = place.checkpoints()
    contents = decode(path.read_bytes(), path)
    del contents["totals"]
    shutil.rmtree(path.parent)
    save_checkpoint(path.parent.parent, contents, 1)
    for words in (["run.dir=runs/done"], ["run.dir=runs/new", "run.resume=runs/done"]):
        code, err = place.train(*words, "train.max_steps=2")
        assert (code, "its part 'totals' is missing or damaged" in err) == (4, True), err


@pytest.mark.parametrize("by_signal", [True, False])
def test_a_run_can_be_stopped_while_it_reads_a_checkpoint(place: Place, by_signal: bool) -> None:
    """Make reading hang, as on dead storage: a signal stops the run, or else the watchdog."""
    prelude = """
import time
from pipeline.record import checkpoint_files
checkpoint_files.read_verified = lambda path: open("reading", "w").close() or time.sleep(600)
"""
    command = ["pipeline", "train", "digits", *SMALL, "run.dir=runs/done",
               f"run.timeout={1000 if by_signal else 1}"]  # fmt: skip
    outputs = place.path / "out", place.path / "err"
    process = forked.server().start(command, environment(), outputs, prelude, place.path)
    wait_until((place.path / "reading").exists, "reading")
    if by_signal:
        kill(process.pid, signal.SIGTERM)
    assert process.wait(120) == (75 if by_signal else 1)
    says = "asked to stop before a step was made" if by_signal else "rank 0 made no progress for"
    assert says in outputs[1].read_text()


def test_a_failed_compilation_is_repeated_by_the_next_start(place: Place) -> None:
    # the ranks find it, after all checks of a start
    (place.path / "g++").write_text("#!/bin/sh\necho this compiler fails >&2\nexit 1\n")
    (place.path / "g++").chmod(0o755)
    path, cache = f"{place.path}:{os.environ['PATH']}", str(place.path / "cache")
    words = ("run.dir=runs/compiled", "model.arch=squeezenet1_1", "train.compile=on")
    code, err = place.train(*words, PATH=path, TORCHINDUCTOR_CACHE_DIR=cache)
    assert (code, "squeezenet1_1 cannot be compiled: train with train.compile=off" in err) == (2, True), err
    for command in (place.doctor, place.train):
        code, err = command(*words)
        assert (code, "cannot be compiled" in err, "creating" in err) == (2, True, False), "it fails at once"
    assert place.train(*words, "train.compile=off")[0] == 0
