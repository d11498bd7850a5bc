"""A run in words, as Markdown: what it is, how it stands or ended, how to repeat it. From its folder alone."""

import json
from typing import Any

from pipeline.config.schema import Config
from pipeline.record.folder import RunFolder
from pipeline.record.journal import read
from pipeline.record.receipt import Receipt

_FACTS = ("commit", "image", "image_id", "torch", "device")


def tell(folder: RunFolder, config: Config) -> str:
    """The description that MLflow shows above a run."""
    receipt = json.loads(Receipt(folder).text())
    plan, starts, evaluations = receipt["plan"], receipt["starts"], receipt["evaluations"]
    lines = [
        f"**{config.recipe}**: {config.model.arch} on {plan['train_images']:,} images of {plan['num_classes']:,} classes"
        f" ({config.data.source}), {plan['last_step']:,} steps of {plan['global_batch']:,} images over {plan['world']}"
        f" process{'es' * (plan['world'] > 1)}, {config.train.precision}.",
        "",
        _ending(folder, len(starts)),
    ]
    finite = [row for row in evaluations if not row.get("not_finite")]
    if finite:
        best = max(finite, key=lambda row: row["top1"])
        lines += ["", f"Best: top-1 {best['top1']:.4f} at step {best['step']:,} ({best['images']} images judged)."]
    known = {name: starts[-1][name] for name in _FACTS if starts and name in starts[-1]}
    lines += ["", "| | |", "| --- | --- |", f"| data | `{receipt['data']}` |"]
    lines += [f"| {name.replace('_', ' ')} | `{fact}` |" for name, fact in known.items()]
    nproc = f" --nproc {plan['world']}" if plan["world"] > 1 else ""
    lines += [
        "", "To repeat it, with the file `config.yaml` from the artifacts:", "", "```",
        f"pipeline train config.yaml run.dir=runs/again{nproc}", "```",
    ]  # fmt: skip
    if config.is_deterministic:
        lines += ["", "It is deterministic: `pipeline verify` with its folder compares a repetition bit for bit."]
    return "\n".join(lines)


def _ending(folder: RunFolder, starts: int) -> str:
    events: list[dict[str, Any]] = [row for row, _ in read(folder.journal) if "event" in row]
    restarts = f", after {starts} starts" if starts > 1 else ""
    if events and events[-1]["event"] == "ended":
        ending = events[-1]
        return f"{ending['status']} at step {ending['step']:,}{restarts}: `{ending['line']}`"
    return f"Under way, or killed without a last word{restarts}."
