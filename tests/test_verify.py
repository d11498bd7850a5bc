"""The receipt is complete; a run repeated from it is bit-identical or its difference is named."""

import json
import shutil
import signal
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Job, MakeJob, kill, quick, read_rows, refused

from pipeline import machine
from pipeline.addons.models.trained import digest_and_checksums
from pipeline.addons.models.trust import trust
from pipeline.addons.ops.against import against
from pipeline.addons.ops.commands import _step_range
from pipeline.addons.ops.compare import compare
from pipeline.addons.ops.run import Run
from pipeline.addons.ops.verify import _repetition_config, verify
from pipeline.config.schema import Config
from pipeline.errors import RequestError, printable_line

OTHER = "sha256:" + "0" * 64
REMOVED = object()
ROW, START = "evaluations.1", "starts.0"
WORDS = ("data.workers=0", "train.max_steps=12", "evaluate.every=4 steps", "checkpoint.every=4 steps",
         "checkpoint.keep=3")  # fmt: skip


def receipt(run: Path) -> dict[str, Any]:
    return json.loads((run / "receipt.json").read_text())


@pytest.fixture(scope="module")
def uninterrupted(job: MakeJob) -> Job:
    return job(*WORDS).finished()


@pytest.fixture
def copy(uninterrupted: Job, tmp_path: Path) -> Path:
    """Return a copy of the run, whose receipt a test changes."""
    folder = Path(shutil.copytree(uninterrupted.folder, tmp_path / "copy"))
    shutil.copy(folder / "receipt.json", folder / "unchanged.json")
    return folder


def change_receipt(run: Path, changes: dict[str, Any]) -> None:
    """Write the unchanged receipt with other values, by path, such as starts.0.world."""
    contents = json.loads((run / "unchanged.json").read_text())
    for path, value in changes.items():
        *parents, name = [int(word) if word.isdigit() else word for word in path.split(".")]
        place = reduce(getitem, parents, contents)
        if value is REMOVED:
            del place[name]
        else:
            place[name] = value
    (run / "receipt.json").write_text(json.dumps(contents))


def test_the_receipt_of_a_killed_run_is_complete(uninterrupted: Job, job: MakeJob) -> None:
    expected = receipt(uninterrupted.folder)
    assert (expected["config"]["run"]["seed"], expected["plan"]["global_batch"]) == (0, 48)
    assert len(expected["data"]) == 64
    (start,) = expected["starts"]
    assert (start["step"], start["world"], start["threads"], start["device_type"]) == (0, 1, 1, "cpu")
    assert {"python", "torch", "torchvision", "numpy", "device"} <= start.keys()
    assert [row["step"] for row in expected["evaluations"]] == [4, 8, 12]
    last = expected["evaluations"][-1]
    assert last.keys() == {
        "step", "weights", "tensors", "top1", "top5", "loss", "nll", "ece", "balanced_accuracy", "images",
        "train_loss",
    }  # fmt: skip
    assert expected["done"].endswith(f"weights={last['weights']}")

    run = job(*WORDS).start()
    run.wait_until(run.checkpoints, "checkpoint")
    kill(run.ranks()[0], signal.SIGKILL)
    run.wait_gone(5)
    before = receipt(run.folder)
    assert [row["step"] for row in before["evaluations"]][:1] == [4], "evaluations are written at once"
    assert before["done"] is None
    row = next(row for row in read_rows(run.folder / "journal.jsonl") if row.get("event") == "evaluated")
    with open(run.folder / "journal.jsonl", "a") as journal:
        journal.write(json.dumps(row | {"step": 12, "weights": "those of a step that is repeated"}) + "\n")
    found = receipt(run.finished().folder)
    assert (found["evaluations"], found["done"]) == (expected["evaluations"], expected["done"])
    first, second = found["starts"]
    assert (first["step"], second) == (0, {**first, "step": second["step"]})


def test_a_repeated_run_or_part_is_identical_or_differs(uninterrupted: Job, copy: Path) -> None:
    folder = uninterrupted.folder
    (folder / "checkpoints/step-00000012 copy.pt").touch()  # is no checkpoint
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    _, eighth, last = (row["weights"] for row in receipt(folder)["evaluations"])
    found = f"identical: 2 evaluations and 2 checkpoints up to step 8, weights={eighth}\n"
    assert quick("verify", str(folder), "--steps", "11", code=0).out.startswith(found)
    part = quick("verify", str(folder), "--steps", "8-12", code=0)
    found = f"identical: 1 evaluation and 1 checkpoint from step 8 to step 12, weights={last};"
    assert part.out.startswith(found)
    assert part.out.endswith("; the steps up to 8 are trusted\n")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before

    change_receipt(copy, {"config.run.seed": 1})
    other = quick("verify", str(copy), "--steps", "8", code=1)
    assert other.out.startswith("differs: at step 4 weights is sha256:")
    assert "at step 4 the first tensor to differ is model.conv_stem.weight (" in other.out
    assert "no change of software, threads or device is known" in other.out


def test_a_changed_receipt_differs(copy: Path, uninterrupted: Job) -> None:
    """In place of each repetition stands the same run."""
    shutil.rmtree(copy / "checkpoints")
    for path, value, says in (
        (f"{ROW}.weights", OTHER, f"at step 8 weights is {OTHER} in the receipt and sha256:"),
        (f"{ROW}.tensors", "0" * 8, "at step 8 tensors is 0"),
        (f"{ROW}.train_loss", 0.5, "at step 8 train_loss is 0.5 in the receipt and "),
        (f"{ROW}.map", 0.9, "at step 8 map is 0.9 in the receipt and missing now"),
        (f"{ROW}.nll", REMOVED, "at step 8 nll is missing in"),
        (f"{ROW}.step", 7, "at step 7 the receipt has an evaluation, and the repetition makes none"),
        (ROW, REMOVED, "at step 8 the repetition makes an evaluation, and the receipt has none"),
        ("plan.peak_lr", REMOVED, "the plan's peak_lr is missing in the receipt"),
        ("plan.total_steps", 7, "the plan's total_steps is 7 in the receipt and "),
        (f"{START}.threads", REMOVED, "in the start at step 0 threads is missing"),
        (f"{START}.world", 2, "in the start at step 0 world is 2 in the receipt and 1 now"),
        (f"{START}.device_type", "tpu", "in the start at step 0 device_type is tpu in the receipt"),
        ("done", None, "the result line done is None in the"),
    ):
        change_receipt(copy, {path: value})
        assert compared(copy, uninterrupted).startswith(f"differs: {says}")
    change_receipt(copy, {f"{ROW}.map": "\x1b" * 10_000})
    result = printable_line(compared(copy, uninterrupted))
    assert result.startswith("differs: at step 8 map is \\x1b")
    assert len(result) < 2_000
    assert str(RequestError("\x1b[2J\nhere", "…")) == "\\x1b[2J here: …"


def compared(run: Path, repetition: Job, start: int = 0) -> str:
    return compare(Run.read(run), Run.read(repetition.folder), start, 12)


def test_the_first_tensor_that_differs_is_named_without_checkpoints(copy: Path, uninterrupted: Job) -> None:
    contents = uninterrupted.contents()
    contents["model"]["conv_stem.weight"][0, 0, 0, 0] += 1
    shutil.rmtree(copy / "checkpoints")
    digest, checksums = digest_and_checksums(contents["model"])
    changes = {"evaluations.2.weights": f"sha256:{digest}", "evaluations.2.tensors": checksums}
    change_receipt(copy, changes)
    tensor = "at step 12 the first tensor to differ is conv_stem.weight (1 of 88 differ)"
    assert tensor in compared(copy, uninterrupted)
    old = {f"evaluations.{row}.tensors": REMOVED for row in range(3)}
    facts = {f"{START}.torch": "1.0", f"{START}.commit": "other"}
    change_receipt(copy, {f"{ROW}.weights": OTHER, **old, **facts})
    found = compared(copy, uninterrupted)
    assert found.startswith("differs: at step 8 weights is "), "a receipt of version 0.2"
    assert f" and other there, torch is {torch.__version__} here and 1.0 there" in found


def test_a_part_is_repeated_from_a_checkpoint_of_the_receipt(copy: Path, uninterrupted: Job) -> None:
    result = compared(copy, uninterrupted, 5)
    assert result.endswith("; the steps up to 5 are trusted; the receipt has no weights for step 5")
    assert _step_range("0-8") == _step_range("8") == (0, 8)
    assert "has no checkpoint of step 5, only 4, 8, 12" in refused(lambda: verify(copy, 12, 5))
    nothing = "after step 4 up to step 7: nothing can be compared: the next one is of step 8"
    assert nothing in refused(lambda: verify(copy, 7, 4))
    contents = receipt(copy)
    weights = [row["weights"] for row in contents["evaluations"]]
    change_receipt(copy, {"evaluations.0.weights": weights[1]})
    other = f"does not belong to the receipt: its weights are {weights[0]}, not {weights[1]}"
    assert other in refused(lambda: verify(copy, 12, 4))

    for name in ("starts", "evaluations"):
        contents[name].append(contents[name][0] | {"step": 6})
    change_receipt(copy, {name: contents[name] for name in ("starts", "evaluations")})
    result = compared(copy, uninterrupted)
    assert result.startswith("identical but for step 6, which a restart may have added: 3 evaluations and ")


def test_published_receipts_are_compared(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published, page = copy.parent / "receipts", copy.parent / "PAGE.md"
    for name in ("digits", "other", "broken"):
        shutil.copytree(copy, published / name)
    change_receipt(published / "other", {"config.train.epochs": 3})
    (published / "broken/receipt.json").write_text("{")
    digits, weights = published / "digits", receipt(copy)["evaluations"][-1]["weights"]

    def answer(changes: dict[str, Any], code: int = 0, page: Path | None = None) -> str:
        change_receipt(copy, changes)
        assert against(copy, published, page) == code
        output = capsys.readouterr()
        assert output.err.startswith(f"skipped: {published / 'broken'} has no readable receipt")
        return output.out

    equal = f"these are the weights that {digits} names: {weights}\n"
    assert answer({}) == equal
    assert answer({"config.run.deterministic": False}) == equal, "run.portable implies it"
    page.write_text(f"`{weights[:23]}…`")
    assert answer({}, page=page) == f"these are the weights that {page} names: {weights}\n"
    shorter = answer({"evaluations.2": REMOVED})
    assert shorter.startswith(f"these are the weights that {digits} names for step 8: sha256:")
    other = {f"{ROW}.weights": OTHER, f"{START}.commit": "another"}
    assert answer(other, code=1).endswith("; no known change explains it\n")
    elsewhere = {"world": 2, "torch": "1.0", "device": "another", "portable": "no avx2"}
    found = answer(other | {f"{START}.{name}": value for name, value in elsewhere.items()})
    assert found.startswith(f"differs: at step 8 weights is {OTHER}, and sha256:")
    causes = ("torch is 1.0", "world is 2", "portable is no avx2 here and yes there", "device is another")
    places = [found.index(text) for text in causes]
    assert places == sorted(places)
    assert f"has this configuration (unlike {digits} in run.seed)" in answer({"config.run.seed": 7})
    for folder in (copy / "checkpoints", copy):
        assert "no receipt in" in refused(lambda folder=folder: against(copy, folder))  # type: ignore[misc]
    assert against(copy, Path(__file__).parent.parent / "docs/receipts") == 0
    assert capsys.readouterr().out.count("\n") == 1, "receipts of version 0.2 are read"


def test_a_repetition_must_train_each_step(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the repetition stands a run that was restored at its end."""
    made = []

    def repeat(config: Config, *_: Any) -> None:
        made.append(config)
        shutil.copytree(copy, config.run_dir)
        change_receipt(config.run_dir, {f"{START}.step": 12})

    monkeypatch.setattr("pipeline.addons.ops.verify._repeat", repeat)
    change_receipt(copy, {"config.checkpoint.mirror": "s3://bucket/finished"})
    assert "the repetition started at step 12 and not at step 0" in refused(lambda: verify(copy, None))
    assert made[0].checkpoint.mirror is None


def test_a_receipt_chooses_no_place_to_write_or_read(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_TRUSTED_MODEL", "")

    def config(section: str, **values: Any) -> Config:
        change_receipt(copy, {f"config.{section}.{name}": value for name, value in values.items()})
        return _repetition_config(Run.read(copy), copy / "new")

    pack = {"source": "pack", "root": "s3://bucket/pack", "cache": "/some/where"}
    assert config("data", root=str(copy / "absent")).data.root is None
    init = refused(lambda: config("model", init="models:/a@b"))
    assert "model.init=models:/a@b would be read with your credentials" in init
    assert "add --trust s3://bucket/pack" in refused(lambda: config("data", **pack))
    trust("s3://bucket/pack")
    assert config("data", **pack).data.cache is None


def test_a_malformed_receipt_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, value in (
        (f"{START}.world", "2"), (f"{START}.world", 4097), (f"{START}.step", True), (f"{ROW}.step", 4.0),
        (f"{ROW}.weights", "sha256:\x1b[2J"), (f"{ROW}.tensors", None), ("done", ["done"]), ("starts", []),
        ("format", 2), ("plan.steps_per_epoch", "14"),
    ):  # fmt: skip
        change_receipt(copy, {path: value})
        assert "has no readable receipt" in refused(lambda: Run.read(copy))
    (copy / "receipt.json").write_text("[" * 200_000)
    malformed = quick("verify", str(copy))
    assert malformed.error.startswith(f"{copy} has no readable receipt"), "as a command it is one line"
    monkeypatch.setattr("pipeline.addons.ops.run._MAX_BYTES", 1 << 10)
    assert "larger than" in refused(lambda: verify(copy, None))


def test_a_run_that_cannot_be_repeated_is_refused_before_it_starts(copy: Path) -> None:
    (first,) = receipt(copy)["starts"]
    refusals: list[tuple[str, dict[str, Any]]] = [
        ("is not deterministic", {"config.run.deterministic": False, "config.run.portable": False}),
        ("world changed from 1 to 2 at step 4", {"starts": [first, first | {"step": 4, "world": 2}]}),
        ("from another run's checkpoint", {f"{START}.step": 3}),
        ("nothing can be compared", {"evaluations": []}),
        ("the data is another", {"data": "0" * 64}),
    ]
    if not machine.has_gpu():
        refusals.append(("no GPU is visible", {f"{START}.device_type": "cuda"}))
    shutil.rmtree(copy / "checkpoints")
    for says, changes in refusals:
        change_receipt(copy, changes)
        assert says in refused(lambda: verify(copy, None))
