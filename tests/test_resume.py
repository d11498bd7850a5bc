"""A resume needs no pretrained weights, moves between folders, and keeps the best model."""

import shutil

import pytest
from harness import before_each, quick, save_checkpoint
from place import SMALL, Place

from pipeline.addons.deploy.restart import config_after_restart
from pipeline.config.load import load, read_recipe
from pipeline.record.checkpoint_contents import decode
from pipeline.record.checkpoint_files import step_of
from pipeline.record.folder import RunFolder
from pipeline.record.journal import Journal

SLOW = ("optimizer.lr=1e-9", "checkpoint.keep=1")  # so slow that the first model stays the best


def refuse(place: Place, says: str, *words: str, code: int = 2) -> None:
    """Assert that a training and `doctor` refuse a request, and say why."""
    for command in (place.doctor, place.train):
        assert says in command(*words, code=code)


def test_a_run_resumes_without_its_pretrained_weights_and_under_another_recipe(place: Place) -> None:
    tuned = ("run.dir=runs/tuned", "model.init=runs/done")
    place.train(*tuned)
    (place.path / "runs/done").rename(place.path / "runs/elsewhere")
    place.train(*tuned, "train.max_steps=2")
    refuse(place, "model.init=runs/done does not exist", "run.dir=runs/other", "model.init=runs/done")
    (place.path / "renamed.yaml").write_text(read_recipe("digits")[1])
    place.run("train", "renamed.yaml", *SMALL, *tuned, "train.max_steps=3")
    starts = [(row["step"], row["tags"]["recipe"]) for row in place.events("tuned", "started")]
    assert starts == [(0, "digits"), (1, "digits"), (2, "renamed")]


def test_a_run_resumed_in_another_folder_keeps_its_best_model(place: Place) -> None:
    for steps in (1, 2):  # both are evaluated
        place.train("run.dir=runs/slow", *SLOW, f"train.max_steps={steps}")
    (best, _) = (event["best"]["step"] for event in place.events("slow", "ended"))
    for steps, kept in ((2, [1, 2]), (3, [1, 3])):  # a finished run is copied, and then continued
        resume = "run.resume=runs/slow" if steps == 2 else "run.resume=auto"
        place.train("run.dir=runs/other", resume, *SLOW, f"train.max_steps={steps}")
        assert [step_of(path) for path in place.checkpoints("other")] == kept, "the best and the last"
        assert place.events("other", "ended")[-1]["best"]["step"] == best == 1
    assert "already finished" in place.train("run.dir=runs/other", *SLOW, "train.max_steps=3")

    # another run's checkpoint: the folder's own files would be taken for its best model
    lone = place.path / "lone"
    lone.mkdir()
    copy = shutil.copy(place.checkpoints("slow")[-1], lone)
    says = "run.resume=lone is of another run than that in runs/done"
    refuse(place, says, "run.dir=runs/done", "run.resume=lone", *SLOW)
    for _ in range(2):  # the second start of the command resumes from the same checkpoint
        place.train("run.dir=runs/new", "run.resume=lone", *SLOW, "train.max_steps=3")
    best = place.events("new", "ended")[-1]["best"]
    assert best["step"] >= 2, "the file of step 1 is not there: the best is chosen again"
    assert (place.path / "runs/new/checkpoints" / best["file"]).exists()
    place.train("run.dir=runs/slow", f"run.resume={copy}", *SLOW, "train.max_steps=3")


def test_a_run_whose_checkpoints_are_lost_is_never_trained_again_silently(place: Place) -> None:
    for path in place.checkpoints():
        path.unlink()
    before = (place.path / "runs/done/journal.jsonl").read_bytes()
    says = "runs/done holds no checkpoint, and its journal names step-0000"
    refuse(place, says, "run.dir=runs/done", "train.max_steps=2", code=4)
    assert (place.path / "runs/done/journal.jsonl").read_bytes() == before


def test_a_restart_resumes_from_the_same_checkpoint(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "launch")
    run = RunFolder(place.path / "runs/other")
    run.checkpoints.mkdir(parents=True)
    named, (checkpoint,) = str(place.path / "runs/done"), place.checkpoints()
    journal = Journal(run.journal, pytest.fail)

    def resumes_from(word: str) -> str:
        return config_after_restart(load("digits", [f"run.dir={run.path}", f"run.resume={word}"])).run.resume

    def log_start(word: str, launch: str) -> None:
        journal.log_event("started", launch=launch, resume=word, checkpoint=checkpoint.name)

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


@pytest.mark.fault("E4")
def test_changed_data_is_refused_and_named(place: Place) -> None:
    image = sorted((place.path / "images/train/class-0002").iterdir())[1]
    resume = ("run.dir=runs/done", "train.max_steps=2")
    content = image.read_bytes()
    image.write_bytes(content + b"\0")
    refuse(place, f"train/class-0002/{image.name} had", *resume)
    image.unlink()
    refuse(place, f"train/class-0002/{image.name} is gone", *resume)
    image.write_bytes(content)
    place.train(*resume)


@pytest.mark.fault("J3")
def test_a_restart_waits_for_data_that_is_away(place: Place) -> None:
    images, resume = place.path / "images", ("run.dir=runs/done", "train.max_steps=2")
    images.rename(place.path / "away")
    images.mkdir()  # as of a volume that is not mounted
    says = "data.root=images is missing or empty, and the run in runs/done was trained on it"
    assert says in place.train(*resume, code=75)
    place.train("run.dir=runs/new", code=2)  # no earlier start had this data
    images.rmdir()
    (place.path / "away").rename(images)
    place.train(*resume)


@pytest.mark.parametrize("run", ["images/val/class-0001/runs/x", "store/runs/x"])
def test_a_run_folder_among_the_images_is_refused(place: Place, run: str) -> None:
    classes, store = place.path / "images/train/class-0001", place.path / "store"
    classes.rename(store)
    classes.symlink_to(store)
    refuse(place, f"run.dir={run} is among the images of data.root=images", f"run.dir={run}")
    assert not (place.path / run / "journal.jsonl").exists()
    place.train("run.dir=images/runs")  # beside train/ and val/ there are no images


def test_a_damaged_copy_of_the_checkpoint_is_replaced(place: Place) -> None:
    (checkpoint,) = place.checkpoints()
    copy = place.path / "runs/new/checkpoints" / checkpoint.name
    copy.parent.mkdir(parents=True)
    copy.write_bytes(b"x")
    words = ("run.dir=runs/new", "checkpoint.every=1000 epochs", "train.max_steps=2")
    place.train("run.resume=runs/done", *words)
    assert copy.read_bytes() == checkpoint.read_bytes()


NET = """\
from torch import nn

def net(num_classes):
    return nn.Sequential(nn.Conv2d(3, {width}, 3), nn.BatchNorm2d({width}), nn.AdaptiveAvgPool2d(1),
                         nn.Flatten(), nn.Linear({width}, num_classes))
"""


def test_a_function_whose_model_has_other_shapes_is_refused(place: Place) -> None:
    words, code = ("run.dir=runs/own", "model.arch=own_net:net"), place.path / "own_net.py"
    code.write_text(NET.format(width=8))
    place.train(*words)
    code.write_text(NET.format(width=16))
    refuse(place, "0.weight: [8, 3, 3, 3] -> [16, 3, 3, 3] and 6 more", *words, "train.max_steps=2")


def test_a_checkpoint_without_a_part_is_refused(place: Place) -> None:
    (path,) = place.checkpoints()
    contents = decode(path.read_bytes(), path)
    del contents["totals"]
    shutil.rmtree(path.parent)
    save_checkpoint(path.parent.parent, contents, 1)
    for words in (["run.dir=runs/done"], ["run.dir=runs/new", "run.resume=runs/done"]):
        err = place.train(*words, "train.max_steps=2", code=4)
        assert "its part 'totals' is missing or damaged" in err


def test_a_start_that_hangs_while_it_reads_a_checkpoint_is_ended(place: Place) -> None:
    hang = before_each("pipeline.record.checkpoint_files.read_verified", "time.sleep(600)")  # dead storage
    words = ("run.dir=runs/done", "run.timeout=1")
    result = quick("train", "digits", *SMALL, *words, cwd=place.path, prelude=hang, code=1)
    assert "rank 0 made no progress for" in result.err
