"""`pipeline verify`: repeat a run from its receipt and compare the results bit by bit.

Promise: "identical" means that the repetition, from the initial weights on, had the same weights at
every step for which both runs have a digest or a checkpoint. It uses the receipt's configuration,
number of processes and threads, and kind of device. It is an ordinary `pipeline train` in a
temporary folder; nothing is written to RUN_DIR. A run that MLflow has gets the result as a tag. It
always starts from the beginning: from a checkpoint, the steps before it would be trusted and not
verified. With --steps it ends at the last step up to there that can be compared.

A run that certainly cannot repeat is refused (exit 2): not deterministic, parts trained by
different numbers of processes, changed data, no GPU here. Differences that may or may not change
bits (versions, the device's model) do not stop the repetition, and are named if the results differ.
Different bits are exit 1, as with `cmp`. A repetition that fails ends with its own exit code, or
with 75.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pipeline import errors, machine, supervision
from pipeline.config.load import from_yaml
from pipeline.config.schema import Config
from pipeline.config.trust import check_is_trusted
from pipeline.data import sources
from pipeline.errors import RequestError, TemporaryError
from pipeline.files import parse_json
from pipeline.operate.inputs import check_run_folder
from pipeline.record.folder import RunFolder
from pipeline.record.receipt import FORMAT

if TYPE_CHECKING:
    from torch import Tensor

_COMPARED = ("weights", "top1", "top5", "loss", "images")
_NOT_A_CAUSE = ("step", "recipe", "changes", "world", "epochs")
"""Fields of a start that do not describe its software, threads or device."""


def verify(run_dir: Path, steps: int | None) -> int:
    """Run `pipeline verify`; print "identical: …" and return 0, or "differs: …" and 1."""
    check_run_folder(run_dir)
    folder = RunFolder(run_dir)
    receipt = _read_receipt(folder)
    if folder.is_held():
        raise TemporaryError(f"the run in {run_dir} is still training: wait for its end, or stop it")
    with tempfile.TemporaryDirectory(prefix="pipeline-verify-", ignore_cleanup_errors=True) as scratch:
        repeated = RunFolder(Path(scratch) / "run")
        config = _repetition_config(receipt, run_dir, repeated)
        _refuse_what_cannot_repeat(receipt, config, run_dir)
        last = _last_comparable_step(receipt, folder, steps)
        config = config.replacing("train", max_steps=last)
        print(f"repeating {run_dir} up to step {last:,} in {repeated.path}", file=sys.stderr, flush=True)
        _repeat(config, receipt["starts"][-1]["world"], Path(scratch) / "recipe.yaml")
        result = _compare(receipt, _read_receipt(repeated), folder, repeated)
    print(result, flush=True)
    if folder.delivered.exists():
        from pipeline.record.mlflow.parts import note_verification

        print(note_verification(folder, result), file=sys.stderr, flush=True)
    return errors.OK if result.startswith("identical") else errors.CRASH


def _read_receipt(folder: RunFolder) -> dict[str, Any]:
    try:
        receipt = parse_json(folder.receipt.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        remedy = "give a run's folder; the run's own 'pipeline train' command writes its receipt"
        raise RequestError(f"{folder.path} has no readable receipt ({reason}): {remedy}") from None
    if not isinstance(receipt, dict) or receipt.get("format") != FORMAT or not _is_complete(receipt):
        problem = f"is not a receipt of format {FORMAT}, the only one that this version reads"
        raise RequestError(f"{folder.receipt} {problem}")
    return receipt


def _is_complete(receipt: dict[str, Any]) -> bool:
    """Return True if the receipt holds what a repetition needs."""
    try:
        return (
            {"data", "evaluations"} <= receipt.keys()
            and "world" in receipt["starts"][-1]
            and "threads" in receipt["plan"]
            and "arch" in receipt["config"]["model"]
        )
    except (KeyError, IndexError, TypeError):
        return False


def _repetition_config(receipt: dict[str, Any], run_dir: Path, repeated: RunFolder) -> Config:
    """Return the run's configuration, in the folder of the repetition and without a tracker."""
    device, threads = receipt["starts"][-1].get("device_type", "auto"), receipt["plan"]["threads"]
    changes = [
        f"run.dir={repeated.path}", "run.resume=auto", f"run.device={device}", f"run.threads={threads}",
        "track.uri=none", "track.report=false", "track.required=false",
    ]  # fmt: skip
    text = yaml.safe_dump(receipt["config"], allow_unicode=True)
    config = from_yaml(text, f"the receipt of {run_dir}", changes)
    check_is_trusted(config.model.arch)  # to repeat the run, `pipeline train` gets this configuration as a recipe
    return config


def _refuse_what_cannot_repeat(receipt: dict[str, Any], config: Config, run_dir: Path) -> None:
    if not config.is_deterministic:
        problem = f"the run in {run_dir} is not deterministic (run.deterministic=false and run.exact=false)"
        remedy = "train with run.deterministic=true to verify"
        raise RequestError(f"{problem}, so its weights differ each time: {remedy}")
    first, *later = receipt["starts"]
    if first["step"] > 0:
        place = f"at step {first['step']}, from another run's checkpoint"
        raise RequestError(f"the run in {run_dir} started {place}: verify that run")
    for name in ("epochs",) if config.run.exact else ("world", "epochs"):
        for start in later:
            if start.get(name) != first.get(name):
                hint = "; with run.exact=true the number of processes may change" if name == "world" else ""
                change = f"{name} changed from {first.get(name)} to {start.get(name)} at step {start['step']}"
                raise RequestError(f"the run in {run_dir} cannot be repeated in one piece: {change}{hint}")
    if config.run.device == "cuda" and not machine.has_gpu():
        raise machine.no_gpu_error()
    source = sources.open_source(config)
    if source.digest != receipt["data"]:
        from pipeline.train.resume import describe_data_change

        changed = describe_data_change(config, source, receipt["data"], run_dir / "index")
        raise RequestError(f"the data differs from that of the run in {run_dir}: {changed}; restore it")


def _last_comparable_step(receipt: dict[str, Any], folder: RunFolder, steps: int | None) -> int:
    """Return the last step, up to `steps`, that has an evaluation or a checkpoint."""
    known = {row["step"] for row in receipt["evaluations"]} | _checkpoints(folder).keys()
    run = folder.path
    if not known:
        raise RequestError(f"the run in {run} has neither an evaluation nor a checkpoint: there is nothing to compare")
    comparable = [step for step in known if steps is None or step <= steps]
    if not comparable:
        first = f"the first evaluation or checkpoint in {run} is of step {min(known)}"
        raise RequestError(f"--steps {steps} is too small: {first}; give that or more")
    return max(comparable)


def _repeat(config: Config, processes: int, recipe: Path) -> None:
    """Train the repetition with `pipeline train`. Raises RunError if it fails."""
    recipe.write_text(config.to_yaml(), encoding="utf-8")
    command = [sys.executable, "-m", "pipeline", "train", str(recipe)]
    code = subprocess.run(
        [*command, "--nproc", str(processes)] if processes > 1 else command,
        stdout=subprocess.DEVNULL,  # standard output of verify is its own result line only
        # safe: torch is not imported yet, so this process has no other threads
        preexec_fn=partial(supervision.die_with_parent, os.getpid()),
        check=False,
    ).returncode
    if code:
        kind = errors.from_exit_code(code) if code in errors.PERMANENT else TemporaryError
        raise kind(f"the repetition failed (exit {code}) and nothing was compared: its own error is printed above")


def _compare(receipt: dict[str, Any], new_receipt: dict[str, Any], folder: RunFolder, repeated: RunFolder) -> str:
    """Compare both runs; return "identical: …" or "differs: …"."""
    new_rows = {row["step"]: row for row in new_receipt["evaluations"]}
    compared = [row for row in receipt["evaluations"] if row["step"] in new_rows]
    row_differences = [
        f"at step {row['step']} {name} is {row[name]} in the receipt and {new_rows[row['step']][name]} now"
        for row in compared
        for name in _COMPARED
        if row[name] != new_rows[row["step"]][name]
    ]
    old, new = _checkpoints(folder), _checkpoints(repeated)
    steps = sorted(old.keys() & new.keys())
    differences = ((step, _first_difference(old[step], new[step])) for step in steps)
    tensor_difference = next(
        (f"at step {step} the first tensor to differ is {found}" for step, found in differences if found), None
    )
    if not row_differences and tensor_difference is None:
        counts = f"{_count(compared, 'evaluation')} and {_count(steps, 'checkpoint')}"
        digest = f", weights={compared[-1]['weights']}" if compared else ""
        return f"identical: {counts} up to step {max([*(row['step'] for row in compared), *steps])}{digest}"
    same = f"the checkpoints of steps {', '.join(map(str, steps))} are identical"
    if tensor_difference is None and steps:
        tensor_difference = f"{same}, so the receipt does not belong to them"
    elif tensor_difference is None:
        tensor_difference = "no step has a checkpoint in both runs, so no tensor can be named"
    parts = [*row_differences[:1], tensor_difference, _causes(receipt, new_receipt)]
    return f"differs: {'; '.join(parts)}"


def _checkpoints(folder: RunFolder) -> dict[int, Path]:
    """Return the checkpoints by step: the newest if there are several of one step."""
    from pipeline.record.checkpoint_files import list_checkpoints, step_of

    return {step_of(path): path for path in reversed(list_checkpoints(folder.checkpoints))}


def _first_difference(old_path: Path, new_path: Path) -> str | None:
    """Return the first tensor that differs between two checkpoints, with details, or None."""
    import torch

    old, new = _load_tensors(old_path), _load_tensors(new_path)
    different = [name for name in old | new if not _same_bits(old.get(name), new.get(name))]
    if not different:
        return None
    first = different[0]
    distance = ""
    if first in old and first in new and old[first].shape == new[first].shape:
        largest = float((old[first].to(torch.float64) - new[first].to(torch.float64)).abs().max())
        distance = f", this one by up to {largest:.3g}"
    return f"{first} ({len(different)} of {len(old | new)} differ{distance})"


def _load_tensors(path: Path) -> dict[str, "Tensor"]:
    from pipeline.record.checkpoint import decode
    from pipeline.record.checkpoint_files import read_verified

    contents = decode(read_verified(path), path)
    return dict(_tensors({part: contents[part] for part in ("model", "average", "optimizer")}))


def _tensors(tree: Any, name: str = "") -> Iterator[tuple[str, "Tensor"]]:
    """Yield every tensor of a nested state with its dotted name, in the model's order."""
    from torch import Tensor

    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, dict):
        for key, child in tree.items():
            yield from _tensors(child, f"{name}.{key}" if name else str(key))


def _same_bits(a: "Tensor | None", b: "Tensor | None") -> bool:
    import torch

    if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)))


def _causes(receipt: dict[str, Any], new_receipt: dict[str, Any]) -> str:
    """Return the known changes of software, threads and device, as a phrase for the user."""
    (now,) = new_receipt["starts"]
    changes = {
        f"{name} was {start[name]} and is {now.get(name)}"
        for start in receipt["starts"]
        for name in start
        if name not in _NOT_A_CAUSE and start[name] != now.get(name)
    }
    if not changes:
        return "no change of software, threads or device is known"
    return f"probable cause: {', '.join(sorted(changes))}"


def _count(items: list[Any], noun: str) -> str:
    return f"{len(items)} {noun}" if len(items) == 1 else f"{len(items)} {noun}s"
