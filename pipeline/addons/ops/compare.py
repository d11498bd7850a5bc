"""The comparison of two runs by their receipts, for `pipeline verify`.

Promise: each field of a receipt is an input of the repetition, or is compared here, or describes a
machine or a history from which the weights do not follow. Inputs are the configuration, the digest
of the data and the number of processes. Compared are the plan, each field of each evaluation, what
the starts say of threads, epochs and kind of device, and the result line of a run that is repeated
to its end. The rest (versions, commit, model of the device, times of restarts) may differ where the
bits are the same, and is named if they differ.

The samples need no digest in the receipt: seed, plan and data determine them, and other samples or
pixels change the weights at the next evaluation. Which step was the first is in the trace: if the
run has one (`run.trace=true`), the repetition writes one, too, and they are compared row by row.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from pipeline.addons.models.inputs import check_run_folder
from pipeline.addons.ops.published import read_receipt
from pipeline.config.load import from_yaml
from pipeline.config.schema import Config
from pipeline.errors import count_of, one_line
from pipeline.record.checkpoint_files import list_checkpoints, read_verified, step_of
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
_ABSENT = "missing"
_SHOWN_LENGTH = 100  # of a value in a receipt; a digest has 71 characters
_SHOWN_CAUSES = 12


@dataclass(frozen=True)
class Run:
    """The receipt and the folder of a run."""

    receipt: dict[str, Any]
    folder: RunFolder

    @classmethod
    def read(cls, path: Path) -> "Run":
        """Return the run in a folder. Raises RequestError if there is no readable receipt."""
        check_run_folder(path)
        return cls(read_receipt(RunFolder(path)), RunFolder(path))

    @property
    def rows(self) -> dict[int, dict[str, Any]]:
        """Evaluations by step, in ascending order."""
        return {
            row["step"]: row for row in sorted(self.receipt["evaluations"], key=lambda row: int(row["step"]))
        }

    @property
    def starts(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.receipt["starts"]
        return found

    def config(self, changes: list[str] | None = None) -> Config:
        """Return the configuration in the receipt, with `changes`. Raises RequestError."""
        text = yaml.safe_dump(self.receipt["config"], allow_unicode=True)
        return from_yaml(text, f"the receipt of {self.folder.path}", changes)

    def starts_after(self, step: int) -> list[dict[str, Any]]:
        """Return the starts that trained the steps after `step`; [] if the run began later."""
        before = [start for start in self.starts if start["step"] <= step]
        return before[-1:] + self.starts[len(before) :] if before else []

    def checkpoints(self) -> dict[int, Path]:
        """Return the checkpoints by step: the newest if there are several of one step."""
        return {step_of(path): path for path in reversed(list_checkpoints(self.folder.checkpoints))}

    def facts(self, name: str) -> list[str]:
        """Return what the starts say of a version, a device and so on."""
        return sorted({one_line(start.get(name, "unknown"), _SHOWN_LENGTH) for start in self.starts})


def compare(old: Run, new: Run, start: int, last: int) -> str:
    """Compare the steps after `start` up to `last`; return "identical: …" or "differs: …"."""
    rows = [row for step, row in old.rows.items() if start < step <= last and step in new.rows]
    files, new_files = old.checkpoints(), new.checkpoints()
    steps = sorted(step for step in files.keys() & new_files.keys() if start < step <= last)
    stated = [
        *islice(_row_differences(old, new, start, last), 1),
        *islice(_plan_differences(old, new, start, last), 1),
    ]
    batch = _trace_difference(old.folder, new.folder, start, last)
    pairs = ((step, _tensor_digests(files[step]), _tensor_digests(new_files[step])) for step in steps)
    tensor = _first_tensor(pairs)
    if stated or batch or tensor:
        tensor = tensor or _first_tensor(_checksums(rows, new))
        if not tensor and steps:
            tensor = f"the checkpoints of steps {', '.join(map(str, steps))} are identical"
        facts = {name for found in (*old.starts, *new.starts) for name in found} - {*_NOT_A_CAUSE}
        causes = list(islice(changed_facts(new, old, sorted(facts)), _SHOWN_CAUSES))
        cause = (
            f"probable cause: {', '.join(causes)}"
            if causes
            else "no change of software, threads or device is known"
        )
        return f"differs: {'; '.join(filter(None, [*stated, batch, tensor, cause]))}"
    left_out = [str(step) for step in old.rows if start < step <= last and step not in new.rows]
    but = f" but for step {', '.join(left_out)}, which a restart may have added" if left_out else ""
    where = f"from step {start} to step {last}" if start else f"up to step {last}"
    digest = f", weights={rows[-1]['weights']}" if rows else ""
    parts = [f"{count_of(len(rows), 'evaluation')} and {count_of(len(steps), 'checkpoint')} {where}{digest}"]
    if old.folder.trace.exists():
        parts.append(f"the trace of {last - start} steps is identical, too")
    if start:
        parts.append(f"the steps up to {start} are trusted")
        parts += [] if start in old.rows else [f"the receipt has no weights for step {start}"]
    return f"identical{but}: {'; '.join(parts)}"


def changed_facts(here: Run, there: Run, names: Collection[str]) -> Iterator[str]:
    """Yield those of the named facts of the starts in which two runs differ, as phrases."""
    for name in names:
        now, then = (" or ".join(run.facts(name)) for run in (here, there))
        if now != then:
            yield f"{name} is {now} here and {then} there"


def _row_differences(old: Run, new: Run, start: int, last: int) -> Iterator[str]:
    """Yield a description of each difference between the evaluations, by ascending step."""
    restarts = {found["step"] for found in old.starts}
    before = {step: row for step, row in old.rows.items() if start < step <= last}
    for step in sorted(before.keys() | {step for step in new.rows if step > start}):
        row, now = before.get(step, {}), new.rows.get(step, {})
        if not now and step not in restarts:  # a run that ends with train.max_steps evaluates there
            yield f"at step {step} the receipt has an evaluation, and the repetition makes none"
        elif not row and step != last:  # it always evaluates at its end
            yield f"at step {step} the repetition makes an evaluation, and the receipt has none"
        for name in row | now if row and now else ():
            if name == "tensors" and name not in row:  # a receipt of version 0.2
                continue
            # a mean since the last report, which depends on where a run was interrupted or ended
            is_other_mean = len(old.starts) > 1 or (step == last != old.receipt["plan"].get("last_step"))
            if name == "train_loss" and (is_other_mean or name not in now):
                continue
            if difference := _difference(row, now, name):
                yield f"at step {step} {one_line(name, _SHOWN_LENGTH)} {difference}"


def _plan_differences(old: Run, new: Run, start: int, last_step: int) -> Iterator[str]:
    """Yield each difference between the plans, and between what the starts say of inputs."""
    plan, now = old.receipt["plan"], new.receipt["plan"]
    end = min(old.config().train.max_steps or now["total_steps"], now["total_steps"])
    now = {name: value for name, value in now.items() if name not in _DESCRIBES_MACHINE} | {"last_step": end}
    for name in now:
        if difference := _difference(plan, now, name):
            yield f"the plan's {name} {difference}"
    *earlier, last = old.starts_after(start)
    for part in (*earlier, last):
        for name in _FROM_START:
            is_free = name == "world" and part is not last  # in exact mode the number of processes may change
            if (difference := _difference(part, new.starts[-1], name)) and not is_free:
                yield f"{name} of the start at step {part['step']} {difference}"
    if last_step == end and end in old.rows and (difference := _difference(old.receipt, new.receipt, "done")):
        yield f"the result line {difference}"


def _difference(before: dict[str, Any], now: dict[str, Any], name: str) -> str:
    """Return how a field differs, as a phrase, or ""."""
    if name not in before:
        return f"is {_ABSENT} in the receipt"
    if name in now and before[name] == now[name]:
        return ""
    then, value = (one_line(fields.get(name, _ABSENT), _SHOWN_LENGTH) for fields in (before, now))
    return f"is {then} in the receipt and {value} now"


def _trace_difference(old: RunFolder, new: RunFolder, start: int, last: int) -> str:
    """Return the first row of the traces that differs, as a phrase, or ""."""
    if not old.trace.exists():
        return ""
    traces = (read(folder.trace) for folder in (old, new))
    rows, new_rows = (
        (row for row, _ in trace if row.get("step") not in range(start + 1)) for trace in traces
    )
    for step in range(start + 1, last + 1):
        row, now = next(rows, {}), next(new_rows, {})
        if now != row:
            kind = (
                "other samples" if row.get("ids") != now.get("ids") else "the same samples with other pixels"
            )
            return f"the first batch to differ from trace.jsonl is that of step {step}, {kind}"
    return ""


def _first_tensor(pairs: Iterator[tuple[int, dict[str, str], dict[str, str]]]) -> str:
    """Return the first tensor that differs, as a phrase, or "".

    pairs: for each step, a digest of each tensor of the run and of the repetition, by name.
    """
    for step, old, new in pairs:
        different = [name for name in old | new if old.get(name) != new.get(name)]
        if different:
            count = f"{len(different)} of {len(old | new)} differ"
            return f"at step {step} the first tensor to differ is {different[0]} ({count})"
    return ""


def _tensor_digests(path: Path) -> dict[str, str]:
    """Return the digest of each tensor of a checkpoint, by dotted name, in the model's order."""
    from torch import Tensor

    from pipeline.model.weights import weights_digest
    from pipeline.record.checkpoint import decode

    def digests(tree: Any, name: str) -> Iterator[tuple[str, str]]:
        if isinstance(tree, Tensor):
            yield name, weights_digest({"": tree})
        for key, child in tree.items() if isinstance(tree, dict) else ():
            yield from digests(child, f"{name}.{key}")

    contents = decode(read_verified(path), path)
    return {
        name: digest
        for part in ("model", "average", "optimizer")
        for name, digest in digests(contents[part], part)
    }


def _checksums(rows: list[dict[str, Any]], new: Run) -> Iterator[tuple[int, dict[str, str], dict[str, str]]]:
    """Yield the CRC-32 of each tensor by name, of evaluations that have them in both runs."""
    from pipeline.model.trained import eval_weights
    from pipeline.record.checkpoint import read_model

    names = list(eval_weights(read_model(list_checkpoints(new.folder.checkpoints)[0])))
    for row in rows:
        if "tensors" in row:
            texts = (row["tensors"], new.rows[row["step"]]["tensors"])
            old, now = (dict(zip(sorted(names), re.findall("." * 8, text), strict=False)) for text in texts)
            yield (
                row["step"],
                {name: old.get(name, "") for name in names},
                {name: now[name] for name in names},
            )
