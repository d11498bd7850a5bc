"""The best checkpoint of a run, for `--best`."""

from pathlib import Path

from pipeline.addons.run.receipt import rank
from pipeline.errors import RequestError
from pipeline.files import parse_json
from pipeline.record.checkpoint_files import list_checkpoints, step_of
from pipeline.record.folder import RunFolder


def best_checkpoint(target: str) -> Path:
    """Return the checkpoint with the highest top-1 in validation; of equals that of lower loss.

    target: the run's folder. Raises RequestError if it is none or keeps no evaluated checkpoint.
    """
    folder = RunFolder(Path(target))
    try:
        rows = parse_json(folder.receipt.read_text(encoding="utf-8"))["evaluations"]
        evaluated = sorted((rank(row) for row in rows if not row.get("not_finite")), reverse=True)
    except (OSError, ValueError, KeyError, TypeError):
        raise RequestError(
            f"--best cannot read {folder.receipt}", "give a run's folder, or a checkpoint without --best"
        ) from None
    kept = {step_of(path): path for path in reversed(list_checkpoints(folder.checkpoints))}
    for *_, step in evaluated:
        if -step in kept:
            return kept[-step]
    raise RequestError(
        f"{target} has no best checkpoint: none has a validation with finite logits", "leave --best out"
    )
