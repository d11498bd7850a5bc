"""`pipeline runs` lists every run with its true status, from the files of its folder alone."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import SMALL, Job, environment, kill

from pipeline.cli.main import main
from pipeline.errors import RequestError, save_failure
from pipeline.record.folder import RunFolder
from pipeline.record.journal import Journal
from pipeline.record.receipt import rank

WORDS = (*SMALL, "data.workers=0", "evaluate.every=2 steps")
LONG = ("train.epochs=1000", "evaluate.every=500 epochs")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Iterator[Path]:
    """Return a folder of real runs: finished, failed, stopped, killed, tracked, and one running."""
    root = tmp_path_factory.mktemp("place") / "runs"

    def job(name: str, *words: str) -> Job:
        return Job(root / name, ["digits", f"data.root={digits}", *WORDS, *words])

    assert job("sweep/seed-0", "train.max_steps=4").run().code == 0
    assert job("sweep/seed-1", "train.max_steps=4", "run.seed=1", "optimizer.lr=0.3").run().code == 0
    assert job("failed", "optimizer.lr=1e6", "schedule.warmup=0").run().code == 3
    database = f"track.uri=sqlite:///{root.parent}/mlflow.db"
    assert job("tracked", "train.max_steps=2", database).run().code == 0
    started = {name: job(name, *LONG).start() for name in ("stopped", "killed", "running")}
    try:
        for run in started.values():
            run.wait_for_step(3)
        for name, number, code in (("stopped", signal.SIGTERM, 75), ("killed", signal.SIGKILL, -signal.SIGKILL)):
            kill(started[name].ranks()[0], number)
            assert started[name].wait().code == code
        yield root
    finally:
        for run in started.values():
            run.clean()


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    """Return a copy of a finished run, in a folder of its own."""
    return Path(shutil.copytree(root / "sweep/seed-1", tmp_path / "runs/copy"))


def in_json(capsys: pytest.CaptureFixture[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Return the runs that `pipeline runs FOLDER --json` lists, by their path in it."""
    assert main(["runs", str(folder), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["runs"]
    return {str(Path(run["path"]).relative_to(folder)): run for run in runs}


def in_text(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    assert main(["runs", str(folder)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_each_run_has_its_true_status(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = in_json(capsys, root)
    assert {name: run["status"] for name, run in runs.items()} == {
        "sweep/seed-0": "finished", "sweep/seed-1": "finished", "tracked": "finished", "failed": "failed",
        "stopped": "stopped", "killed": "killed", "running": "running",
    }  # fmt: skip
    assert {name for name, run in runs.items() if run["exit_code"] is not None} == {"failed"}
    assert runs["failed"]["exit_code"] == 3
    assert "the loss is" in runs["failed"]["reason"]
    monkeypatch.chdir(root.parent)
    assert main(["runs"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^runs/failed +\d+/348 [^\n]* failed: exit 3$", text, re.MULTILINE)
    assert re.search(r"^runs/running +\d+/\d+ +– +running$", text, re.MULTILINE)


def test_a_run_is_listed_with_its_step_best_top1_recipe_and_changes(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = in_json(capsys, root)
    run = runs["sweep/seed-1"]
    receipt = json.loads((root / "sweep/seed-1/receipt.json").read_text())
    best = max(receipt["evaluations"], key=rank)
    assert (run["top1"], run["top1_step"]) == (best["top1"], best["step"])
    assert (run["step"], run["last_step"], run["recipe"]) == (4, 4, "digits")
    assert "run.seed=1 optimizer.lr=0.3" in run["changes"]
    assert "run.seed" not in runs["sweep/seed-0"]["changes"]
    saved = max(int(path.name[5:13]) for path in (root / "stopped/checkpoints").glob("step-*.pt"))
    assert runs["stopped"]["step"] == saved >= 3, "SIGTERM saves the last step"
    assert runs["running"]["top1"] is None, "not evaluated yet"


def test_the_newest_start_is_the_first_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = in_json(capsys, root)
    starts = [run["started"] for run in runs.values()]
    assert starts == sorted(starts, reverse=True)
    names = re.findall(rf"^{root}/(\S+)", in_text(capsys, root), re.MULTILINE)
    assert names == list(runs)


def test_runs_in_mlflow_are_listed_with_a_link_and_without_password(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(root / "tracked", tmp_path / "tracked")
    (entry,) = in_json(capsys, tmp_path)["tracked"]["mlflow"]
    assert entry["server"] == f"sqlite:///{root.parent}/mlflow.db"
    sent = json.loads((tmp_path / "tracked/mlflow.json").read_text())
    (found,) = sent.values()
    assert (entry["experiment_id"], entry["run_id"]) == (found["experiment_id"], found["run_id"])
    (tmp_path / "tracked/mlflow.json").write_text(json.dumps(sent | {"https://me:secret@host/mlflow": found}))
    text = in_text(capsys, tmp_path)
    assert f"\n  {root.parent}/mlflow.db, run {found['run_id'][:8]}\n" in text
    assert f"\n  https://host/mlflow/#/experiments/{found['experiment_id']}/runs/{found['run_id']}\n" in text
    assert main(["runs", str(tmp_path), "--json"]) == 0
    assert "secret" not in text + capsys.readouterr().out


def make_run(folder: Path, changes: str, time_ms: int) -> None:
    """Write what a finished run of `digits` leaves: journal and plan."""
    folder.mkdir(parents=True)
    rows = [
        {"time": time_ms, "event": "created", "run": "0"},
        {"time": time_ms, "event": "started", "step": 0, "tags": {"recipe": "digits", "changes": changes}},
        {"time": time_ms, "event": "evaluated", "step": 112, "top1": 0.98},
        {"time": time_ms, "event": "ended", "status": "FINISHED", "step": 168},
    ]
    (folder / "journal.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "plan.json").write_text(json.dumps({"last_step": 168}))


@pytest.mark.parametrize("columns", [80, 60])
def test_ten_runs_that_differ_in_a_key_are_a_table_that_fits_the_window(
    columns: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(tmp_path)
    for seed in range(10):
        make_run(tmp_path / f"runs/s{seed}", f"run.seed={seed}", seed)
    assert main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) < columns
    if columns == 80:
        assert lines[:2] == [
            "run      step     best top-1     status    recipe and changes",
            "runs/s9  168/168  0.9800 at 112  finished  digits run.seed=9",
        ]
        assert len(lines) == 11, "one line each"
    else:
        assert lines[1:3] == ["runs/s9  168/168  0.9800 at 112  finished", "  digits run.seed=9"]
    make_run(tmp_path / f"runs/{'long' * 20}", "a=1 " * 40, 99)
    assert main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"runs/{'long' * 20}" in lines
    assert max(len(line) for line in lines if "long" not in line) < columns


def test_steps_that_a_restart_trains_again_do_not_count_as_best(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = in_json(capsys, copy.parent)["copy"]
    journal = Journal(RunFolder(copy).journal, pytest.fail)
    journal.log_event("evaluated", step=4, top1=1.0)
    assert in_json(capsys, copy.parent)["copy"]["top1"] == 1
    journal.log_event("started", step=2, tags={"recipe": "digits"})
    journal.log_metrics(10, {"train/loss": 1.0})
    journal.log_event("saved", checkpoint="step-00000010.0000000000000000.pt")
    after = in_json(capsys, copy.parent)["copy"]
    assert after["top1_step"] == 2
    assert after["step"] == 10, "of the last metrics"
    assert (before["status"], after["status"]) == ("finished", "killed")


def test_a_start_that_failed_or_is_building_the_model_has_no_journal_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("failed", "killed", "starting"):
        folder = RunFolder(tmp_path / name)
        folder.hold()
        (tmp_path / name / "checkpoints/.step").touch()  # otherwise `release` removes the new folder
        folder.release()
    save_failure(tmp_path / "failed", RequestError("the model is too large"), "request")
    program = "import sys\nfrom pathlib import Path\nfrom pipeline.record.folder import RunFolder\n" \
              "RunFolder(Path(sys.argv[1])).hold()\nprint(flush=True)\nsys.stdin.read()"  # fmt: skip
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "starting")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=environment(),
    )  # fmt: skip
    with holder:
        assert holder.stdout
        holder.stdout.readline()
        runs = in_json(capsys, tmp_path)
        holder.kill()
    assert {name: run["status"] for name, run in runs.items()} == {
        "failed": "failed", "killed": "not started", "starting": "running",
    }  # fmt: skip
    assert (runs["failed"]["exit_code"], runs["failed"]["reason"]) == (2, "the model is too large")


def test_a_finished_run_stays_finished_if_a_later_request_fails(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_failure(copy, RequestError("the model is too large"), "request")
    assert in_json(capsys, copy.parent)["copy"]["status"] == "finished"


EVENT = '{"time": 1, "event": "%s", %s}\n'
DAMAGES = {
    "binary": b"\x00\xff\n" * 3,
    "not a row": b'{"time": 1, "event": "created", "run": "1"}\nnonsense\n',
    "torn event": b'{"time": 1, "event": "sta}\n',
    "a list": b"[1]\n",
    "another program's": b'{"event": "login", "user": "x"}\n',
    "no tags": (EVENT % ("started", '"step": 1')).encode(),
    "no number": (EVENT % ("started", '"step": Infinity, "tags": {"recipe": "x"}')).encode(),
    "NaN": (EVENT % ("started", '"step": 1, "tags": {"recipe": "x"}')
            + EVENT % ("evaluated", '"step": 1, "top1": NaN')).encode(),
    "status": (EVENT % ("started", '"step": 1, "tags": {"recipe": "x"}, "status": []')).encode(),
    "deep": b'{"event": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_journal_is_a_row_with_a_reason(damage: str, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(copy, copy.parent / "intact")
    (copy / "journal.jsonl").write_bytes(DAMAGES[damage])
    runs = in_json(capsys, copy.parent)
    assert runs["copy"]["status"] == "damaged"
    assert runs["copy"]["reason"].startswith("journal.jsonl is damaged: ")
    assert runs["intact"]["status"] == "finished"
    assert "\n  journal.jsonl is damaged: " in in_text(capsys, copy.parent)


def test_an_incomplete_last_line_is_no_damage(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(copy / "journal.jsonl", "ab") as file:
        file.write(b'{"time": 1, "eve')
    assert in_json(capsys, copy.parent)["copy"]["status"] == "finished"


@pytest.mark.parametrize("name", ["plan.json", "mlflow.json", "failure.json"])
@pytest.mark.parametrize("content", [b"", b"\xff", b"[1]", b'{"a": 1}', b'{"last_step": null}'])
def test_other_damaged_files_hide_no_status(
    name: str, content: bytes, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / name).write_bytes(content)
    run = in_json(capsys, copy.parent)["copy"]
    assert run["status"] == "finished"
    assert name in run["reason"] or name == "failure.json"
    assert "finished" in in_text(capsys, copy.parent)


def test_names_and_values_are_shown_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (b"\x1b[2J", b"a\nb", b"\xff"):
        make_run(tmp_path / os.fsdecode(name), "x=\x1b[31m\ud800\u202e", 0)
    text = in_text(capsys, Path("."))
    assert text.replace("\n", "").isprintable()
    assert [line.split()[0] for line in text.splitlines()] == ["run", r"\x1b[2J", r"a\nb", r"\xff"]
    assert len(in_json(capsys, tmp_path)) == 3


def test_links_and_the_folders_of_a_run_are_not_searched(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(copy, copy / "before-20260101-000000")
    (copy.parent / "link").symlink_to(copy)
    (copy.parent / "loop").symlink_to(copy.parent)
    (copy.parent / "linked").mkdir()
    (copy.parent / "linked/journal.jsonl").symlink_to(copy / "journal.jsonl")
    (copy.parent / "pipe").mkdir()
    os.mkfifo(copy.parent / "pipe/journal.jsonl")
    assert list(in_json(capsys, copy.parent)) == ["copy"]
    assert list(in_json(capsys, copy)) == ["."], "a run's own folder"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_what_cannot_be_read_is_named(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "journal.jsonl").chmod(0)
    (copy.parent / "closed").mkdir(mode=0)
    try:
        assert main(["runs", str(copy.parent)]) == 0
    finally:
        (copy.parent / "closed").chmod(0o700)
    captured = capsys.readouterr()
    assert "journal.jsonl cannot be read: Permission denied" in captured.out
    assert captured.err == f"{copy.parent}/closed cannot be read: Permission denied\n"


def test_a_folder_without_runs_gets_a_line_that_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    advice = "give the folder of your runs, or start a run with 'pipeline train RECIPE'"
    (tmp_path / "file").touch()
    for words, given in (((), "runs"), (("file",), "file"), (("no\nsuch",), r"no\nsuch")):
        assert main(["runs", *words]) == 2
        assert capsys.readouterr().err == f"pipeline: {given} is not a folder: {advice}\n"
    assert in_text(capsys, tmp_path) == f"no runs in {tmp_path}: {advice}\n"
    assert in_json(capsys, tmp_path) == {}


def test_a_thousand_runs_are_listed_in_seconds_without_torch_or_mlflow(tmp_path: Path) -> None:
    make_run(tmp_path / "0", "run.seed=1", 1)
    *first, ended = (tmp_path / "0/journal.jsonl").read_bytes().splitlines(keepends=True)
    values = {f"system/{key}": key / 3 for key in range(8)}
    metrics = [json.dumps({"time": 1, "step": step, "metrics": values}).encode() + b"\n" for step in range(400)]
    (tmp_path / "0/journal.jsonl").write_bytes(b"".join([*first, *metrics, ended]))
    for number in range(1, 1000):
        (tmp_path / f"{number}").mkdir()
        for name in ("journal.jsonl", "plan.json"):
            os.link(tmp_path / "0" / name, tmp_path / f"{number}" / name)
    program = (
        "import sys\nfrom pipeline.cli.main import main\n"
        "assert main(['runs', sys.argv[1]]) == 0\nassert not {'torch', 'mlflow'} & sys.modules.keys()"
    )
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("  finished") == 1000
    assert time.monotonic() - start < 30
