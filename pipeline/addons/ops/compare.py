"""The comparison of a run with its repetition, for `pipeline verify`.

Promise: each field of a receipt is an input of the repetition, or is compared here, or describes a
machine or a history from which the weights do not follow. Inputs are the configuration, the digest
of the data and the number of processes. Compared are the plan, each field of each evaluation, and
what the starts say of threads, epochs and kind of device; `verify` compares the result line with
the last evaluation. A field that the repetition has must not be missing in the receipt. The rest
(versions, commit, model of the device, times of restarts) may differ where the bits are the same,
and is named as a cause if they differ.

The samples need no digest in the receipt: seed, plan and data determine them, and other samples or
pixels change the weights at the next evaluation. Which step was the first is in the trace: if the
run has one (`run.trace=true`), the repetition writes one, too, and they are compared row by row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.addons.models.tensors import first_different_tensor
from pipeline.config.load import from_yaml
from pipeline.config.schema import Config
from pipeline.errors import one_line
from pipeline.record.folder import RunFolder
from pipeline.record.journal import read

_DESCRIBES_MACHINE = (
    "local_world", "workers_per_node", "workers", "is_portable", "portable_reason", "compile_reason", "precision_note",
    "notes", "last_step",
)  # fmt: skip
"""Fields of a plan that depend on the machine, texts, and last_step, which is compared apart."""
_FROM_START = ("world", "threads", "epochs", "device_type")
_NOT_A_CAUSE = ("step", "recipe", "changes", "world", "epochs", "continues")
"""Fields of a start that do not describe its software, threads or device."""
_CHECKSUM_DIGITS = 8
_MISSING = object()
_SHOWN_LENGTH = 100  # of a value in a receipt; a digest has 71 characters
_SHOWN_CAUSES = 12


@dataclass(frozen=True)
class Run:
    """The receipt and the folder of a run."""

    receipt: dict[str, Any]
    folder: RunFolder

    @property
    def rows(self) -> list[dict[str, Any]]:
        return sorted(self.receipt["evaluations"], key=lambda row: int(row["step"]))

    def config(self, changes: list[str] | None = None) -> Config:
        """Return the configuration in the receipt, with `changes`. Raises RequestError."""
        text = yaml.safe_dump(self.receipt["config"], allow_unicode=True)
        return from_yaml(text, f"the receipt of {self.folder.path}", changes)

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
    tensor = first_different_tensor([(step, old_files[step], new_files[step]) for step in steps])
    differences = sorted(_row_differences(old, new, start, last), key=lambda found: found[0])
    num_batches, batch = _compare_traces(old.folder, new.folder, start, last)
    stated = [*(text for _, text in differences[:1]), *list(_plan_differences(old, new, start, last))[:1]]
    if not stated and not batch and not tensor:
        where = f"from step {start} to step {last}" if start else f"up to step {last}"
        digest = f", weights={rows[-1]['weights']}" if rows else ""
        left_out = [str(row["step"]) for row in old.rows if start < row["step"] <= last and row["step"] not in made]
        but = f" but for step {', '.join(left_out)}, which a restart may have added" if left_out else ""
        parts = [f"identical{but}: {count(rows, 'evaluation')} and {count(steps, 'checkpoint')} {where}{digest}"]
        parts += [f"the trace of {num_batches} steps is identical, too"] if num_batches else []
        parts += [f"the steps up to {start} are trusted"] if start else []
        if start and not any(row["step"] == start for row in old.rows):
            parts.append(f"the receipt has no weights for step {start}")
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
    is_from_0_2 = "is_portable" not in old.receipt["plan"] and not any("tensors" in row for row in old.rows)
    for row in old.rows:
        step = row["step"]
        now = new_rows.get(step)
        if now is None:
            if start < step <= last and step not in restarts:  # a run that ends with train.max_steps evaluates there
                yield step, f"at step {step} the receipt has an evaluation, and the repetition makes none"
            continue
        now = now | {"train_loss": losses[step]}
        for name in row | now:
            value = row.get(name, _MISSING)
            if value == now.get(name, _MISSING) or (name == "train_loss" and now[name] is None):
                continue
            if name == "tensors" and is_from_0_2:
                continue
            values = _values(value, now.get(name, _MISSING))
            if name == "tensors" and name in row:
                values = f"differs: {_different_checksums(value, now[name], new)}"
            yield step, f"at step {step} {one_line(name, _SHOWN_LENGTH)} {values}"
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


def _plan_differences(old: Run, new: Run, start: int, last_step: int) -> Iterator[str]:
    """Yield each difference between the plans, and between what the starts say of inputs."""
    plan, now = old.receipt["plan"], new.receipt["plan"]
    end = min(old.config().train.max_steps or now["total_steps"], now["total_steps"])
    now = {name: value for name, value in now.items() if name not in _DESCRIBES_MACHINE} | {"last_step": end}
    for name, value in now.items():
        if plan.get(name, _MISSING) != value:
            yield f"the plan's {name} {_values(plan.get(name, _MISSING), value)}"
    repetition = new.receipt["starts"][-1]
    *earlier, last = old.parts(start)
    for part in (*earlier, last):
        for name in _FROM_START:
            is_free = name == "world" and part is not last  # in exact mode the number of processes may change
            if part.get(name, _MISSING) != repetition[name] and not is_free:
                values = _values(part.get(name, _MISSING), repetition[name])
                yield f"{name} of the start at step {part['step']} {values}"
    if old.receipt["done"] is None and old.rows and old.rows[-1]["step"] == end == last_step:
        yield f"the receipt has no result line, and its run ended at step {end}"


def _compare_traces(old: RunFolder, new: RunFolder, start: int, last: int) -> tuple[int, str]:
    """Return the number of equal rows, and the first that differs as a phrase, or ""."""
    if not old.trace.exists():
        return 0, ""
    rows, new_rows = (_trace_rows(folder.trace, start, last) for folder in (old, new))
    for step in range(start + 1, last + 1):
        row, now = next(rows, {}), next(new_rows, {})
        if row.get("step") != step:
            return step - start - 1, f"trace.jsonl has no row for step {step}; without that file it is not compared"
        if now != row:
            kind = "other samples" if row.get("ids") != now.get("ids") else "the same samples with other pixels"
            return step - start - 1, f"the first batch to differ from trace.jsonl is that of step {step}, {kind}"
    return last - start, "trace.jsonl has more than one row for a step" if next(rows, {}) else ""


def _trace_rows(path: Path, start: int, last: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of the steps after `start` up to `last`, and those without a valid step."""
    for row, _ in read(path):
        if not isinstance(row.get("step"), int) or start < row["step"] <= last:
            yield row


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
    from pipeline.model.trained import eval_weights
    from pipeline.record.checkpoint import read_model
    from pipeline.record.checkpoint_files import list_checkpoints

    names = list(eval_weights(read_model(list_checkpoints(new.folder.checkpoints)[0])))
    if len(before) != len(now):
        return f"unknown: there were {len(before) // _CHECKSUM_DIGITS} tensors, and there are {len(names)}"
    starts = {name: at * _CHECKSUM_DIGITS for at, name in enumerate(sorted(names))}
    parts = {name: slice(at, at + _CHECKSUM_DIGITS) for name, at in starts.items()}
    different = [name for name in names if before[parts[name]] != now[parts[name]]]
    return f"{different[0]} ({len(different)} of {len(names)} differ)"


def _causes(receipt: dict[str, Any], new_receipt: dict[str, Any]) -> str:
    """Return the known changes of software, threads and device, as a phrase for the user."""
    now = new_receipt["starts"][-1]
    changes = {
        one_line(f"{name} was {one_line(start[name], _SHOWN_LENGTH)} and is {now.get(name)}")
        for start in receipt["starts"]
        for name in start
        if name not in _NOT_A_CAUSE and start[name] != now.get(name)
    }
    if not changes:
        return "no change of software, threads or device is known"
    return f"probable cause: {', '.join(sorted(changes)[:_SHOWN_CAUSES])}"


def _values(value: object, now: object) -> str:
    if value is _MISSING:
        return "is missing in the receipt"
    return f"is {one_line(value, _SHOWN_LENGTH)} in the receipt and {'missing' if now is _MISSING else now} now"


def count(items: list[Any], noun: str) -> str:
    return f"{len(items)} {noun}" if len(items) == 1 else f"{len(items)} {noun}s"
