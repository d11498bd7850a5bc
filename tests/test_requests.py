"""A wrong request costs seconds: one line with a remedy, exit code 2, and no import of torch."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import SMALL, Job, Result, environment, free_port, pipeline, quick
from place import Place

from pipeline.addons.ops.model import check_passes
from pipeline.cli.main import main
from pipeline.config.sections import Model
from pipeline.errors import RequestError


@pytest.fixture(scope="session")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for PYTHONPATH with which `import torch` ends the process with code 99."""
    folder = tmp_path_factory.mktemp("without-torch")
    (folder / "torch.py").write_text("import os\nos._exit(99)\n")
    return folder


def refused(result: Result) -> str:
    """Return the one line that refuses a wrong request."""
    assert result.code == 2, result.err
    assert not result.out
    assert result.err.splitlines()[-1] == f"pipeline: {result.error}"
    return result.error


def test_a_wrong_request_is_one_line_before_torch_is_imported(
    tmp_path: Path, digits: Path, without_torch: Path
) -> None:
    def train(*words: str, **ranks: str) -> str:
        base = ("train", "digits", f"data.root={digits}", f"run.dir={tmp_path / 'run'}", "track.uri=none")
        result = pipeline(*base, *words, cwd=tmp_path, PYTHONPATH=str(without_torch), **ranks)
        assert result.seconds < 15  # about 0.7 s on an idle machine
        return refused(result)

    assert "train.epochs" in train("train.epoch=3")
    assert "95 or 100; worlds that work are 1, 2, 3, 4, 6, 8" in train("--nproc", "5")
    (tmp_path / "file").write_text("x")
    line = train(f"run.dir={tmp_path / 'file'}/run")
    assert line.startswith(f"run.dir={tmp_path / 'file'}/run cannot be written: ")
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    assert "give --nproc, or start with torchrun, not both" in train("--nproc", "2", **ranks)
    name = "a%41b"
    odd = f"run.dir={tmp_path / name}/run"
    line = train(odd, "track.uri=auto")
    assert line.startswith(f"MLflow cannot open {tmp_path / name}/mlflow.db")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    words = ("train", "digits", f"data.root={digits}", odd, "track.uri=none")
    assert pipeline(*words, PYTHONPATH=str(without_torch)).code == 99, "the next step imports torch"


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="this machine has a GPU")
def test_a_pod_whose_runtime_gives_it_no_gpu_fails_its_preflight(tmp_path: Path, digits: Path) -> None:
    words = ("digits", f"data.root={digits}", f"run.dir={tmp_path / 'run'}", "run.device=cuda")
    pod = {"PET_NPROC_PER_NODE": "1", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    result = pipeline("doctor", *words, "track.uri=none", **pod)
    assert result.code == 2
    assert "run.device=cuda" in result.error
    assert "--runtime-class" in result.error


LONG = "x" * 300
"""A file name that is too long for every file system: looking it up is an error, even for root."""


@pytest.mark.parametrize(
    ("words", "code"),
    [("plan {long}.yaml", 2), ("train digits run.dir={long}/run", 2),
     ("plan digits data.source=folder data.root={long}", 2), ("data check {long}", 2),
     ("data make digits {long}", 2), ("data get imagenette {long}", 2),
     ("data import imagenet {long} out", 2), ("data pack {long} out", 2), ("evaluate {long}/run", 2),
     ("predict {long} a.png", 2), ("export {long} --to torch.export", 2), ("report {long}", 2),
     ("verify {long}", 2), ("sync {long}", 2), ("k8s render --out {long}", 2)],
)  # fmt: skip
def test_an_unreadable_path_is_one_line_for_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # keep the handlers of the test process
    assert main(words.format(long=LONG).split()) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pipeline: ")
    assert "File name too long" in line
    assert not list(tmp_path.iterdir())


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


@pytest.mark.parametrize(
    "command", ["predict runs/done images", "sync runs/done", "doctor digits --json data.source=synthetic"]
)
def test_the_rank_of_the_pod_whose_shell_is_used_changes_no_command(place: Place, command: str) -> None:
    expected = quick(*command.split(), cwd=place.path)
    assert expected.out or expected.err
    result = quick(*command.split(), cwd=place.path, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    assert result.code == expected.code, result.err
    assert _without_figures(result.out + result.err) == _without_figures(expected.out + expected.err)


def _without_figures(text: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "0", text)


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_rank_that_waits_for_the_others_says_so_and_how_to_do_without(place: Place, command: str) -> None:
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if command == "train":
        code, err = place.train("run.dir=runs/other", "run.timeout=4", **ranks)
    else:
        result = quick("evaluate", "runs/done", "run.timeout=4", "run.device=cpu", cwd=place.path, **ranks)
        code, err = result.code, result.err
    assert code == 75
    (line,) = (line for line in err.splitlines() if "rank 1 of 2 waits for the other processes" in line)
    assert "unset RANK and WORLD_SIZE to train or evaluate alone" in line


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
        assert result.code == 1
        lines = [line for line in result.err.splitlines() if line.startswith("pipeline: ")]
        assert sum(says in line for line in lines) == 1, result.err
        assert result.seconds < 29, "torchrun waits 30 s for a rank that does not exit"


def test_shapes_that_a_network_cannot_take_are_refused() -> None:
    for arch, batch, reason in (
        ("resnet18", 1, "more than 1 value per channel"),
        ("inception_v3", 8, "Kernel size can't be greater"),
    ):
        with pytest.raises(
            RequestError, match=f"{arch} cannot take passes of {batch} .*{reason}.*augment.size"
        ):
            check_passes(Model(arch=arch), 10, batch, [32], 32)
    check_passes(Model(arch="swin_t"), 10, 8, [32], 32)


def test_a_path_on_the_command_line_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["k8s", "render", "digits", "--out=~/k8s"]) == 0
    assert (tmp_path / "k8s").is_dir()
