"""The description of a run in Markdown: what it is, how it ended, how to repeat it."""

import json

from pipeline.config.schema import Config
from pipeline.record.folder import RunFolder
from pipeline.record.journal import last_event
from pipeline.record.receipt import Receipt

_FACTS = ("commit", "image", "image_id", "torch", "device")


def describe_run(folder: RunFolder, config: Config) -> str:
    """Return the description that MLflow shows above a run."""
    receipt = json.loads(Receipt(folder).text())
    plan, starts, evaluations = receipt["plan"], receipt["starts"], receipt["evaluations"]
    world = plan["world"]
    processes = "1 process" if world == 1 else f"{world} processes"
    lines = [
        f"**{config.recipe}**: {config.model.arch} on {plan['train_images']:,} images of {plan['num_classes']:,}"
        f" classes ({config.data.source}), {plan['last_step']:,} steps of {plan['global_batch']:,} images on"
        f" {processes}, {config.train.precision}.",
        "",
        _status(folder, len(starts)),
    ]
    finite = [row for row in evaluations if not row.get("not_finite")]
    if finite:
        best = max(finite, key=lambda row: row["top1"])
        lines += ["", f"Best: top-1 {best['top1']:.4f} at step {best['step']:,} ({best['images']} images evaluated)."]
    lines += ["", "| | |", "| --- | --- |", f"| data | `{receipt['data']}` |"]
    last_start = starts[-1] if starts else {}
    lines += [f"| {name.replace('_', ' ')} | `{last_start[name]}` |" for name in _FACTS if name in last_start]
    nproc = f" --nproc {world}" if world > 1 else ""
    lines += [
        "", "To repeat it, with the file `config.yaml` from the artifacts:", "", "```",
        f"pipeline train config.yaml run.dir=runs/again{nproc}", "```",
    ]  # fmt: skip
    if config.is_deterministic:
        lines += ["", "It is deterministic: `pipeline verify` with its folder compares a repetition bit for bit."]
    return "\n".join(lines)


def _status(folder: RunFolder, starts: int) -> str:
    end = last_event(folder.journal)
    restarts = f", after {starts} starts" if starts > 1 else ""
    if end.get("event") == "ended":
        return f"{end['status']} at step {end['step']:,}{restarts}: `{end['line']}`"
    return f"Running, or killed{restarts}."
