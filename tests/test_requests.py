"""A wrong request costs seconds, before torch is imported; storage out of reach is temporary."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import SMALL, Job, environment, free_port, pipeline, quick
from place import SMALL as IMAGES
from place import Place

from pipeline.cli.main import main


def test_a_wrong_request_ends_before_torch_is_imported(tmp_path: Path, digits: Path) -> None:
    (tmp_path / "torch.py").write_text("import os\nos._exit(99)\n")
    train = ("train", "digits", f"data.root={digits}", f"run.dir={tmp_path / 'run'}", "track.uri=none")
    for words in (["train.epoch=3"], ["--nproc", "5"]):
        result = pipeline(*train, *words, cwd=tmp_path, PYTHONPATH=str(tmp_path))
        assert (result.code, result.out, result.err) == (2, "", f"pipeline: {result.error}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["torch.py"]
    assert pipeline(*train, PYTHONPATH=str(tmp_path)).code == 99, "the next step imports torch"


@pytest.mark.parametrize(
    ("number", "code"), [(errno.EIO, 75), (errno.ESTALE, 75), (errno.ENOENT, 4), (errno.ENOSPC, 4)]
)
def test_storage_out_of_reach_is_temporary_for_every_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, code: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number), "journal.jsonl")

    monkeypatch.setattr("pipeline.addons.deploy.k8s.render", fail)
    assert main(["k8s", "render"]) == code
    assert len(capsys.readouterr().err.splitlines()) == 1
    # in a rank, an unexpected error of a file stays a crash, which a launcher restarts
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("signal.signal", lambda *_: None)  # keep the handlers of the test process
    monkeypatch.setattr("faulthandler.register", lambda *_: None)
    monkeypatch.setattr("pipeline.operate.launch.train", fail)
    with pytest.raises(OSError, match="journal"):
        main(["train", "digits"])


@pytest.mark.fault("E5")
def test_a_small_dev_shm_is_enough_for_loader_workers(tmp_path: Path, digits: Path) -> None:
    mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    small = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    if subprocess.run([*small, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system has no mount namespaces")
    train = [*small, sys.executable, "-m", "pipeline", "train", "digits", f"data.root={digits}", *SMALL]
    train += [f"run.dir={tmp_path / 'run'}", "data.workers=2", "train.max_steps=4"]
    done = subprocess.run(train, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr


def test_the_rank_of_the_pod_whose_shell_is_used_changes_no_command(place: Place) -> None:
    for command in ("predict runs/done images", "sync runs/done", "doctor digits data.source=synthetic"):
        ends = []
        for ranks in ({}, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}):
            result = quick(*command.split(), cwd=place.path, **ranks)
            ends.append((result.code, re.sub(r"\d+(\.\d+)?", "0", result.out + result.err)))
        assert ends[0] == ends[1]
        assert ends[0][1]


def test_a_rank_that_waits_for_the_others_says_so_and_how_to_do_without(place: Place) -> None:
    train = ("train", "digits", *IMAGES, "run.dir=runs/other")
    for command in (train, ("evaluate", "runs/done", "run.device=cpu")):
        ranks = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        result = quick(*command, "run.timeout=4", cwd=place.path, code=75, **ranks)
        assert "rank 1 of 2 waits for the other processes" in result.err


def test_under_torchrun_a_wrong_request_is_printed_once_and_all_ranks_exit(
    tmp_path: Path, digits: Path
) -> None:
    # found by one process per machine before the group forms, by rank 0 alone (twice, the second
    # time before it looks for the pretrained weights), and by all ranks at once
    wrong = {
        "train.epoch=3": "train.epochs",
        "batch.global=97": "does not divide by 2 processes",
        "model.init=none-such model.freeze=nose": "the model has no module 'nose'",
        "model.batchnorm=sync": "synchronises batch norm on GPUs only",
    }
    for words, says in wrong.items():
        request = ["digits", f"data.root={digits}", *words.split(), "track.uri=none"]
        # in an interpreter of its own: a fork has imported torch already
        result = Job(tmp_path / "run", request, nproc=2, by_torchrun=True, interpreter=True).run()
        assert (result.code, says in result.error) == (1, True)
        assert "forcefully" not in result.err, "torchrun kills no rank: all have exited"


def test_all_ranks_end_if_the_earlier_run_cannot_be_set_aside(tmp_path: Path, digits: Path) -> None:
    words = ["digits", *SMALL, f"data.root={digits}", "train.max_steps=2", "run.resume=never"]
    prelude = """
import pipeline.errors, pipeline.operate.start
def fail(folder):
    raise pipeline.errors.StorageError("the disk is full", "make room")
pipeline.operate.start.set_aside = fail
"""
    result = Job(tmp_path / "run", words, nproc=2, prelude=prelude).run_in_forks()
    assert result.code == 4, result.err
    assert result.err.count("the disk is full") == 1, "all ranks raise it, one prints it"
    assert "Traceback" not in result.err
