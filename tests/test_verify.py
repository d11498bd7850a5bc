"""The receipt is complete; a run repeated from it is bit-identical or its difference is named."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SMALL, Job, Result, kill, quick

from pipeline import machine
from pipeline.addons.ops import verify as commands
from pipeline.addons.ops.against import against
from pipeline.addons.ops.commands import _step_range
from pipeline.addons.ops.compare import Run, compare
from pipeline.addons.ops.receipt import read_receipt
from pipeline.config.schema import Config
from pipeline.config.trust import trust
from pipeline.errors import RequestError, printable_line
from pipeline.model.weights import digest_and_checksums
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


@pytest.fixture(scope="module")
def repetition(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    """Return the folder of the same run, trained again."""
    run = job(tmp_path_factory.mktemp("repetition") / "run", digits)
    assert run.run().code == 0
    return run.folder


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
        "step", "weights", "tensors", "top1", "top5", "loss", "nll", "ece", "balanced_accuracy", "images", "train_loss"
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
        f"identical: 2 evaluations and 2 checkpoints up to step 8, weights={weights};"
        " the trace of 8 steps is identical, too\n",
    )
    assert {path: path.stat().st_mtime_ns for path in uninterrupted.folder.rglob("*")} == before


def test_another_seed_differs_from_the_first_step_and_tensor_on(copy: Path) -> None:
    edit_receipt(copy, lambda contents: contents["config"]["run"].update(seed=1))
    result = verify(copy, "--steps", "8")
    assert result.code == 1
    assert result.out.startswith("differs: at step 4 weights is sha256:")
    assert "; the first batch to differ from trace.jsonl is that of step 1, other samples; " in result.out
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


def in_row(**changes: Any) -> Any:
    return lambda contents: contents["evaluations"][1].update(changes)


def in_start(**changes: Any) -> Any:
    return lambda contents: contents["starts"][0].update(changes)


OTHER = "sha256:" + "0" * 64
TAMPERED = {
    "weights": (in_row(weights=OTHER), f"at step 8 weights is {OTHER} in the receipt and sha256:"),
    "tensors": (in_row(tensors="0" * 8 * 338), "at step 8 tensors differs: conv1.0.weight (338 of 338 differ)"),
    "fewer tensors": (in_row(tensors="0" * 8), "at step 8 tensors differs: unknown: there were 1 tensors, and there"),
    **{name: (in_row(**{name: 0.5}), f"at step 8 {name} is 0.5 in the receipt and ")
       for name in ("top1", "top5", "loss", "nll", "ece", "balanced_accuracy", "images", "train_loss")},
    "a figure less": (lambda contents: contents["evaluations"][1].pop("nll"), "at step 8 nll is missing in the"),
    "no tensors": (lambda contents: contents["evaluations"][1].pop("tensors"), "at step 8 tensors is missing in the"),
    "a number of the plan less": (
        lambda contents: contents["plan"].pop("peak_lr"), "the plan's peak_lr is missing in the receipt"
    ),
    "a start without threads": (
        lambda contents: contents["starts"][0].pop("threads"), "threads of the start at step 0 is missing in the"
    ),
    "no result line": (
        lambda contents: contents.update(done=None), "the receipt has no result line, and its run ended at step 12"
    ),
    "a figure more": (in_row(map=0.9), "at step 8 map is 0.9 in the receipt and missing now"),
    "step": (in_row(step=7), "at step 7 the receipt has an evaluation, and the repetition makes none"),
    "a row less": (
        lambda contents: contents["evaluations"].pop(1),
        "at step 8 the repetition makes an evaluation, and the receipt has none",
    ),
    "world": (in_start(world=2), "world of the start at step 0 is 2 in the receipt and 1 now"),
    "threads": (in_start(threads=2), "threads of the start at step 0 is 2 in the receipt and 1 now"),
    "epochs": (in_start(epochs=3), "epochs of the start at step 0 is 3 in the receipt and 12 now"),
    "kind of device": (in_start(device_type="tpu"), "device_type of the start at step 0 is tpu in the receipt and cpu"),
    "data": (lambda contents: contents.update(data="0" * 64), "the data differs from that of the run"),
    "done": (
        lambda contents: contents.update(done=contents["done"].replace("top1=0", "top1=1")),
        "contradicts itself: its result line has top1=1.",
    ),
    "last row": (
        lambda contents: contents["evaluations"][-1].update(images="9/9"),
        "its result line has images=360/360, and its evaluation of step 12 9/9",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "found"), TAMPERED.values(), ids=TAMPERED)
def test_a_changed_receipt_is_refused_or_differs(
    copy: Path, repetition: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], change: Any,
    found: str,
) -> None:  # fmt: skip
    """In place of each repetition stands the same run, trained once."""
    monkeypatch.setattr(commands, "_repeat", lambda config, *_: shutil.copytree(repetition, config.run_dir))
    shutil.rmtree(copy / "checkpoints")
    edit_receipt(copy, change)
    try:
        assert commands.verify(copy, None) == 1
        line = capfd.readouterr().out
        assert line.startswith(f"differs: {found}")
    except RequestError as refusal:
        line = f"{refusal}\n"
        assert found in line
    assert line.count("\n") == 1


def test_a_changed_number_of_the_plan_differs(uninterrupted: Job, repetition: Path, tmp_path: Path) -> None:
    contents, new = receipt(uninterrupted.folder), Run(receipt(repetition), RunFolder(repetition))
    numbers = {name for name, value in contents["plan"].items() if isinstance(value, int | float)}
    for name in numbers - {"local_world", "workers_per_node", "workers", "is_portable"}:  # those depend on the machine
        plan = contents["plan"] | {name: contents["plan"][name] + 1}
        result = compare(Run(contents | {"plan": plan}, RunFolder(tmp_path)), new, 0, 12)
        assert result.startswith(f"differs: the plan's {name} is {plan[name]} in the receipt and "), result


def test_a_changed_sample_is_named_by_its_step(copy: Path, repetition: Path) -> None:
    lines = (copy / "trace.jsonl").read_text().splitlines(keepends=True)

    def change_row(row: int, **changes: Any) -> str:
        changed = json.dumps(json.loads(lines[row]) | changes) + "\n"
        (copy / "trace.jsonl").write_text("".join([*lines[:row], changed, *lines[row + 1 :]]))
        runs = (Run(receipt(folder), RunFolder(folder)) for folder in (copy, repetition))
        return compare(*runs, 0, 12)

    found = change_row(6, ids=[1])
    assert found.startswith("differs: the first batch to differ from trace.jsonl is that of step 7, other samples; ")
    assert "the checkpoints of steps 4, 8, 12 are identical, so the trace does not belong to them" in found
    assert "is that of step 3, the same samples with other pixels" in change_row(2, batch_sha256="0" * 64)


def test_the_first_tensor_that_differs_is_named_without_checkpoints(copy: Path, repetition: Path) -> None:
    shutil.rmtree(copy / "checkpoints")
    contents, new = receipt(copy), Run(receipt(repetition), RunFolder(repetition))
    (newest,) = repetition.glob("checkpoints/step-00000012.*")
    weights = torch.load(newest, weights_only=True)["model"]
    weights["stage2.0.branch1.0.weight"][0, 0, 0, 0] += 1
    digest, checksums = digest_and_checksums(weights)
    contents["evaluations"][2] |= {"weights": f"sha256:{digest}", "tensors": checksums}
    result = compare(Run(contents, RunFolder(copy)), new, 0, 12)
    assert "; at step 12 the first tensor to differ is stage2.0.branch1.0.weight (1 of 338 differ); " in result
    for row in contents["evaluations"]:
        del row["tensors"]
    assert "; no step has a checkpoint in both runs, so no tensor can be named; " in compare(
        Run(contents, RunFolder(copy)), new, 0, 12
    )
    assert contents["evaluations"][2].pop("weights")
    edit_receipt(copy, lambda stored: stored.update(contents))
    with pytest.raises(RequestError, match="not a receipt of format 1"):
        commands.verify(copy, None)


def test_a_part_of_a_run_is_repeated_from_its_checkpoint(copy: Path) -> None:
    def refused(steps: int, start: int) -> str:
        with pytest.raises(RequestError) as refusal:
            commands.verify(copy, steps, start)
        return str(refusal.value)

    weights = [row["weights"] for row in receipt(copy)["evaluations"]]
    result = verify(copy, "--steps", "8-12")
    assert (result.code, result.out) == (
        0,
        f"identical: 1 evaluation and 1 checkpoint from step 8 to step 12, weights={weights[2]};"
        " the trace of 4 steps is identical, too; the steps up to 8 are trusted\n",
    )
    assert _step_range("0-8") == _step_range("8") == (0, 8)
    assert "has no checkpoint of step 5: it has those of 4, 8, 12" in refused(12, 5)
    assert "the first evaluation or checkpoint after step 4 in" in refused(7, 4)
    edit_receipt(copy, lambda contents: contents["evaluations"][0].update(weights=weights[1]))
    assert f"does not belong to the receipt: its weights are {weights[0]}, and those of step 4 " in refused(12, 4)
    shutil.rmtree(copy / "checkpoints")
    assert "docs/reproducibility.md, 'Publish a receipt', says where to get one" in refused(12, 4)


def test_a_run_is_compared_with_published_receipts(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published, page = tmp_path / "receipts", tmp_path / "README.md"
    for name in ("digits", "other"):
        (published / name).mkdir(parents=True)
        shutil.copy(copy / "receipt.json", published / name)
    edit_receipt(published / "other", lambda contents: contents["config"]["train"].update(epochs=3))
    weights = receipt(copy)["evaluations"][-1]["weights"]
    page.write_text("no digest here")

    def answer(change: Any = lambda contents: None, code: int = 0) -> str:
        saved = (copy / "receipt.json").read_text()
        edit_receipt(copy, change)
        assert against(copy, published, page) == code
        (copy / "receipt.json").write_text(saved)
        return capsys.readouterr().out

    def other_weights(**facts: Any) -> Any:
        def change(contents: Any) -> None:
            in_row(weights=OTHER)(contents)
            in_start(**facts)(contents)

        return change

    assert answer() == f"these are the weights that {published / 'digits'} names: {weights}\n"
    page.write_text(f"`{weights[:23]}…`")
    assert answer() == f"these are the weights that {page} names: {weights}\n"
    shorter = answer(lambda contents: contents["evaluations"].pop())
    assert shorter.startswith(f"these are the weights that {published / 'digits'} names for step 8: sha256:")
    assert answer(other_weights(), code=1).endswith("; no known change explains it\n")
    found = answer(other_weights(world=2, torch="1.0", device="another", portable="no avx2"))
    assert found.startswith(f"differs: at step 8 weights is {OTHER}, and sha256:")
    not_portable = "this run is not portable (no avx2), the receipt's is"
    places = [found.index(text) for text in ("torch is 1.0 here", "number of processes is 2", not_portable, "the CPU")]
    assert places == sorted(places)
    found = answer(lambda contents: contents["config"]["run"].update(seed=7))
    assert found == f"no receipt in {published} has this configuration (run.seed=7, unlike {published / 'digits'})\n"
    with pytest.raises(RequestError, match="holds no receipt"):
        against(copy, copy / "checkpoints", None)
    receipts = Path(__file__).parent.parent / "docs/receipts"
    assert against(copy, receipts, None) == 0
    assert capsys.readouterr().out.count("\n") == 1, "receipts of version 0.2 are read"


def test_an_unreadable_receipt_and_the_run_itself_are_left_out(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RequestError, match="holds no receipt other than that of RUN_DIR"):
        against(copy, copy, None)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/receipt.json").write_text("{")
    with pytest.raises(RequestError, match="can be read"):
        against(copy, tmp_path, None)
    shutil.copytree(copy, tmp_path / "other")
    edit_receipt(tmp_path / "other", lambda contents: contents["config"]["run"].update(deterministic=False))
    capsys.readouterr()
    assert against(copy, tmp_path, None) == 0
    found = capsys.readouterr()
    assert found.out.startswith(f"these are the weights that {tmp_path / 'other'} names"), "run.portable implies it"
    assert found.err.startswith(f"skipped: {tmp_path / 'broken'} has no readable receipt")


def test_a_repetition_restores_nothing_and_must_train_each_step(
    copy: Path, repetition: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of the repetition stands a run that was restored at its end."""
    made = []

    def repeat(config: Config, *_: Any) -> None:
        made.append(config)
        shutil.copytree(repetition, config.run_dir)
        edit_receipt(config.run_dir, in_start(step=12))

    monkeypatch.setattr(commands, "_repeat", repeat)
    edit_receipt(copy, lambda contents: contents["config"]["checkpoint"].update(mirror="s3://bucket/finished"))
    with pytest.raises(RequestError, match="started at step 12 and not at step 0, so it did not train"):
        commands.verify(copy, None)
    assert made[0].checkpoint.mirror is None


def test_a_receipt_chooses_no_place_that_verify_writes_to_or_reads_with_credentials(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_TRUSTED_MODEL", "")

    def config(section: str, **values: Any) -> Config:
        edit_receipt(copy, lambda contents: contents["config"][section].update(values))
        return commands._repetition_config(Run(receipt(copy), RunFolder(copy)), RunFolder(tmp_path / "new"))

    assert config("data", root=str(tmp_path / "absent")).data.root is None
    with pytest.raises(RequestError, match=r"model\.init=models:/a@b would be read with your credentials"):
        config("model", init="models:/a@b")
    pack = {"source": "pack", "root": "s3://bucket/pack", "cache": "/some/where"}
    with pytest.raises(RequestError, match="add --trust s3://bucket/pack"):
        config("data", **pack)
    trust("s3://bucket/pack")
    trust("models:/a@b")
    assert config("data", **pack).data.cache is None


MALFORMED = {
    "world": in_start(world="2"),
    "too many processes": in_start(world=4097),
    "step of a start": in_start(step=True),
    "step of an evaluation": in_row(step=4.0),
    "weights": in_row(weights="sha256:\x1b[2J"),
    "checksums": in_row(tensors=None),
    "result line": lambda contents: contents.update(done=["done"]),
    "steps of an epoch": lambda contents: contents["plan"].update(steps_per_epoch="14"),
    "starts": lambda contents: contents.update(starts={"step": 0}),
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_receipt_is_refused(copy: Path, change: Any) -> None:
    edit_receipt(copy, change)
    with pytest.raises(RequestError, match="is not a receipt of format 1"):
        read_receipt(RunFolder(copy))


def test_a_receipt_is_limited_and_its_text_is_printable(
    copy: Path, repetition: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents, new = receipt(copy), Run(receipt(repetition), RunFolder(repetition))
    del contents["config"]["train"]
    in_row(map="\x1b" * 10_000)(contents)
    result = printable_line(compare(Run(contents, RunFolder(copy)), new, 0, 12))
    assert result.startswith("differs: at step 8 map is \\x1b")
    assert result.isprintable()
    assert len(result) < 2_000
    assert str(RequestError("\x1b[2J\nhere", "…")) == "\\x1b[2J here: …"
    monkeypatch.setattr("pipeline.addons.ops.receipt._MAX_BYTES", 1 << 10)
    with pytest.raises(RequestError, match="has no readable receipt"):
        read_receipt(RunFolder(copy))


@pytest.mark.parametrize("change", ["cut", "twice", "no number"])
def test_a_trace_has_one_row_for_each_step(copy: Path, repetition: Path, change: str) -> None:
    lines = (copy / "trace.jsonl").read_text().splitlines(keepends=True)
    changed = {"cut": lines[:-1], "twice": [*lines, lines[-1]], "no number": ['{"step": "x"}\n', *lines]}[change]
    (copy / "trace.jsonl").write_text("".join(changed))
    result = compare(*(Run(receipt(folder), RunFolder(folder)) for folder in (copy, repetition)), 0, 12)
    found = {"cut": "has no row for step 12", "twice": "has more than one row", "no number": "has no row for step 1;"}
    assert result.startswith(f"differs: trace.jsonl {found[change]}")


def test_what_is_not_compared_is_in_the_result(copy: Path, repetition: Path) -> None:
    contents, new = receipt(copy), Run(receipt(repetition), RunFolder(repetition))
    contents["starts"].append(contents["starts"][0] | {"step": 6})
    contents["evaluations"].insert(1, contents["evaluations"][0] | {"step": 6})
    result = compare(Run(contents, RunFolder(copy)), new, 0, 12)
    assert result.startswith("identical but for step 6, which a restart may have added: 3 evaluations and ")
    result = compare(Run(receipt(copy), RunFolder(copy)), new, 5, 12)
    assert result.endswith("; the steps up to 5 are trusted; the receipt has no weights for step 5")


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
    assert "is not deterministic" in refused(
        lambda contents: contents["config"]["run"].update(deterministic=False, portable=False)
    )
    assert "the data differs from that of the run" in refused(lambda contents: contents.update(data="0" * 64))
    assert "world changed from 1 to 2 at step 4" in refused(lambda contents: contents["starts"].append(second))
    assert "from another run's checkpoint" in refused(lambda contents: contents["starts"][0].update(step=3))
    assert "not a receipt of format 1" in refused(lambda contents: contents.update(format=2))
    if not machine.has_gpu():
        assert "no GPU is visible" in refused(lambda contents: contents["starts"][0].update(device_type="cuda"))
    (tmp_path / "receipt.json").write_text("[" * 200_000)
    assert "has no readable receipt (it is nested too deeply)" in refused(run=tmp_path)
    assert verify(tmp_path).error.startswith(f"{tmp_path} has no readable receipt"), "as a command it is one line"
