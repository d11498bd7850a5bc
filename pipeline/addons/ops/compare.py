"""The comparison of two runs by their receipts, for `pipeline verify`.

Promise: each field of a receipt is an input of the repetition, or is compared here, or describes a
machine or a history from which the weights do not follow. Inputs are the configuration, the digest
of the data and the number of processes. The rest (versions, commit, model of the device, times of
restarts) may differ where the bits are the same, and is named if they differ.

The samples need no digest in the receipt: seed, plan and data determine them, and other samples or
pixels change the weights at the next evaluation.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.addons.ops.run import Run
from pipeline.errors import count_of, one_line
from pipeline.record.checkpoint_files import list_checkpoints, read_verified

_DESCRIBES_MACHINE = {
    "local_world", "workers_per_node", "workers", "is_portable", "portable_reason", "compile_reason",
    "not_resident", "notes", "last_step",
}  # fmt: skip
"""Fields of a plan that depend on the machine, texts, and last_step, which is compared apart."""
_FROM_START = ("world", "threads", "epochs", "device_type")
# what explains other weights: first what certainly changes them
CAUSES = (
    "torch", "torchvision", "glibc", "numpy", "pillow", "simplejpeg", "timm", "model_sha256", "cuda",
    "cudnn", "nccl", "driver", "python", "world", "portable", "threads", "device_type", "device",
)  # fmt: skip


def compare(old: Run, new: Run, start: int, last: int) -> str:
    """Compare the steps after `start` up to `last`; return "identical: …" or "differs: …"."""
    evaluated = [step for step in old.rows if start < step <= last and step in new.rows]
    files, new_files = old.checkpoints(), new.checkpoints()
    saved = sorted(step for step in files.keys() & new_files.keys() if start < step <= last)
    tensor = _first_tensor((step, _digests(files[step]), _digests(new_files[step])) for step in saved)
    found = [next(find(old, new, start, last), "") for find in (_row_differences, _plan_differences)]
    if any(found) or tensor:
        found.append(tensor or _first_tensor(_checksums(old, new, evaluated)))
        names = ["commit", "code", "version", "image", *(name for name in CAUSES if name != "world")]
        causes = ", ".join(changed_facts(new, old, names))
        unknown = "no change of software, threads or device is known"
        found.append(f"probable cause: {causes}" if causes else unknown)
        return f"differs: {'; '.join(filter(None, found))}"
    left_out = [str(step) for step in old.rows if start < step <= last and step not in new.rows]
    but = f" but for step {', '.join(left_out)}, which a restart may have added" if left_out else ""
    where = f"from step {start} to step {last}" if start else f"up to step {last}"
    digest = f", weights={old.rows[evaluated[-1]]['weights']}" if evaluated else ""
    counts = f"{count_of(len(evaluated), 'evaluation')} and {count_of(len(saved), 'checkpoint')}"
    result = f"{counts} {where}{digest}"
    if start:
        result += f"; the steps up to {start} are trusted"
        result += "" if start in old.rows else f"; the receipt has no weights for step {start}"
    return f"identical{but}: {result}"


def changed_facts(here: Run, there: Run, names: list[str]) -> Iterator[str]:
    """Yield those of the named facts of the starts that two runs differ in, as phrases."""
    for name in names:
        if here.facts(name) != there.facts(name):
            yield f"{name} is {here.facts(name)} here and {there.facts(name)} there"


def _row_differences(old: Run, new: Run, start: int, last: int) -> Iterator[str]:
    """Yield a description of each difference between the evaluations, by ascending step."""
    restarts = {found["step"] for found in old.receipt["starts"]}
    before = {step: row for step, row in old.rows.items() if start < step <= last}
    for step in sorted(before.keys() | {step for step in new.rows if step > start}):
        row, now = before.get(step), new.rows.get(step)
        if row and now:
            # a mean since the last report, which depends on where a run was interrupted or ended
            is_other_mean = len(restarts) > 1 or (step == last != old.receipt["plan"].get("last_step"))
            is_free = {"train_loss"} if is_other_mean or "train_loss" not in now else set()
            is_free |= {"tensors"} - row.keys()  # a receipt of version 0.2
            names = [name for name in row | now if name not in is_free]
            yield from _differences(row, now, names, f"at step {step} ")
        elif row and step not in restarts:  # a run that ends with train.max_steps evaluates there
            yield f"at step {step} the receipt has an evaluation, and the repetition makes none"
        elif now and step != last:  # it always evaluates at its end
            yield f"at step {step} the repetition makes an evaluation, and the receipt has none"


def _plan_differences(old: Run, new: Run, start: int, last_step: int) -> Iterator[str]:
    """Yield each difference between the plans, and between what the starts say of inputs."""
    before, now = old.receipt["plan"], new.receipt["plan"]
    end = min(old.config().train.max_steps or now["total_steps"], now["total_steps"])
    names = [name for name in now if name not in _DESCRIBES_MACHINE]
    # a receipt of before has no field for what it did not have
    names = [name for name in names if name in before or now[name]]
    yield from _differences(before, now | {"last_step": end}, [*names, "last_step"], "the plan's ")
    starts = old.starts_after(start)
    for part in starts:
        # in exact mode the number of processes may change
        names = [name for name in _FROM_START if name != "world" or part is starts[-1]]
        where = f"in the start at step {part['step']} "
        yield from _differences(part, new.receipt["starts"][-1], names, where)
    if last_step == end and end in old.rows:
        yield from _differences(old.receipt, new.receipt, ["done"], "the result line ")


def _differences(before: dict[str, Any], now: dict[str, Any], names: list[str], where: str) -> Iterator[str]:
    for name in names:
        if name not in before or name not in now or before[name] != now[name]:
            then, value = (one_line(fields.get(name, "missing"), 100) for fields in (before, now))
            yield f"{where}{one_line(name, 100)} is {then} in the receipt and {value} now"


def _first_tensor(digests: Iterator[tuple[int, dict[str, str], dict[str, str]]]) -> str:
    """Return a phrase about the first tensor that differs, or "".

    digests: a step, and the digest of each tensor by name, of the run and of the repetition.
    """
    for step, old, new in digests:
        different = [name for name in old | new if old.get(name) != new.get(name)]
        if different:
            count = f"{len(different)} of {len(old | new)} differ"
            return f"at step {step} the first tensor to differ is {different[0]} ({count})"
    return ""


def _digests(path: Path) -> dict[str, str]:
    """Return the digest of each tensor of a checkpoint, by dotted name, in the model's order."""
    from torch import Tensor

    from pipeline.addons.models.trained import weights_digest
    from pipeline.record.checkpoint_contents import decode

    found = {}

    def add(tree: Any, name: str) -> None:
        if isinstance(tree, Tensor):
            found[name] = weights_digest({"": tree})
        for key, child in tree.items() if isinstance(tree, dict) else ():
            add(child, f"{name}.{key}")

    contents = decode(read_verified(path), path)
    for part in ("model", "average", "optimizer"):
        add(contents[part], part)
    return found


def _checksums(old: Run, new: Run, steps: list[int]) -> Iterator[tuple[int, dict[str, str], dict[str, str]]]:
    """Yield the CRC-32 of each tensor by name, of evaluations that have them in both runs."""
    from pipeline.addons.models.trained import eval_weights
    from pipeline.record.checkpoint_contents import read_model

    names = list(eval_weights(read_model(list_checkpoints(new.folder.checkpoints)[0])))
    for step in steps:
        if "tensors" in old.rows[step]:
            texts = (run.rows[step]["tensors"] for run in (old, new))
            then, now = (dict(zip(sorted(names), re.findall("." * 8, text), strict=False)) for text in texts)
            yield step, {name: then.get(name, "") for name in names}, {name: now[name] for name in names}
