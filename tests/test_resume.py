"""A resume needs no pretrained weights, moves between folders, and keeps the best model."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from harness import environment, quick, save_checkpoint
from place import SMALL, Place

from pipeline.config.load import load
from pipeline.operate.restart import config_after_restart
from pipeline.record.checkpoint import decode
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
    (best,) = place.events("done", "ended")
    words = ("run.dir=runs/other", "run.resume=runs/done", "train.max_steps=3", "checkpoint.keep=1")
    shutil.rmtree(place.path / "runs/done")
    assert (
        place.train("run.dir=runs/done", "optimizer.lr=1e-9")[0] == 0
    )  # so slow that no later step is better
    code, err = place.train(*words, "optimizer.lr=1e-9")
    assert code == 0, err
    (ended,) = place.events("other", "ended")
    assert ended["best"]["step"] == best["best"]["step"] == 1
    assert [step_of(path) for path in place.checkpoints("other")] == [1, 3]


def test_a_run_resumes_after_its_recipe_was_renamed(place: Place) -> None:
    recipe = place.path / "first.yaml"
    recipe.write_text("run: {dir: runs/named}\n")
    run = partial(quick, cwd=place.path)
    assert run("train", "first.yaml", *SMALL).code == 0
    recipe.rename(place.path / "second.yaml")
    assert run("doctor", "second.yaml", *SMALL, "train.max_steps=2").code == 0
    resumed = run("train", "second.yaml", *SMALL, "train.max_steps=2")
    assert resumed.code == 0, resumed.err
    assert [row["step"] for row in place.events("named", "started")] == [0, 1]
    assert [row["tags"]["recipe"] for row in place.events("named", "started")] == ["first", "second"]


def test_a_checkpoint_of_another_run_is_refused(place: Place) -> None:
    """The folder's own files would be taken for its best model, and the journal continued."""
    slow = ("optimizer.lr=1e-9", "train.max_steps=3")  # so slow that the first model stays the best
    assert place.train("run.dir=runs/slow", *slow, "train.max_steps=1")[0] == 0
    assert place.train("run.dir=runs/slow", *slow, "train.max_steps=2")[0] == 0
    lone = place.path / "lone"
    lone.mkdir()
    shutil.copy(place.checkpoints("slow")[-1], lone)
    assert place.train("run.dir=runs/other", "run.seed=1", "train.max_steps=1")[0] == 0
    words = ("run.resume=lone", *slow)
    for command in (place.doctor, place.train):
        code, err = command("run.dir=runs/other", *words)
        assert code == 2, err
        assert (
            "run.resume=lone is of another run than that in runs/other: give another run.dir with it" in err
        )
    for _ in range(2):  # the second start of the command resumes from the same checkpoint
        code, err = place.train("run.dir=runs/new", *words)
        assert code == 0, err
    best = place.events("new", "ended")[-1]["best"]
    assert best["step"] >= 2, "the file of step 1 is not there: the best is chosen again"
    assert (place.path / "runs/new/checkpoints" / best["file"]).exists()
    (copy,) = lone.iterdir()
    code, err = place.train("run.dir=runs/slow", f"run.resume={copy}", *slow)
    assert code == 0, f"a copy of its own checkpoint: {err}"


def test_a_run_whose_checkpoints_are_lost_is_never_trained_again_silently(place: Place) -> None:
    """Also if it was killed, so that its journal has no end."""
    words = (
        "run.dir=runs/lost",
        "checkpoint.every=1 steps",
        "train.epochs=1000",
        "evaluate.every=1000 epochs",
    )
    job = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "train", "digits", *SMALL, *words, "train.max_steps=1000"],
        cwd=place.path, env=environment(), stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while not place.events("lost", "saved"):
            assert job.poll() is None
            time.sleep(0.01)
    finally:
        job.kill()
        job.wait()
    for path in place.checkpoints("lost"):
        path.unlink()
    before = (place.path / "runs/lost/journal.jsonl").read_bytes()
    code, err = place.train(*words)
    assert code == 4, err
    assert "runs/lost holds no checkpoint, and its journal names step-0000" in err
    assert (place.path / "runs/lost/journal.jsonl").read_bytes() == before


def test_a_restart_resumes_from_the_same_checkpoint_until_the_run_saves_one(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "launch")
    run = RunFolder(place.path / "runs/other")
    run.checkpoints.mkdir(parents=True)

    def resumes_from(word: str) -> str:
        return config_after_restart(load("digits", [f"run.dir={run.path}", f"run.resume={word}"])).run.resume

    named, (checkpoint,) = str(place.path / "runs/done"), place.checkpoints()

    def log_start(word: str, launch: str = "launch") -> None:
        journal.log_event("started", launch=launch, resume=word, checkpoint=checkpoint.name)

    journal = Journal(run.journal, pytest.fail)
    assert resumes_from(named) == named, "this launch has trained nothing yet"
    log_start(named, launch="an earlier launch")
    assert resumes_from(named) == named
    log_start("auto")
    assert resumes_from("never") == "never", "it was asked for after a failure, under the same --rdzv-id"
    log_start(named)
    later = checkpoint.with_name(checkpoint.name.replace("-00000001.", "-00000002."))
    shutil.copy(checkpoint, later)
    assert resumes_from(named) == str(checkpoint), (
        "the folder has a newer checkpoint, but the run has saved none yet"
    )
    log_start(str(checkpoint))
    assert resumes_from(str(checkpoint)) == str(checkpoint)
    log_start(named)
    shutil.copy(checkpoint, run.checkpoints)
    assert resumes_from(named) == "auto", "the start has copied it"
    shutil.copy(checkpoint, run.checkpoints / later.name)
    assert resumes_from(named) == "auto"
    log_start("never")
    assert resumes_from("never") == "auto"


def link_to_nothing(path: Path) -> None:
    path.symlink_to("/nowhere/images")


@pytest.mark.fault("J3")
@pytest.mark.parametrize(
    ("name", "leave"),
    [
        ("", Path.mkdir),
        ("train", lambda path: None),
        ("val/class-0001", Path.mkdir),
        ("train", link_to_nothing),
    ],
    ids=["data", "split", "class", "link"],
)
def test_a_restart_waits_for_data_that_is_away(
    place: Place, name: str, leave: Callable[[Path], None]
) -> None:
    part = place.path / "images" / name
    part.rename(place.path / "away")
    leave(part)
    resume = ("run.dir=runs/done", "train.max_steps=2")
    code, err = place.train(*resume)
    where = f"data.root=images: {name}/" if name else "data.root=images"
    assert (code, f"{where} is missing or empty, and the run in runs/done was trained on it" in err) == (
        75,
        True,
    ), err
    is_link = part.is_symlink() and name
    assert place.train("run.dir=runs/new")[0] == (75 if is_link else 2), "no earlier start had this data"
    if part.is_symlink():
        part.unlink()
    elif part.exists():
        part.rmdir()
    (place.path / "away").rename(part)
    code, err = place.train(*resume)
    assert code == 0, err


@pytest.mark.fault("J3")
def test_a_restart_waits_for_data_that_is_away_before_the_first_save(place: Place) -> None:
    words = ("run.dir=runs/new", "train.epochs=1000", "train.max_steps=2000", "checkpoint.every=1000 epochs")
    command = [
        sys.executable,
        "-m",
        "pipeline",
        "train",
        "digits",
        *SMALL,
        *words,
        "evaluate.every=1000 epochs",
    ]
    run = subprocess.Popen(command, cwd=place.path, env=environment(), stderr=subprocess.DEVNULL)
    while not place.events("new", "started"):
        assert run.poll() is None
    run.kill()
    run.wait()
    assert not place.checkpoints("new")
    (place.path / "images").rename(place.path / "away")
    code, err = place.train(*words, "evaluate.every=1000 epochs")
    assert (code, "data.root=images is missing or empty" in err) == (75, True), err


@pytest.mark.parametrize(
    "run", ["images/train", "images/val/class-0001/runs/x", "store/runs/x", "images/runs/x"]
)
def test_a_run_folder_among_the_images_is_refused(place: Place, run: str) -> None:
    images, store = place.path / "images", place.path / "store"
    if run.startswith("store"):
        (images / "train/class-0001").rename(store)
        (images / "train/class-0001").symlink_to(store)
    if run.startswith("images/runs"):
        assert place.train(f"run.dir={run}")[0] == 0, "beside train/ and val/ there are no images"
        shutil.rmtree(images / "runs")
        shutil.rmtree(images / "val")
        shutil.move(images / "train", place.path / "classes")
        shutil.rmtree(images)
        (place.path / "classes").rename(images)
    code, err = place.train(f"run.dir={run}")
    says = f"run.dir={run} is among the images of data.root=images: give a folder outside of them"
    assert (code, says in err) == (2, True), err
    assert not (place.path / run / "journal.jsonl").exists()


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


def test_a_run_resumed_in_another_folder_that_fails_at_once_never_goes_back_to_an_earlier_step(
    place: Place,
) -> None:
    slow = (
        "optimizer.lr=1e-9",
        "train.max_steps=2",
        "checkpoint.keep=1",
    )  # so slow that step 1 stays the best
    for last in ("train.max_steps=1", "train.max_steps=2"):
        assert place.train("run.dir=runs/slow", *slow, last)[0] == 0
    assert [step_of(path) for path in place.checkpoints("slow")] == [1, 2]
    images = {path: path.read_bytes() for path in (place.path / "images/train").glob("*/*.jpg")}
    for path, content in images.items():
        path.write_bytes(bytes(len(content)))
    slow = (*slow, "train.max_steps=4", "checkpoint.every=1000 epochs")
    code, err = place.train("run.dir=runs/new", "run.resume=runs/slow", *slow)
    assert (code, "resume with run.resume=runs/new" in err) == (4, True), err
    assert [path.name for path in place.checkpoints("new")] == [
        path.name for path in place.checkpoints("slow")
    ]
    for path, content in images.items():
        path.write_bytes(content)
    shutil.rmtree(place.path / "runs/slow")
    code, err = place.train("run.dir=runs/new", "run.resume=runs/new", *slow)
    assert code == 0, err
    assert [row["step"] for row in place.events("new", "started")] == [2, 2]
    assert [step_of(path) for path in place.checkpoints("new")] == [1, 4], "the best and the newest one"


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
    return nn.Sequential(nn.Conv2d(3, {width}, 3), nn.BatchNorm2d({width}), nn.{activation}(), nn.AdaptiveAvgPool2d(1),
                         nn.Flatten(), nn.Linear({width}, num_classes))
"""


def test_a_function_whose_model_has_other_shapes_is_refused(place: Place) -> None:
    words, code = ("run.dir=runs/own", "model.arch=own_net:net"), place.path / "own_net.py"
    code.write_text(NET.format(width=8, activation="ReLU"))
    assert place.train(*words)[0] == 0
    code.write_text(NET.format(width=16, activation="ReLU"))
    for command in (place.doctor, place.train):
        status, err = command(*words, "train.max_steps=2")
        says = "0.weight [8, 3, 3, 3] -> [16, 3, 3, 3] and 6 more: restore the code that made it, or start again with"
        assert (status, says in err) == (2, True), err
    code.write_text(
        NET.format(width=8, activation="ReLU").replace("nn.Flatten(), ", "nn.Flatten(), nn.Dropout(), ")
    )
    status, err = place.train(*words, "train.max_steps=2")
    assert (status, "5.weight [4, 8] -> missing and 3 more" in err) == (2, True), err


def test_a_function_that_changed_is_named_when_its_run_is_resumed(place: Place) -> None:
    words, code = ("run.dir=runs/own", "model.arch=own_net:net"), place.path / "own_net.py"
    line = "the file of model.arch=own_net:net has changed since "
    code.write_text(NET.format(width=8, activation="ReLU"))
    assert place.train(*words)[0] == 0
    first, err = place.train(*words, "train.max_steps=2")
    assert (first, line in err) == (0, False), err
    code.write_text(NET.format(width=8, activation="Tanh"))
    saved = place.checkpoints("own")[-1].name
    for command in (place.doctor, place.train):
        status, err = command("run.dir=runs/own", *words[1:], "train.max_steps=3")
        assert (status, err.count(f"{line}{saved} was saved")) == (0, 1), err
    status, err = place.train(*words, "train.max_steps=4")
    assert (status, line in err) == (0, False), "a start with this code has saved the newest"


@pytest.mark.parametrize("part", ["config", "totals"])
def test_a_checkpoint_without_a_part_is_refused(place: Place, part: str) -> None:
    (path,) = place.checkpoints()
    contents = decode(path.read_bytes(), path)
    del contents[part]
    shutil.rmtree(path.parent)
    save_checkpoint(path.parent.parent, contents, 1)
    for words in (["run.dir=runs/done"], ["run.dir=runs/new", "run.resume=runs/done"]):
        for command in (place.doctor, place.train):
            code, err = command(*words, "train.max_steps=2")
            assert (code, f"its part '{part}' is missing or damaged" in err) == (4, True), err


@pytest.mark.parametrize("command", ["train", "doctor"])
def test_storage_that_cannot_be_read_for_a_while_is_no_damage(place: Place, command: str) -> None:
    assert place.train("run.dir=runs/done", "train.max_steps=2")[0] == 0
    before = place.checkpoints()
    words = ("run.dir=runs/done", "train.max_steps=3")
    program = f"""\
import errno, os, sys
from pathlib import Path
from pipeline.cli.main import main
read_bytes = Path.read_bytes
def fail(path):
    if path.name == {before[-1].name!r}:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
    return read_bytes(path)
Path.read_bytes = fail
sys.exit(main({[command, "digits", *SMALL, *words]}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=place.path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    says = f"{before[-1].name} is out of reach (Input/output error): give the same command again once its storage is"
    assert (done.returncode, says in done.stderr.splitlines()[-1]) == (75, True), done.stderr
    assert place.checkpoints() == before
    assert not list((place.path / "runs/done").glob("before-*"))
    assert place.train(*words)[0] == 0
    assert place.events("done", "started")[-1]["step"] == 2


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
        [sys.executable, "-c", program],
        cwd=place.path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "resuming from" in done.stderr
    assert done.stdout.splitlines()[0] == "[]"


def test_a_failed_compilation_is_repeated_by_the_next_start(place: Place) -> None:
    # the ranks find it, after all checks of a start
    (place.path / "g++").write_text("#!/bin/sh\necho this compiler fails >&2\nexit 1\n")
    (place.path / "g++").chmod(0o755)
    fails = {
        "PATH": f"{place.path}:{os.environ['PATH']}",
        "TORCHINDUCTOR_CACHE_DIR": str(place.path / "cache"),
    }
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
        result = quick(*command, word, cwd=place.path)
        assert result.code == 2
        assert f"{word} is for one start, and each node that replaces a lost one gets it" in result.err
