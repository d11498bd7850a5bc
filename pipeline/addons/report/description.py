"""The description of a run in Markdown: what it is, how it ended, how to repeat it."""

from pipeline.config.schema import Config
from pipeline.record.folder import RunFolder
from pipeline.record.journal import last_event
from pipeline.record.receipt import Receipt, rank

_FACTS = ("commit", "image", "image_id", "torch", "device")


def describe_run(folder: RunFolder, config: Config) -> str:
    """Return the description that MLflow shows above a run."""
    receipt = Receipt(folder).contents()
    plan, starts, evaluations = receipt["plan"], receipt["starts"], receipt["evaluations"]
    world, end = plan["world"], last_event(folder.journal)
    processes = "1 process" if world == 1 else f"{world} processes"
    restarts = f", after {len(starts)} starts" if len(starts) > 1 else ""
    status = f"Running, or killed{restarts}."
    if end.get("event") == "ended":
        status = f"{end['status']} at step {end['step']:,}{restarts}: `{end['line']}`"
    paragraphs = [
        f"**{config.recipe}**: {config.model.arch} on {plan['train_images']:,} images of {plan['num_classes']:,}"
        f" classes ({config.data.source}), {plan['last_step']:,} steps of {plan['global_batch']:,} images on"
        f" {processes}, {config.train.precision}.",
        status,
    ]
    finite = [row for row in evaluations if not row.get("not_finite")]
    if finite:
        best = max(finite, key=rank)
        top1, step, images = best["top1"], best["step"], best["images"]
        paragraphs.append(f"Best: top-1 {top1:.4f} at step {step:,} ({images} images evaluated).")
    last_start = starts[-1] if starts else {}
    facts = {"data": receipt["data"]} | {name: last_start[name] for name in _FACTS if name in last_start}
    rows = [f"| {name.replace('_', ' ')} | `{value}` |" for name, value in facts.items()]
    paragraphs.append("\n".join(["| | |", "| --- | --- |", *rows]))
    command = "pipeline train config.yaml run.dir=runs/again" + (f" --nproc {world}" if world > 1 else "")
    paragraphs += ["To repeat it, with the file `config.yaml` from the artifacts:", f"```\n{command}\n```"]
    if config.is_deterministic:
        paragraphs.append("It is deterministic: `pipeline verify` with its folder compares a repetition bit for bit.")
    return "\n\n".join(paragraphs)
