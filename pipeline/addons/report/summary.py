"""A summary of a run: what it is, how it ended, how to repeat it. For its page, and for MLflow."""

import shlex
import time
from typing import Any

from pipeline.addons.run.receipt import Receipt, headline, rank
from pipeline.config.schema import Config
from pipeline.errors import count_of
from pipeline.record.folder import RunFolder
from pipeline.record.journal import events

_STATUS = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped"}


def summarise(folder: RunFolder) -> dict[str, Any]:
    """Return the texts and figures that describe a run, and its receipt."""
    receipt = Receipt(folder).contents()
    config, plan = receipt["config"], receipt["plan"]
    rows = events(folder.journal)
    last = rows[-1] if rows else {}
    finite = [row for row in receipt["evaluations"] if not row.get("not_finite")]
    return {
        "recipe": config["recipe"],
        "what": f"{config['model']['arch']} on {plan['train_images']:,} images of {plan['num_classes']:,}"
        f" classes: {plan['last_step']:,} steps of {plan['global_batch']:,} images on"
        f" {count_of(plan['world'], 'process', 'es')}, {config['train']['precision']}",
        "status": _STATUS.get(last.get("status", ""), "running or killed"),
        "line": last.get("line", ""),
        # those of the done line
        "figures": dict(word.split("=", 1) for word in (receipt["done"] or "").split()[1:]),
        "best": max(finite, key=lambda row: rank(row, config["train"].get("watch", "")), default=None),
        "began": _utc(rows[0]["time"]) if rows else "",
        "ended": _utc(last["time"]) if "status" in last else "",
        "receipt": receipt,
    }


def _utc(milliseconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(milliseconds // 1000))


def repeat_command(world: int, config: str = "config.yaml", run_dir: str = "runs/again") -> str:
    """Return the command that repeats a run of `world` processes on one machine."""
    processes = f" --nproc {world}" if world > 1 else ""
    return f"pipeline train {shlex.quote(config)} run.dir={shlex.quote(run_dir)}{processes}"


def describe_run(folder: RunFolder, config: Config) -> str:
    """Return the description that MLflow shows above a run, in Markdown."""
    run = summarise(folder)
    starts, best = run["receipt"]["starts"], run["best"]
    status = run["status"] + (f", after {len(starts)} starts" if len(starts) > 1 else "")
    paragraphs = [f"**{run['recipe']}**: {run['what']}."]
    paragraphs.append(f"{status}: `{run['line']}`" if run["line"] else status)
    if best:
        name, value = headline(best)
        paragraphs.append(f"Best: {name} {value:.4f} at step {best['step']:,} ({best['images']} images).")
    command = repeat_command(run["receipt"]["plan"]["world"])
    paragraphs += ["To repeat it, with the file `config.yaml` from the artifacts:", f"```\n{command}\n```"]
    if config.is_deterministic:
        check = "`pipeline verify` with its folder compares a repetition bit for bit"
        paragraphs.append(f"It is deterministic: {check}.")
    return "\n\n".join(paragraphs)
