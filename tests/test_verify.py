"""The receipt is complete; a run repeated from it is bit-identical or its difference is named."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from harness import SMALL, Job, Result, kill, quick

from pipeline import machine
from pipeline.addons.models.trained import digest_and_checksums
from pipeline.addons.models.trust import trust
from pipeline.addons.ops import verify as commands
from pipeline.addons.ops.against import against
from pipeline.addons.ops.commands import _step_range
from pipeline.addons.ops.compare import compare
from pipeline.addons.ops.run import Run
from pipeline.addons.run.receipt import Receipt, make_receipt
from pipeline.config.schema import Config
from pipeline.errors import RequestError, printable_line
from pipeline.record.folder import RunFolder

Change = Callable[[dict[str, Any]], object]
"""Edits the contents of a receipt."""
OTHER = "sha256:" + "0" * 64


def job(folder: Path, digits: Path, *more: str, nproc: int = 1) -> Job:
    words = ["digits", f"data.root={digits}", *SMALL, "data.workers=0", "train.max_steps=12",
             "evaluate.every=4 steps", "checkpoint.every=4 steps", "checkpoint.keep=3"]  # fmt: skip
    return Job(folder, [*words, *more], nproc=nproc)


def receipt(run: Path) -> dict[str, Any]:
    contents: dict[str, Any] = json.loads((run / "receipt.json").read_text())
    return contents


def edit_receipt(run: Path, change: Change) -> None:
    contents = receipt(run)
    change(contents)
    (run / "receipt.json").write_text(json.dumps(contents))


def in_row(**changes: Any) -> Change:
    return lambda contents: contents["evaluations"][1].update(changes)


def in_start(**changes: Any) -> Change:
    return lambda contents: contents["starts"][0].update(changes)


def in_config(section: str, **changes: Any) -> Change:
    return lambda contents: contents["config"][section].update(changes)


def verify(run: Path, *more: str) -> Result:
    return quick("verify", str(run), *more)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Job:
    """Return a run that nobody interrupted."""
    return job(tmp_path_factory.mktemp("uninterrupted") / "run", digits).finished()


@pytest.fixture(scope="module")
def repetition(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    """Return the folder of the same run, trained again."""
    return job(tmp_path_factory.mktemp("repetition") / "run", digits).finished().folder


@pytest.fixture
def copy(uninterrupted: Job, tmp_path: Path) -> Path:
    return Path(shutil.copytree(uninterrupted.folder, tmp_path / "copy"))


def compared(run: Path, repetition: Path, start: int = 0) -> str:
    return compare(Run.read(run), Run.read(repetition), start, 12)


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
        "step", "weights", "tensors", "top1", "top5", "loss", "nll", "ece", "balanced_accuracy", "images",
        "train_loss",
    }  # fmt: skip
    assert found["done"].endswith(f"weights={found['evaluations'][-1]['weights']}")


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
    assert (found["evaluations"], found["done"]) == (expected["evaluations"], expected["done"])
    first, second = found["starts"]
    assert (first["step"], second) == (0, {**first, "step": second["step"]})


def test_rows_repeated_by_a_restart_appear_once_with_the_last_value(copy: Path) -> None:
    rows = [
        {"event": "created", "run": "r"}, {"event": "started", "step": 0, "tags": {"world": 1}},
        {"step": 3, "metrics": {"train/loss": 3.0}}, {"event": "evaluated", "step": 4, "weights": "a"},
        {"step": 6, "metrics": {"train/loss": 2.0}}, {"event": "evaluated", "step": 8, "weights": "replaced"},
        {"event": "started", "step": 4, "tags": {"world": 3}},
        {"event": "started", "step": 4, "tags": {"world": 2}},
        {"event": "evaluated", "step": 8, "weights": "b"},
        {"event": "ended", "status": "FINISHED", "line": "done"},
    ]  # fmt: skip
    folder = RunFolder(copy)
    texts = [json.dumps({"time": 1, **row}) + "\n" for row in rows]
    folder.journal.write_text("".join(texts))
    found = make_receipt(folder)
    assert found["evaluations"] == [
        {"step": 4, "weights": "a", "train_loss": 3.0}, {"step": 8, "weights": "b", "train_loss": 2.0}
    ]  # fmt: skip
    assert found["starts"] == [{"step": 0, "world": 1}, {"step": 4, "world": 2}]
    assert found["done"] == "done"
    growing, begin = Receipt(folder), "".join(texts[:6])
    folder.journal.write_text(begin)
    assert [row["weights"] for row in growing.contents()["evaluations"]] == ["a", "replaced"]
    folder.journal.write_text("x" * len(begin) + "".join(texts[6:]))
    assert growing.contents() == found, "a row is read once"


def test_a_repeated_run_is_identical_and_left_unchanged(uninterrupted: Job) -> None:
    (uninterrupted.folder / "checkpoints/step-00000012 copy.pt").touch()  # is no checkpoint
    before = {path: path.stat().st_mtime_ns for path in uninterrupted.folder.rglob("*")}
    result = verify(uninterrupted.folder, "--steps", "11")
    weights = receipt(uninterrupted.folder)["evaluations"][1]["weights"]
    assert result.code == 0
    assert result.out.startswith(
        f"identical: 2 evaluations and 2 checkpoints up to step 8, weights={weights}\n"
    )
    assert {path: path.stat().st_mtime_ns for path in uninterrupted.folder.rglob("*")} == before


def test_another_seed_differs_from_the_first_step_and_tensor_on(copy: Path) -> None:
    edit_receipt(copy, in_config("run", seed=1))
    result = verify(copy, "--steps", "8")
    assert result.code == 1
    assert result.out.startswith("differs: at step 4 weights is sha256:")
    assert "at step 4 the first tensor to differ is model.conv1.0.weight (" in result.out
    assert "no change of software, threads or device is known" in result.out


TAMPERED: dict[str, tuple[Change, str]] = {
    "weights": (in_row(weights=OTHER), f"at step 8 weights is {OTHER} in the receipt and sha256:"),
    "fewer tensors": (in_row(tensors="0" * 8), "at step 8 tensors is 0"),
    "train_loss": (in_row(train_loss=0.5), "at step 8 train_loss is 0.5 in the receipt and "),
    "a figure less": (lambda contents: contents["evaluations"][1].pop("nll"), "at step 8 nll is missing in"),
    "a figure more": (in_row(map=0.9), "at step 8 map is 0.9 in the receipt and missing now"),
    "a number of the plan less": (
        lambda contents: contents["plan"].pop("peak_lr"), "the plan's peak_lr is missing in the receipt"
    ),
    "a start without threads": (
        lambda contents: contents["starts"][0].pop("threads"), "in the start at step 0 threads is missing"
    ),
    "step": (in_row(step=7), "at step 7 the receipt has an evaluation, and the repetition makes none"),
    "a row less": (
        lambda contents: contents["evaluations"].pop(1),
        "at step 8 the repetition makes an evaluation, and the receipt has none",
    ),
    "world": (in_start(world=2), "in the start at step 0 world is 2 in the receipt and 1 now"),
    "kind of device": (in_start(device_type="tpu"),
                       "in the start at step 0 device_type is tpu in the receipt"),
    "data": (lambda contents: contents.update(data="0" * 64), "the data is another"),
    "result line": (lambda contents: contents.update(done=None), "the result line done is None in the"),
}  # fmt: skip


def test_a_changed_receipt_is_refused_or_differs(
    copy: Path, repetition: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In place of each repetition stands the same run, trained once."""
    monkeypatch.setattr(commands, "_repeat", lambda config, *_: shutil.copytree(repetition, config.run_dir))
    shutil.rmtree(copy / "checkpoints")
    saved = (copy / "receipt.json").read_text()
    for change, says in TAMPERED.values():
        edit_receipt(copy, change)
        try:
            assert commands.verify(copy, None) == 1
            line = capfd.readouterr().out
            assert line.startswith(f"differs: {says}")
        except RequestError as refusal:
            line = f"{refusal}\n"
            assert says in line
        assert line.count("\n") == 1
        (copy / "receipt.json").write_text(saved)


def test_a_changed_number_of_the_plan_differs(copy: Path, repetition: Path) -> None:
    shutil.rmtree(copy / "checkpoints")
    contents, new = receipt(copy), Run.read(repetition)
    of_this_machine = {"local_world", "workers_per_node", "workers", "is_portable"}
    numbers = {name for name, value in contents["plan"].items() if isinstance(value, int | float)}
    for name in numbers - of_this_machine:
        plan = contents["plan"] | {name: contents["plan"][name] + 1}
        result = compare(Run(contents | {"plan": plan}, RunFolder(copy)), new, 0, 12)
        assert result.startswith(f"differs: the plan's {name} is {plan[name]} in the receipt and "), result


def test_a_checkpoint_of_other_weights_is_named_by_its_step(
    copy: Path, repetition: Path, tmp_path: Path, digits: Path
) -> None:
    (newest,) = copy.glob("checkpoints/step-00000012.*")
    newest.unlink()
    other = job(tmp_path / "other", digits, "optimizer.lr=0.11", "evaluate.every=1000 epochs")
    assert other.run().code == 0
    shutil.copy(next(other.folder.glob("checkpoints/step-00000012.*")), copy / "checkpoints")
    found = compared(copy, repetition)
    assert found.startswith("differs: at step 12 the first tensor to differ is model.conv1.0.weight (")


def test_the_first_tensor_that_differs_is_named_without_checkpoints(copy: Path, repetition: Path) -> None:
    shutil.rmtree(copy / "checkpoints")
    (newest,) = repetition.glob("checkpoints/step-00000012.*")
    weights = torch.load(newest, weights_only=True)["model"]
    weights["stage2.0.branch1.0.weight"][0, 0, 0, 0] += 1
    digest, checksums = digest_and_checksums(weights)
    new = {"weights": f"sha256:{digest}", "tensors": checksums}
    edit_receipt(copy, lambda contents: contents["evaluations"][2].update(new))
    first = "; at step 12 the first tensor to differ is stage2.0.branch1.0.weight (1 of 338 differ); "
    assert first in compared(copy, repetition)
    edit_receipt(copy, lambda contents: [row.pop("tensors") for row in contents["evaluations"]])
    edit_receipt(copy, in_start(torch="1.0", commit="another"))
    found = compared(copy, repetition)
    assert found.startswith("differs: at step 12 weights is "), "a receipt of version 0.2"
    assert f" and another there, torch is {torch.__version__} here and 1.0 there" in found


def refused(copy: Path, steps: int | None, start: int = 0) -> str:
    return harness.refused(lambda: commands.verify(copy, steps, start))


def test_a_part_of_a_run_is_repeated_from_its_checkpoint(copy: Path, repetition: Path) -> None:
    weights = [row["weights"] for row in receipt(copy)["evaluations"]]
    result = verify(copy, "--steps", "8-12")
    assert result.code == 0
    part = f"identical: 1 evaluation and 1 checkpoint from step 8 to step 12, weights={weights[2]};"
    assert result.out.startswith(part)
    assert result.out.endswith("; the steps up to 8 are trusted\n")
    result = compared(copy, repetition, 5)
    assert result.endswith("; the steps up to 5 are trusted; the receipt has no weights for step 5")
    assert _step_range("0-8") == _step_range("8") == (0, 8)
    assert "has no checkpoint of step 5, only 4, 8, 12" in refused(copy, 12, 5)
    assert "after step 4 up to step 7: nothing can be compared: the next one is of step 8" in refused(
        copy, 7, 4
    )
    edit_receipt(copy, lambda contents: contents["evaluations"][0].update(weights=weights[1]))
    says = f"does not belong to the receipt: its weights are {weights[0]}, not {weights[1]}"
    assert says in refused(copy, 12, 4)


def test_a_run_is_compared_with_published_receipts(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published = tmp_path / "receipts"
    for name in ("digits", "other", "broken"):
        (published / name).mkdir(parents=True)
        shutil.copy(copy / "receipt.json", published / name)
    edit_receipt(published / "other", in_config("train", epochs=3))
    (published / "broken/receipt.json").write_text("{")
    weights = receipt(copy)["evaluations"][-1]["weights"]

    def answer(change: Change = lambda contents: None, code: int = 0) -> str:
        saved = (copy / "receipt.json").read_text()
        edit_receipt(copy, change)
        assert against(copy, published) == code
        (copy / "receipt.json").write_text(saved)
        output = capsys.readouterr()
        assert output.err.startswith(f"skipped: {published / 'broken'} has no readable receipt")
        return output.out

    def other_weights(**facts: Any) -> Change:
        def change(contents: Any) -> None:
            in_row(weights=OTHER)(contents)
            in_start(**facts)(contents)

        return change

    assert answer() == f"these are the weights that {published / 'digits'} names: {weights}\n"
    page = tmp_path / "PAGE.md"
    page.write_text(f"`{weights[:23]}…`")
    assert against(copy, published, page) == 0
    assert capsys.readouterr().out == f"these are the weights that {page} names: {weights}\n"
    assert answer(in_config("run", deterministic=False)), "run.portable implies it"
    shorter = answer(lambda contents: contents["evaluations"].pop())
    assert shorter.startswith(f"these are the weights that {published / 'digits'} names for step 8: sha256:")
    assert answer(other_weights(commit="another"), code=1).endswith("; no known change explains it\n")
    found = answer(other_weights(world=2, torch="1.0", device="another", portable="no avx2"))
    assert found.startswith(f"differs: at step 8 weights is {OTHER}, and sha256:")
    causes = ("torch is 1.0", "world is 2", "portable is no avx2 here and yes there", "device is another")
    places = [found.index(text) for text in causes]
    assert places == sorted(places)
    found = answer(in_config("run", seed=7))
    assert f"has this configuration (unlike {published / 'digits'} in run.seed)" in found
    for folder in (copy / "checkpoints", copy):
        with pytest.raises(RequestError, match=r"no receipt in .* can be read"):
            against(copy, folder)
    receipts = Path(__file__).parent.parent / "docs/receipts"
    assert against(copy, receipts) == 0
    assert capsys.readouterr().out.count("\n") == 1, "receipts of version 0.2 are read"


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
    edit_receipt(copy, in_config("checkpoint", mirror="s3://bucket/finished"))
    assert "the repetition started at step 12 and not at step 0" in refused(copy, None)
    assert made[0].checkpoint.mirror is None


def test_a_receipt_chooses_no_place_that_verify_writes_to_or_reads_with_credentials(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_TRUSTED_MODEL", "")

    def config(section: str, **values: Any) -> Config:
        edit_receipt(copy, in_config(section, **values))
        return commands._repetition_config(Run.read(copy), tmp_path / "new")

    assert config("data", root=str(tmp_path / "absent")).data.root is None
    with pytest.raises(RequestError, match=r"model\.init=models:/a@b would be read with your credentials"):
        config("model", init="models:/a@b")
    pack = {"source": "pack", "root": "s3://bucket/pack", "cache": "/some/where"}
    with pytest.raises(RequestError, match="add --trust s3://bucket/pack"):
        config("data", **pack)
    trust("s3://bucket/pack")
    trust("models:/a@b")
    assert config("data", **pack).data.cache is None


MALFORMED: list[Change] = [
    *(in_start(world=value) for value in ("2", 4097)), in_start(step=True),
    in_row(step=4.0), in_row(weights="sha256:\x1b[2J"), in_row(tensors=None),
    lambda contents: contents.update(done=["done"]),
    lambda contents: contents["plan"].update(steps_per_epoch="14"),
    lambda contents: contents.update(starts=[]),
    lambda contents: contents.update(format=2),
]  # fmt: skip


def test_a_malformed_receipt_is_refused_and_the_text_of_any_is_printable(
    copy: Path, repetition: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = (copy / "receipt.json").read_text()
    for change in MALFORMED:
        edit_receipt(copy, change)
        with pytest.raises(RequestError, match="has no readable receipt"):
            Run.read(copy)
        (copy / "receipt.json").write_text(saved)
    edit_receipt(copy, in_row(map="\x1b" * 10_000))
    result = printable_line(compared(copy, repetition))
    assert result.startswith("differs: at step 8 map is \\x1b")
    assert len(result) < 2_000
    assert str(RequestError("\x1b[2J\nhere", "…")) == "\\x1b[2J here: …"
    (copy / "receipt.json").write_text("[" * 200_000)
    assert verify(copy).error.startswith(f"{copy} has no readable receipt"), "as a command it is one line"
    monkeypatch.setattr("pipeline.addons.ops.run._MAX_BYTES", 1 << 10)
    assert "larger than" in refused(copy, None)


def test_an_evaluation_that_a_restart_added_is_not_compared(copy: Path, repetition: Path) -> None:
    edit_receipt(copy, lambda contents: contents["starts"].append(contents["starts"][0] | {"step": 6}))
    edit_receipt(
        copy, lambda contents: contents["evaluations"].append(contents["evaluations"][0] | {"step": 6})
    )
    result = compared(copy, repetition)
    assert result.startswith("identical but for step 6, which a restart may have added: 3 evaluations and ")


def test_a_run_that_cannot_be_repeated_is_refused_before_it_starts(copy: Path) -> None:
    saved = (copy / "receipt.json").read_text()
    second = {**receipt(copy)["starts"][0], "step": 4, "world": 2}
    refusals: list[tuple[str, Change]] = [
        ("is not deterministic", in_config("run", deterministic=False, portable=False)),
        ("world changed from 1 to 2 at step 4", lambda contents: contents["starts"].append(second)),
        ("from another run's checkpoint", in_start(step=3)),
        ("nothing can be compared", lambda contents: contents.update(evaluations=[])),
    ]
    if not machine.has_gpu():
        refusals.append(("no GPU is visible", in_start(device_type="cuda")))
    shutil.rmtree(copy / "checkpoints")
    for says, change in refusals:
        edit_receipt(copy, change)
        assert says in refused(copy, None)
        (copy / "receipt.json").write_text(saved)
