"""The receipt: what a run's weights follow from and what they were, for `pipeline verify`.

Promise: `receipt.json` is complete at any instant, and a run that was killed and resumed has the
rows of an undisturbed run, each once. It is derived from config.yaml, plan.json and the journal
alone, so it need not survive a kill: the next start updates it, and MLflow's sender, which writes
nothing here, derives it again. A start at step n removes the rows after step n, which training
discards too, so the remaining rows are those that led to these weights.

There is a row per evaluation, with the SHA-256 of all weights, and in `tensors` the CRC-32 of each
tensor, which names the first one that differs where no checkpoint was kept. Rank 0 makes both in
one pass while the other ranks wait. The SHA-256 costs 0.06 s per 100 MiB, and the CRC-32 0.025 s:
little beside an evaluation, too much for each step. Receipts of version 0.2 have no `tensors`.
"""

import json
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.config.load import from_yaml
from pipeline.errors import RequestError, RunError
from pipeline.files import parse_json, read_limited
from pipeline.record.checkpoint_files import list_checkpoints, step_of
from pipeline.record.folder import RunFolder
from pipeline.record.journal import read

FORMAT = 1
_MAX_BYTES = 64 << 20
_MAX_WORLD = 4096
_WEIGHTS, _CHECKSUMS = re.compile("sha256:[0-9a-f]{64}"), re.compile("([0-9a-f]{8})+")
# the names of facts in the journal, which are MLflow's, and in the receipt
_NAMES = {
    "mlflow.source.git.commit": "commit", "mlflow.docker.image.uri": "image", "mlflow.docker.image.id": "image_id",
}  # fmt: skip


def rank(row: dict[str, Any]) -> tuple[float, float, int]:
    """Return what the best evaluation has the highest of: top-1, then -loss, then -step."""
    loss = row.get("loss")
    return float(row["top1"]), -(math.inf if loss is None else float(loss)), -int(row["step"])


def best_checkpoint(target: str) -> Path:
    """Return the checkpoint with the highest top-1 in validation; of equals that of lower loss.

    target: the run's folder. Raises RequestError if it is none or keeps no evaluated checkpoint.
    """
    folder = RunFolder(Path(target))
    if not folder.path.is_dir():
        raise RequestError(f"--best needs a run's folder, but {target} is not a folder", "leave --best out")
    try:
        rows = parse_json(folder.receipt.read_text(encoding="utf-8"))["evaluations"]
        evaluated = sorted((rank(row) for row in rows if not row.get("not_finite")), reverse=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise RequestError(
            f"--best cannot read {folder.receipt} ({reason})", "give a run's folder, or a checkpoint without --best"
        ) from None
    kept = {step_of(path): path for path in reversed(list_checkpoints(folder.checkpoints))}
    for *_, step in evaluated:
        if -step in kept:
            return kept[-step]
    raise RequestError(f"{target} has no best checkpoint: none has a validation with finite logits", "leave --best out")


def read_receipt(folder: RunFolder) -> dict[str, Any]:
    """Return the receipt in a run's folder.

    Raises RequestError if there is none, or if it lacks what a repetition needs.
    """
    try:
        receipt = parse_json(read_limited(folder.receipt, _MAX_BYTES))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        remedy = "give a run's folder; the run's own 'pipeline train' command writes its receipt"
        raise RequestError(f"{folder.path} has no readable receipt ({reason})", remedy) from None
    if not isinstance(receipt, dict) or receipt.get("format") != FORMAT or not _is_complete(receipt):
        problem = f"is not a receipt of format {FORMAT}, the only one that this version reads"
        raise RequestError(f"{folder.receipt} {problem}")
    return receipt


def _is_complete(receipt: dict[str, Any]) -> bool:
    """Return True if a receipt, which anybody may have written, has what a repetition reads."""
    try:
        return (
            all(receipt[name] is None or isinstance(receipt[name], str) for name in ("data", "done"))
            and len(receipt["starts"]) > 0
            and all(_is_int(start["step"], 0) and _is_int(start["world"], 1, _MAX_WORLD) for start in receipt["starts"])
            and isinstance(receipt["evaluations"], list)
            and all(_is_evaluation(row) for row in receipt["evaluations"])
            and _is_int(receipt["plan"]["steps_per_epoch"], 1)
            and isinstance(receipt["config"]["model"]["arch"], str)
        )
    except (KeyError, TypeError):
        return False


def _is_evaluation(row: dict[str, Any]) -> bool:
    has_checksums = "tensors" not in row or _CHECKSUMS.fullmatch(row["tensors"])
    return bool(_is_int(row["step"], 1) and _WEIGHTS.fullmatch(row["weights"]) and has_checksums)


def _is_int(value: object, least: int, most: int = (1 << 63) - 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


class Receipt:
    """The receipt of one run, derived from the journal rows that were read so far."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._offset, self._run = 0, ""
        self._data: str | None = None
        self._starts: list[dict[str, Any]] = []
        self._evaluations: dict[int, dict[str, Any]] = {}
        self._loss_steps: list[int] = []
        self._losses: list[float] = []
        self._done: str | None = None

    def write(self, log: Callable[[str], None]) -> None:
        """Update the file. An error (a full disk, a damaged file) is logged; training continues."""
        try:
            text = self.text()
            self._folder.write(self._folder.receipt, text.encode())
        except (OSError, ValueError, RunError) as error:
            log(f"receipt could not be written: {error}; the next evaluation or start tries again")

    def text(self) -> str:
        """Return the text of an up-to-date file."""
        return json.dumps(self.contents(), indent=1) + "\n"

    def contents(self) -> dict[str, Any]:
        """Return the contents of an up-to-date file."""
        for row, after in read(self._folder.journal, self._offset):
            self._add(row)
            self._offset = after
        config = from_yaml(self._folder.config.read_text(encoding="utf-8"), str(self._folder.config))
        plan = parse_json(self._folder.plan.read_text(encoding="utf-8"))
        return {
            "format": FORMAT, "run": self._run, "config": config.model_dump(mode="json", by_alias=True), "plan": plan,
            "data": self._data, "starts": self._starts,
            "evaluations": [self._evaluations[step] for step in sorted(self._evaluations)], "done": self._done,
        }  # fmt: skip

    def _add(self, journal_row: dict[str, Any]) -> None:
        if "train/loss" in journal_row.get("metrics", {}):
            at = bisect_left(self._loss_steps, journal_row["step"])  # not at the end if it was trained again
            is_again = self._loss_steps[at : at + 1] == [journal_row["step"]]
            self._loss_steps[at : at + is_again] = [journal_row["step"]]
            self._losses[at : at + is_again] = [journal_row["metrics"]["train/loss"]]
        match journal_row.get("event"):
            case "created":
                self._run = journal_row["run"]
            case "started":
                self._add_start(journal_row["step"], journal_row["tags"])
            case "evaluated":
                rows = bisect_right(self._loss_steps, journal_row["step"])
                loss = {"train_loss": self._losses[rows - 1]} if rows else {}
                result = {name: value for name, value in journal_row.items() if name not in ("time", "event")}
                self._evaluations[journal_row["step"]] = result | loss
            case "ended" if journal_row.get("status") == "FINISHED":
                self._done = journal_row["line"]

    def _add_start(self, step: int, tags: dict[str, Any]) -> None:
        """Add a start at `step`, and remove what a run that was killed had done after it."""
        self._starts = [start for start in self._starts if start["step"] < step]
        self._evaluations = {at: row for at, row in self._evaluations.items() if at <= step}
        self._done = None
        facts = {_NAMES.get(name, name): value for name, value in tags.items()}
        self._data = facts.pop("data", None)
        facts = {name: value for name, value in facts.items() if not name.startswith("mlflow.")}
        self._starts.append({"step": step, **facts})
