"""Names and locales that are not UTF-8, and files that commands write where a user says."""

import os
import shutil
from pathlib import Path

import pytest
from forked import make_database
from harness import pipeline, quick
from mlflow import MlflowClient
from place import SMALL, Place

ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
"""A locale whose encoding is ASCII: Python would else choose UTF-8."""


def test_a_run_in_an_ascii_locale_is_sent_to_mlflow_and_its_result_printed(place: Place) -> None:
    recipe = "recipe: größe\ntrack: {experiment: Größe – 日本}\n"
    (place.path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    words = [word for word in SMALL if not word.startswith("track.")]
    make_database(place.path / "runs/mlflow.db")
    done = pipeline("train", "recipe.yaml", *words, "run.dir=runs/ascii", cwd=place.path, **ASCII, code=0)
    assert done.done["step"] == "1"
    assert "everything in runs/ascii has been sent" in (place.path / "runs/ascii/sync.log").read_text()
    client = MlflowClient(f"sqlite:///{place.path}/runs/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("Größe – 日本").experiment_id])
    assert (run.info.status, run.data.params["recipe"]) == ("FINISHED", "größe")
    shutil.copytree(place.path / "images/val", place.path / "日本")
    shown = pipeline("predict", "runs/ascii", "日本", cwd=place.path, PYTHONIOENCODING="ascii", code=0)
    assert [line[:13] for line in shown.out.splitlines()] == [r"\u65e5\u672c/"] * 4


@pytest.mark.usefixtures("jpegtran")
def test_names_that_are_not_utf_8(place: Place) -> None:
    """Folders may have any name in a command; a configuration, which is text, refuses them."""
    odd = place.path / os.fsdecode(b"\xdcber")
    shutil.copytree(place.path / "images", odd)
    os.rename(odd / "train/class-0000", os.fsencode(odd) + b"/train/Caf\xe9")
    os.rename(odd / "val/class-0000", os.fsencode(odd) + b"/val/Caf\xe9")
    refused = quick("train", "digits", *SMALL, f"data.root={odd}", cwd=place.path, code=2)
    assert "data.root=" in refused.error
    assert "LC_ALL=C.UTF-8" in refused.error
    shutil.copytree(place.path / "runs", odd / "runs")
    quick("train", "digits", *SMALL, "data.root=.", "run.dir=runs/new", cwd=odd, code=0)
    for command in (
        ("export", f"{odd}/runs/new", "--to", "onnx"), ("report", f"{odd}/runs/new"),
        ("predict", f"{odd}/runs/new", f"{odd}/val", "--json"), ("data", "check", str(odd), "--write-sums"),
        ("data", "pack", f"{odd}", f"{place.path}/pack"),
    ):  # fmt: skip
        result = quick(*command, cwd=place.path, code=0)
        assert all(character.isprintable() or character == "\n" for character in result.out), command
    words = ("train", "digits", *SMALL, "data.root=.", "run.dir=runs/other", "track.uri=auto")
    assert "track.uri=none" in quick(*words, cwd=odd, code=2).error, "MLflow refuses the name"


@pytest.mark.usefixtures("jpegtran")
def test_a_file_that_a_command_writes_follows_links_and_replaces_no_pipe(
    place: Place, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.path)
    (small_disk / "filler").write_bytes(bytes(60 << 10))
    Path("k8s").mkdir()
    (tmp_path / "ordinary").touch()
    for name, command in (
        ("images/SHA256SUMS", ("data", "check", "images", "--write-sums")),
        ("k8s/00-namespace.yaml", ("k8s", "render", "digits", "--image", "x", "--out", "k8s")),
        ("model", ("export", "runs/done", "--to", "safetensors", "--out", "model")),
    ):
        target = tmp_path / "target"
        Path(name).symlink_to(target)
        quick(*command, code=0)
        assert Path(name).is_symlink()
        assert target.stat().st_size > 0
        assert target.stat().st_mode == (tmp_path / "ordinary").stat().st_mode, "that of the umask"
        target.unlink()
        Path(name).unlink()
        os.mkfifo(name)
        assert Path(name).name in quick(*command, code=2).error
        assert Path(name).is_fifo()
        Path(name).unlink()
    Path("pipe").symlink_to("/dev/null")
    Path("loop").symlink_to("loop")
    for words in (("pack", "images", "pipe"), ("make", "synthetic", "pipe"), ("pack", "images", "loop")):
        quick("data", *words, code=2)

    for command in (
        ("k8s", "render", "digits", "--image", "x", "--out", str(small_disk)),
        ("data", "pack", "images", f"{small_disk}/pack"), ("data", "make", "digits", f"{small_disk}/digits"),
        ("export", "runs/done", "--to", "safetensors", "--out", f"{small_disk}/model"),
    ):  # fmt: skip
        assert "No space left on device" in quick(*command, code=4).error
    assert not (small_disk / "model").exists()


def test_a_copied_checkpoint_or_moved_data_is_refused_with_the_remedy(place: Place) -> None:
    (checkpoint,) = place.checkpoints("done")
    shutil.copy(checkpoint, place.path / "model.pt")
    train = ("train", "digits", *SMALL)
    for command in (
        ("predict", "model.pt", "images/val"), ("evaluate", "model.pt"),
        (*train, "run.dir=runs/new", "run.resume=model.pt"),
    ):  # fmt: skip
        assert "rename it" in quick(*command, cwd=place.path, code=4).error
    (place.path / "model.pt").rename(place.path / checkpoint.name)
    quick("predict", checkpoint.name, "images/val", cwd=place.path, code=0)

    (place.path / "images").rename(place.path / "moved")
    for command in (
        ("evaluate", "runs/done"), (*train, "run.dir=runs/done", "train.max_steps=2"),
        (*train, "run.dir=runs/new"), (*train, "data.source=pack"),
    ):  # fmt: skip
        refused = quick(*command, cwd=place.path)
        assert refused.code in (2, 75)
        assert "data.root=FOLDER" in refused.error, command
    quick("evaluate", "runs/done", "data.root=moved", cwd=place.path, code=0)
