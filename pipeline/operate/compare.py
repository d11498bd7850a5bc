"""The comparison of a run with its repetition, for `pipeline verify`.

Promise: each field of a receipt is an input of the repetition, or is compared here, or describes a
machine or a history from which the weights do not follow. Inputs are the configuration, the digest
of the data and the number of processes. Compared are the plan, each field of each evaluation, and
what the starts say of threads, epochs and kind of device; `verify` compares the result line with
the last evaluation. The rest (versions, commit, model of the device, times of restarts) may differ
where the bits are the same, and is named as a cause if they differ.

The samples need no digest in the receipt: seed, plan and data determine them, and other samples or
pixels change the weights at the next evaluation. Which step was the first is in the trace: if the
run has one (`run.trace=true`), the repetition writes one, too, and they are compared row by row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.record.folder import RunFolder
from pipeline.record.journal import read

if TYPE_CHECKING:
    from torch import Tensor

_DESCRIBES_MACHINE = (
    "local_world", "workers_per_node", "workers", "is_portable", "portable_reason", "compile_reason", "precision_note",
    "notes", "last_step",
)  # fmt: skip
"""Fields of a plan that depend on the machine, texts, and last_step, which is compared apart."""
_FROM_START = ("world", "threads", "epochs", "device_type")
_NOT_A_CAUSE = ("step", "recipe", "changes", "world", "epochs", "continues")
"""Fields of a start that do not describe its software, threads or device."""
_CHECKSUM_DIGITS = 8


@dataclass(frozen=True)
class Run:
    """The receipt and the folder of a run."""

    receipt: dict[str, Any]
    folder: RunFolder

    @property
    def rows(self) -> list[dict[str, Any]]:
        return sorted(self.receipt["evaluations"], key=lambda row: int(row["step"]))

    def parts(self, start: int) -> list[dict[str, Any]]:
        """Return the starts that trained the steps after `start`; [] if the run began later."""
        starts: list[dict[str, Any]] = self.receipt["starts"]
        before = [part for part in starts if part["step"] <= start]
        return before[-1:] + starts[len(before) :] if before else []

    def checkpoints(self) -> dict[int, Path]:
        """Return the checkpoints by step: the newest if there are several of one step."""
        from pipeline.record.checkpoint_files import list_checkpoints, step_of

        return {step_of(path): path for path in reversed(list_checkpoints(self.folder.checkpoints))}


def compare(old: Run, new: Run, start: int, last: int) -> str:
    """Compare the steps after `start` up to `last`; return "identical: …" or "differs: …"."""
    made = {row["step"] for row in new.rows}
    rows = [row for row in old.rows if start < row["step"] <= last and row["step"] in made]
    old_files, new_files = old.checkpoints(), new.checkpoints()
    steps = sorted(step for step in old_files.keys() & new_files.keys() if start < step <= last)
    tensor = _first_different_tensor([(step, old_files[step], new_files[step]) for step in steps])
    differences = sorted(_row_differences(old, new, start, last), key=lambda found: found[0])
    num_batches, batch = _compare_traces(old.folder, new.folder, start, last)
    stated = [*(text for _, text in differences[:1]), *list(_plan_differences(old, new, start))[:1]]
    if not stated and not batch and not tensor:
        where = f"from step {start} to step {last}" if start else f"up to step {last}"
        digest = f", weights={rows[-1]['weights']}" if rows else ""
        parts = [f"identical: {count(rows, 'evaluation')} and {count(steps, 'checkpoint')} {where}{digest}"]
        left_out = [str(row["step"]) for row in old.rows if start < row["step"] <= last and row["step"] not in made]
        parts += [f"the trace of {num_batches} steps is identical, too"] if num_batches else []
        parts += [f"not compared: step {', '.join(left_out)}, where the run had ended once"] if left_out else []
        parts += [f"the steps up to {start} are trusted"] if start else []
        return "; ".join(parts)
    different = [step for step, _ in differences]
    if not tensor and steps and (not different or different[0] in steps):
        changed = "receipt does" if stated else "trace does"
        tensor = (
            f"the checkpoints of steps {', '.join(map(str, steps))} are identical, so the {changed} not belong to them"
        )
    parts = [*stated, batch, tensor or _tensor_by_checksum(old, new), _causes(old.receipt, new.receipt)]
    return f"differs: {'; '.join(filter(None, parts))}"


def _row_differences(old: Run, new: Run, start: int, last: int) -> Iterator[tuple[int, str]]:
    """Yield the step and a description of each difference between the evaluations."""
    new_rows = {row["step"]: row for row in new.rows if start < row["step"] <= last}
    restarts = {part["step"] for part in old.receipt["starts"]}
    losses = _train_losses(old, new)
    for row in old.rows:
        step = row["step"]
        now = new_rows.get(step)
        if now is None:
            if start < step <= last and step not in restarts:  # a run that ends with train.max_steps evaluates there
                yield step, f"at step {step} the receipt has an evaluation, and the repetition makes none"
            continue
        now = now | {"train_loss": losses[step]}
        for name, value in row.items():
            if value == now.get(name) or (name == "train_loss" and now[name] is None):
                continue
            values = f"is {value} in the receipt and {now.get(name, 'missing')} now"
            if name == "tensors":
                values = f"differs: {_different_checksums(str(value), now[name], new)}"
            yield step, f"at step {step} {name} {values}"
    for step in new_rows.keys() - {row["step"] for row in old.rows} - {last}:  # it always evaluates at its end
        yield step, f"at step {step} the repetition makes an evaluation, and the receipt has none"


def _train_losses(old: Run, new: Run) -> dict[int, float | None]:
    """Return the repetition's training loss by step of evaluation, None if it cannot be compared.

    It is the mean over the steps since the loss was logged before. These depend on `track.every`,
    on where the run was once ended, and on where the repetition starts and ends.
    """
    every, restart = new.receipt["plan"]["log_every"], old.receipt["starts"][-1]["step"]
    rows = (row for row, _ in read(new.folder.journal) if "train/loss" in row.get("metrics", {}))
    logged = {row["step"]: row["metrics"]["train/loss"] for row in rows}
    found = {}
    for row in old.rows:
        step = row["step"] - (0 if row["step"] == old.receipt["plan"].get("last_step") else row["step"] % every)
        since = (step - 1) // every * every
        found[row["step"]] = logged.get(step) if since >= restart else None
    return found


def _plan_differences(old: Run, new: Run, start: int) -> Iterator[str]:
    """Yield each difference between the plans, and between what the starts say of inputs."""
    plan, now = old.receipt["plan"], new.receipt["plan"]
    end = old.receipt["config"]["train"].get("max_steps") or now["total_steps"]
    now = {name: value for name, value in now.items() if name not in _DESCRIBES_MACHINE}
    for name, value in (now | {"last_step": min(end, now["total_steps"])}).items():
        if name in plan and plan[name] != value:
            yield f"the plan's {name} is {plan[name]} in the receipt and {value} now"
    repetition = new.receipt["starts"][-1]
    *earlier, last = old.parts(start)
    for part in (*earlier, last):
        for name in _FROM_START:
            is_free = name == "world" and part is not last  # in exact mode the number of processes may change
            if name in part and part[name] != repetition[name] and not is_free:
                where = f"of the start at step {part['step']}"
                yield f"{name} {where} is {part[name]} in the receipt and {repetition[name]} now"


def _compare_traces(old: RunFolder, new: RunFolder, start: int, last: int) -> tuple[int, str]:
    """Return the number of equal rows, and the first that differs as a phrase, or ""."""
    equal, made = 0, (row for row, _ in read(new.trace))
    for row, _ in read(old.trace):
        step = row.get("step", 0)
        if start < step <= last:
            now = next((row for row in made if row["step"] >= step), {})
            if now != row:
                kind = "other samples" if row.get("ids") != now.get("ids") else "the same samples with other pixels"
                return equal, f"the first batch to differ from trace.jsonl is that of step {step}, {kind}"
            equal += 1
    return equal, ""


def _tensor_by_checksum(old: Run, new: Run) -> str:
    """Return the first tensor that differs at an evaluation, as a phrase."""
    new_rows = {row["step"]: row for row in new.rows}
    pairs = [(row, new_rows[row["step"]]) for row in old.rows if row["step"] in new_rows]
    pairs = [(row, now) for row, now in pairs if row["weights"] != now["weights"]]
    if not pairs:
        return "the weights are the same"
    row, now = pairs[0]
    if row.get("tensors", now["tensors"]) == now["tensors"]:
        return "no step has a checkpoint in both runs, so no tensor can be named"
    found = _different_checksums(str(row["tensors"]), now["tensors"], new)
    return f"at step {row['step']} the first tensor to differ is {found}"


def _different_checksums(before: str, now: str, new: Run) -> str:
    """Return the first tensor, in the model's order, whose checksum differs, and their number."""
    from pipeline.record.checkpoint import eval_weights, read_model
    from pipeline.record.checkpoint_files import list_checkpoints

    names = list(eval_weights(read_model(list_checkpoints(new.folder.checkpoints)[0])))
    if len(before) != len(now):
        return f"unknown: there were {len(before) // _CHECKSUM_DIGITS} tensors, and there are {len(names)}"
    starts = {name: at * _CHECKSUM_DIGITS for at, name in enumerate(sorted(names))}
    parts = {name: slice(at, at + _CHECKSUM_DIGITS) for name, at in starts.items()}
    different = [name for name in names if before[parts[name]] != now[parts[name]]]
    return f"{different[0]} ({len(different)} of {len(names)} differ)"


def _first_different_tensor(files: list[tuple[int, Path, Path]]) -> str:
    """Return the first tensor that differs between checkpoints, as a phrase, or "".

    files: step, the run's checkpoint, and that of the repetition.
    """
    for step, old, new in files:
        if found := _first_difference(old, new):
            return f"at step {step} the first tensor to differ is {found}"
    return ""


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
    now = new_receipt["starts"][-1]
    changes = {
        f"{name} was {start[name]} and is {now.get(name)}"
        for start in receipt["starts"]
        for name in start
        if name not in _NOT_A_CAUSE and start[name] != now.get(name)
    }
    if not changes:
        return "no change of software, threads or device is known"
    return f"probable cause: {', '.join(sorted(changes))}"


def count(items: list[Any], noun: str) -> str:
    return f"{len(items)} {noun}" if len(items) == 1 else f"{len(items)} {noun}s"
