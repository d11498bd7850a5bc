"""Repeats a run from its receipt and compares: the same bits, or the first step and the first tensor that are not.

Promise: "identical" means that a run made anew, from the first weights on, had the same weights at every step that both
have a digest or a checkpoint of. The repetition has the receipt's configuration, processes, threads and kind of device; it
is an ordinary `pipeline train` in a folder of its own among the system's temporary ones, and nothing is written to RUN_DIR.
It always starts from the beginning: from a checkpoint, what led to that checkpoint would be believed and not shown. With
--steps it ends at the last step up to there that can be compared.

What surely could not repeat is refused (exit 2): bits that were not promised, pieces made with other numbers of
processes, data that changed, a GPU that is not here. What may or may not change bits (versions, the device's model) is
tried, and named if they differ. Different bits are exit 1, as `cmp` has it; a repetition that does not come through ends
with its own code, or 75.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pipeline import errors, machine, supervision, world
from pipeline.config.load import from_yaml
from pipeline.config.schema import Config
from pipeline.data import sources
from pipeline.errors import RequestError, TemporaryError
from pipeline.record.folder import RunFolder
from pipeline.record.receipt import FORMAT

if TYPE_CHECKING:
    from torch import Tensor

_COMPARED = ("weights", "top1", "top5", "loss", "images")
# facts of a start that say who and where, not with what
_NOT_A_REASON = ("step", "recipe", "world", "epochs")


def verify(run_dir: Path, steps: int | None) -> str | int:
    """`pipeline verify`: the line that says "identical", or the exit code after one that says what differs."""
    if world.is_launched():
        raise RequestError("verify starts the run's processes by itself: call it without torchrun")
    folder = RunFolder(run_dir)
    receipt = _read(folder)
    if folder.is_held():
        raise TemporaryError(f"the run in {run_dir} is under way: wait for its end, or stop it")
    with tempfile.TemporaryDirectory(prefix="pipeline-verify-", ignore_cleanup_errors=True) as scratch:
        again = RunFolder(Path(scratch) / "run")
        config = _request(receipt, run_dir, again)
        _refuse_what_cannot_repeat(receipt, config, run_dir)
        last = _last_step(receipt, folder, steps)
        config = config.model_copy(update={"train": config.train.model_copy(update={"max_steps": last})})
        print(f"repeating {run_dir} up to step {last:,} in {again.path}", file=sys.stderr, flush=True)
        _repeat(config, receipt["starts"][-1]["world"], Path(scratch) / "recipe.yaml")
        return _compare(receipt, _read(again), folder, again)


def _read(folder: RunFolder) -> dict[str, Any]:
    try:
        receipt = json.loads(folder.receipt.read_text())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise RequestError(
            f"{folder.path} has no receipt that can be read ({why}): give a run's folder; 'pipeline train' with the run's"
            " own words writes its receipt"
        ) from None
    if not isinstance(receipt, dict) or receipt.get("format") != FORMAT or not _is_whole(receipt):
        raise RequestError(f"{folder.receipt} is not a receipt of format {FORMAT}, which this version reads")
    return receipt


def _is_whole(receipt: dict[str, Any]) -> bool:
    """Return whether the receipt holds what a repetition needs."""
    try:
        return (
            {"data", "evaluations"} <= receipt.keys()
            and "world" in receipt["starts"][-1]
            and "threads" in receipt["plan"]
            and "arch" in receipt["config"]["model"]
        )
    except (KeyError, IndexError, TypeError):
        return False


def _request(receipt: dict[str, Any], run_dir: Path, again: RunFolder) -> Config:
    """The run's own request, for another folder and without a tracker."""
    start = receipt["starts"][-1]
    changes = {
        "run.dir": again.path,
        "run.resume": "auto",
        "run.device": start.get("device_type", "auto"),
        "run.threads": receipt["plan"]["threads"],
        "track.uri": "none",
        "track.report": "false",
        "track.required": "false",
    }
    text = yaml.safe_dump(receipt["config"], allow_unicode=True)
    return from_yaml(text, f"the receipt of {run_dir}", [f"{key}={value}" for key, value in changes.items()])


def _refuse_what_cannot_repeat(receipt: dict[str, Any], config: Config, run_dir: Path) -> None:
    if not config.is_deterministic:
        raise RequestError(
            f"the run in {run_dir} promised no bits: it has run.deterministic=false and run.exact=false, so they differ"
            " each time; train with run.deterministic=true to verify"
        )
    first, *later = receipt["starts"]
    if first["step"] > 0:
        raise RequestError(
            f"the run in {run_dir} began at step {first['step']}, from another run's checkpoint: verify that one"
        )
    for name, free in (("world", config.run.exact), ("epochs", False)):
        for start in later:
            if start.get(name) != first.get(name) and not free:
                raise RequestError(
                    f"the run in {run_dir} cannot be repeated in one piece: {name} {first.get(name)} became"
                    f" {start.get(name)} at step {start['step']}"
                    + ("; with run.exact=true the number of processes would not matter" * (name == "world"))
                )
    if config.run.device == "cuda" and not machine.has_gpu():
        raise machine.no_gpu_error()
    source = sources.open_source(config)
    if source.digest != receipt["data"]:
        from pipeline.train.resume import what_changed

        changed = what_changed(config, source, receipt["data"], run_dir / "index")
        raise RequestError(f"the data is not that of the run in {run_dir}: {changed}; put it back")


def _last_step(receipt: dict[str, Any], folder: RunFolder, steps: int | None) -> int:
    """The last step, up to `steps`, that there is something to compare with."""
    known = {row["step"] for row in receipt["evaluations"]} | {
        int(path.name.split(".")[0].removeprefix("step-")) for path in folder.checkpoints.glob("step-*.pt")
    }
    if not known:
        raise RequestError(
            f"the run in {folder.path} has neither an evaluation nor a checkpoint: there is nothing to compare"
        )
    within = [step for step in known if steps is None or step <= steps]
    if not within:
        raise RequestError(
            f"--steps {steps} ends before there is anything to compare: the first evaluation or checkpoint that"
            f" {folder.path} has is of step {min(known)}; give that or more"
        )
    return max(within)


def _repeat(config: Config, processes: int, recipe: Path) -> None:
    """Train it, as a person would. A Verdict if that does not come to its end."""
    recipe.write_text(config.to_yaml())
    words = ["train", str(recipe), *(["--nproc", str(processes)] if processes > 1 else [])]
    code = subprocess.run(
        [sys.executable, "-m", "pipeline", *words],
        stdout=subprocess.DEVNULL,  # its line is for whoever trains
        preexec_fn=partial(supervision.die_with_parent, os.getpid()),  # no thread runs here yet: torch comes later
        check=False,
    ).returncode
    if code:
        kind = errors.from_exit_code(code) if code in errors.PERMANENT else TemporaryError
        raise kind(f"the repetition did not come to its end (exit {code}): nothing is compared, its own line is above")


def _compare(receipt: dict[str, Any], repeated: dict[str, Any], folder: RunFolder, again: RunFolder) -> str | int:
    """The answer; after a difference, printed here, the exit code."""
    rows = {row["step"]: row for row in repeated["evaluations"]}
    compared = [row for row in receipt["evaluations"] if row["step"] in rows]
    other_row = next(
        ((row["step"], name, row[name], rows[row["step"]][name])
         for row in compared for name in _COMPARED if row[name] != rows[row["step"]][name]),
        None,
    )  # fmt: skip
    kept, made = _checkpoints(folder), _checkpoints(again)
    steps = sorted(kept.keys() & made.keys())
    other_tensor = next(
        ((step, found) for step in steps if (found := _first_difference(kept[step], made[step]))), None
    )  # fmt: skip
    if other_row is None and other_tensor is None:
        counts = f"{_count(compared, 'evaluation')} and {_count(steps, 'checkpoint')}"
        digest = f", weights={compared[-1]['weights']}" if compared else ""
        return f"identical: {counts} up to step {max([*(row['step'] for row in compared), *steps])}{digest}"
    parts = []
    if other_row:
        step, name, before, now = other_row
        parts.append(f"at step {step} {name} is {before} in the receipt and {now} now")
    if other_tensor:
        step, found = other_tensor
        parts.append(f"at step {step} the first tensor to differ is {found}")
    elif steps:
        parts.append(
            f"no tensor differs in the checkpoints of steps {', '.join(map(str, steps))}: the receipt is not theirs"
        )
    else:
        parts.append("no checkpoint that both have is left to name a tensor")
    print(f"differs: {'; '.join(parts)}; {_reasons(receipt, repeated)}", flush=True)
    return errors.CRASH


def _checkpoints(folder: RunFolder) -> dict[int, Path]:
    from pipeline.record.checkpoint import listed, step_of

    return {step_of(path): path for path in reversed(listed(folder.checkpoints))}  # of two of a step the newer


def _first_difference(before: Path, now: Path) -> str | None:
    """The first tensor whose bits differ between two checkpoints, how many do, and by how much; None if none does."""
    import torch

    from pipeline.record.checkpoint import decode, read_verified

    old, new = (
        dict(_tensors({name: decode(read_verified(path), path)[name] for name in ("model", "average", "optimizer")}))
        for path in (before, now)
    )
    other = [name for name in old | new if not _same(old.get(name), new.get(name))]
    if not other:
        return None
    first = other[0]
    apart = ""
    if first in old and first in new and old[first].shape == new[first].shape:
        gap = float((old[first].to(torch.float64) - new[first].to(torch.float64)).abs().max())
        apart = f", this one by up to {gap:.3g}"
    return f"{first} ({len(other)} of {len(old | new)} differ{apart})"


def _tensors(tree: Any, place: str = "") -> Iterator[tuple[str, "Tensor"]]:
    """Every tensor of a nested state with its dotted name, in the model's own order."""
    from torch import Tensor

    if isinstance(tree, Tensor):
        yield place, tree
    elif isinstance(tree, dict):
        for key, inner in tree.items():
            yield from _tensors(inner, f"{place}.{key}" if place else str(key))


def _same(one: "Tensor | None", other: "Tensor | None") -> bool:
    import torch

    if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def _reasons(receipt: dict[str, Any], repeated: dict[str, Any]) -> str:
    """What is known to be other than it was."""
    (here,) = repeated["starts"]
    found = {
        f"{name} was {start[name]} and is {here.get(name)}"
        for start in receipt["starts"]
        for name in start
        if name not in _NOT_A_REASON and start[name] != here.get(name)
    }
    if not found:
        return "nothing of software, threads or device is known to be other than it was"
    return f"the probable reason: {', '.join(sorted(found))}"


def _count(things: list[Any], noun: str) -> str:
    return f"{len(things)} {noun}{'s' * (len(things) != 1)}"
