"""The receipt is complete; a run repeated from it is bit-identical or its difference is named."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import SMALL, Job, Result, kill, quick

from pipeline import machine
from pipeline.errors import RequestError
from pipeline.operate import verify as commands
from pipeline.record.folder import RunFolder
from pipeline.record.receipt import Receipt


def job(folder: Path, digits: Path, *more: str, nproc: int = 1) -> Job:
    words = ["digits", f"data.root={digits}", *SMALL, "data.workers=0", "train.max_steps=12", "evaluate.every=4 steps",
             "checkpoint.every=4 steps", "checkpoint.keep=3"]  # fmt: skip
    return Job(folder, [*words, *more], nproc=nproc)


def receipt(run: Path) -> dict[str, Any]:
    contents: dict[str, Any] = json.loads((run / "receipt.json").read_text())
    return contents


def edit_receipt(run: Path, change: Any) -> None:
    contents = receipt(run)
    change(contents)
    (run / "receipt.json").write_text(json.dumps(contents))


def verify(run: Path, *more: str) -> Result:
    return quick("verify", str(run), *more)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Job:
    """Return a run that nobody interrupted."""
    run = job(tmp_path_factory.mktemp("uninterrupted") / "run", digits)
    assert run.run().code == 0
    return run


@pytest.fixture
def copy(uninterrupted: Job, tmp_path: Path) -> Path:
    return Path(shutil.copytree(uninterrupted.folder, tmp_path / "copy"))


def test_the_receipt_has_all_that_determines_the_weights(uninterrupted: Job) -> None:
    found = receipt(uninterrupted.folder)
    assert found["config"]["run"]["seed"] == 0
    assert found["plan"]["global_batch"] == 48
    assert len(found["data"]) == 64
    (start,) = found["starts"]
    assert (start["step"], start["world"], start["threads"], start["device_type"]) == (0, 1, 1, "cpu")
    assert {"python", "torch", "torchvision", "numpy", "device"} <= start.keys()
    assert [row["step"] for row in found["evaluations"]] == [4, 8, 12]
    assert found["evaluations"][-1].keys() == {
        "step", "weights", "top1", "top5", "loss", "nll", "ece", "balanced_accuracy", "images", "train_loss"
    }  # fmt: skip
    assert found["done"].endswith(f"weights={found['evaluations'][-1]['weights']}")


@pytest.mark.full
def test_the_receipt_of_a_killed_run_has_the_rows_of_an_uninterrupted_run(
    uninterrupted: Job, tmp_path: Path, digits: Path
) -> None:
    run = job(tmp_path / "run", digits).start()
    run.wait_until(run.checkpoints, "checkpoint")
    kill(run.ranks()[0], signal.SIGKILL)
    run.wait_gone(5)
    before = receipt(run.folder)
    assert [row["step"] for row in before["evaluations"]][:1] == [4], "evaluations are written at once"
    assert before["done"] is None
    assert run.run().code == 0
    found, expected = receipt(run.folder), receipt(uninterrupted.folder)
    assert found["evaluations"] == expected["evaluations"]
    assert found["done"] == expected["done"]
    first, second = found["starts"]
    assert (first["step"], second) == (0, {**first, "step": second["step"]})


def test_rows_repeated_by_a_restart_appear_once_with_the_last_value(uninterrupted: Job, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for path in (folder.config, folder.plan):
        shutil.copy(uninterrupted.folder / path.name, path)
    tags = {"world": 1}
    rows = [
        {"event": "created", "run": "r"}, {"event": "started", "step": 0, "tags": tags},
        {"step": 3, "metrics": {"train/loss": 3.0}}, {"event": "evaluated", "step": 4, "weights": "a"},
        {"step": 6, "metrics": {"train/loss": 2.0}}, {"event": "evaluated", "step": 8, "weights": "replaced"},
        {"event": "started", "step": 4, "tags": {"world": 3}}, {"event": "started", "step": 4, "tags": {"world": 2}},
        {"event": "evaluated", "step": 8, "weights": "b"}, {"event": "ended", "status": "FINISHED", "line": "done"},
    ]  # fmt: skip
    folder.journal.write_text("".join(json.dumps({"time": 1, **row}) + "\n" for row in rows))
    found = json.loads(Receipt(folder).text())
    assert found["evaluations"] == [
        {"step": 4, "weights": "a", "train_loss": 3.0}, {"step": 8, "weights": "b", "train_loss": 2.0}
    ]  # fmt: skip
    assert found["starts"] == [{"step": 0, "world": 1}, {"step": 4, "world": 2}]
    assert found["done"] == "done"


def test_a_repeated_run_is_identical_and_left_unchanged(uninterrupted: Job) -> None:
    (uninterrupted.folder / "checkpoints/step-00000012 copy.pt").touch()  # what is no checkpoint is passed over
    before = {path: path.stat().st_mtime_ns for path in uninterrupted.folder.rglob("*")}
    result = verify(uninterrupted.folder, "--steps", "11")
    weights = receipt(uninterrupted.folder)["evaluations"][1]["weights"]
    assert (result.code, result.out) == (
        0,
        f"identical: 2 evaluations and 2 checkpoints up to step 8, weights={weights}\n",
    )
    assert {path: path.stat().st_mtime_ns for path in uninterrupted.folder.rglob("*")} == before


@pytest.mark.full
def test_another_seed_differs_from_the_first_step_and_tensor_on(copy: Path) -> None:
    edit_receipt(copy, lambda contents: contents["config"]["run"].update(seed=1))
    result = verify(copy, "--steps", "8")
    assert result.code == 1
    assert result.out.startswith("differs: at step 4 weights is sha256:")
    assert "at step 4 the first tensor to differ is model.conv1.0.weight (" in result.out
    assert "no change of software, threads or device is known" in result.out


@pytest.mark.full
def test_an_altered_receipt_is_distinguished_from_a_run_that_differs(copy: Path) -> None:
    def alter(contents: Any) -> None:
        contents["evaluations"][1]["weights"] = "sha256:" + "0" * 64
        contents["starts"][0]["torch"] = "1.0"

    edit_receipt(copy, alter)
    result = verify(copy)
    assert result.code == 1
    assert "at step 8 weights is sha256:0000" in result.out
    assert "the checkpoints of steps 4, 8, 12 are identical, so the receipt does not belong to them" in result.out
    assert "probable cause: torch was 1.0 and is " in result.out


@pytest.mark.full
def test_a_checkpoint_of_another_run_is_named_by_step_and_tensor(copy: Path, tmp_path: Path, digits: Path) -> None:
    other = job(tmp_path / "other", digits, "optimizer.lr=0.11")
    assert other.run().code == 0
    for path in copy.glob("checkpoints/step-00000012.*"):
        path.unlink()
    (foreign,) = other.folder.glob("checkpoints/step-00000012.*")
    shutil.copy(foreign, copy / "checkpoints")
    result = verify(copy)
    assert result.code == 1
    assert "at step 12 the first tensor to differ is model.conv1.0.weight (" in result.out
    assert "weights is" not in result.out, "the receipt's own rows are as they were"


@pytest.mark.long
@pytest.mark.parametrize("exact", ["false", "true"])
def test_a_killed_and_resumed_run_is_identical_to_an_uninterrupted_repetition(
    tmp_path: Path, digits: Path, exact: str
) -> None:
    run = job(tmp_path / "run", digits, f"run.exact={exact}", "exact.shards=6", "batch.accumulate=2", nproc=2).start()
    run.wait_for_step(6)
    for rank in run.ranks():
        kill(rank, signal.SIGKILL)
    run.wait_gone(5)
    if exact == "true":
        run.nproc = 3
    assert run.run().code == 0
    result = verify(run.folder)
    assert (result.code, result.out[:11]) == (0, "identical: "), result.out + result.err
    assert "3 evaluations" in result.out


def test_a_run_that_cannot_be_repeated_is_refused_before_it_starts(copy: Path, tmp_path: Path) -> None:
    def refused(change: Any = lambda contents: None, run: Path = copy, steps: int | None = None) -> str:
        saved = (copy / "receipt.json").read_text()
        edit_receipt(copy, change)
        with pytest.raises(RequestError) as refusal:
            commands.verify(run, steps)
        (copy / "receipt.json").write_text(saved)
        return str(refusal.value)

    second = {**receipt(copy)["starts"][0], "step": 4, "world": 2}
    assert "has no readable receipt (No such file or directory)" in refused(run=tmp_path)
    assert "--steps 3 is too small" in refused(steps=3)
    assert "is not deterministic" in refused(lambda contents: contents["config"]["run"].update(deterministic=False))
    assert "the data differs from that of the run" in refused(lambda contents: contents.update(data="0" * 64))
    assert "world changed from 1 to 2 at step 4" in refused(lambda contents: contents["starts"].append(second))
    assert "from another run's checkpoint" in refused(lambda contents: contents["starts"][0].update(step=3))
    assert "not a receipt of format 1" in refused(lambda contents: contents.update(format=2))
    if not machine.has_gpu():
        assert "has no GPU" in refused(lambda contents: contents["starts"][0].update(device_type="cuda"))
    (tmp_path / "receipt.json").write_text("[" * 200_000)
    assert "has no readable receipt (it is nested too deeply)" in refused(run=tmp_path)
    assert verify(tmp_path).error.startswith(f"{tmp_path} has no readable receipt"), "as a command it is one line"
