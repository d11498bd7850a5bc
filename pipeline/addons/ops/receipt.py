"""The receipt: what a run's weights follow from and what they were, for `pipeline verify`.

Promise: `receipt.json` is complete at any instant, and a run that was killed and resumed has the
rows of an undisturbed run, each once. It is derived from config.yaml, plan.json and the journal
alone, so it need not survive a kill: the next start updates it, and MLflow's sender, which writes
nothing here, derives it again. A start at step n removes the rows after step n, which training
discards too, so the remaining rows are those that led to these weights.

There is a row per evaluation, with the SHA-256 of all weights, and in `tensors` the CRC-32 of each
tensor, which names the first one that differs where no checkpoint was kept.
"""

import json
import math
from collections.abc import Callable
from typing import Any

from pipeline.config.load import from_yaml
from pipeline.errors import RunError
from pipeline.files import parse_json
from pipeline.record.folder import RunFolder
from pipeline.record.journal import read
from pipeline.train.listener import End, Evaluated, Listener, Start

FORMAT = 1
# the names of facts in the journal, which are MLflow's, and in the receipt
_NAMES = {
    "mlflow.source.git.commit": "commit", "mlflow.docker.image.uri": "image",
    "mlflow.docker.image.id": "image_id",
}  # fmt: skip


def rank(row: dict[str, Any]) -> tuple[float, float, int]:
    """Return what the best evaluation has the highest of: top-1, then -loss, then -step."""
    loss = row.get("loss")
    return float(row["top1"]), -(math.inf if loss is None else float(loss)), -int(row["step"])


def make_receipt(folder: RunFolder) -> dict[str, Any]:
    """Return the receipt of a run. Raises OSError, ValueError and RunError for damaged files."""
    run, data, done = "", None, None
    starts: list[dict[str, Any]] = []
    evaluations: dict[int, dict[str, Any]] = {}
    losses: dict[int, float] = {}  # of a step that was trained again, the last
    for row, _ in read(folder.journal):
        if (loss := row.get("metrics", {}).get("train/loss")) is not None:
            losses[row["step"]] = loss
        match row.get("event"):
            case "created":
                run = row["run"]
            case "started":  # what a run that was killed had done after this step is removed
                at, done = row["step"], None
                evaluations = {step: found for step, found in evaluations.items() if step <= at}
                facts = {_NAMES.get(name, name): value for name, value in row["tags"].items()}
                data = facts.pop("data", None)
                facts = {name: value for name, value in facts.items() if not name.startswith("mlflow.")}
                starts = [*(start for start in starts if start["step"] < at), {"step": at, **facts}]
            case "evaluated":
                result = {name: value for name, value in row.items() if name not in ("time", "event")}
                if before := [step for step in losses if step <= row["step"]]:
                    result["train_loss"] = losses[max(before)]
                evaluations[row["step"]] = result
            case "ended" if row.get("status") == "FINISHED":
                done = row["line"]
    config = from_yaml(folder.config.read_text(encoding="utf-8"), str(folder.config))
    return {
        "format": FORMAT,
        "run": run,
        "config": config.model_dump(mode="json", by_alias=True),
        "plan": parse_json(folder.plan.read_text(encoding="utf-8")),
        "data": data,
        "starts": starts,
        "evaluations": [evaluations[step] for step in sorted(evaluations)],
        "done": done,
    }


def receipt_text(folder: RunFolder) -> str:
    """Return the text of an up-to-date receipt.json."""
    return json.dumps(make_receipt(folder), indent=1) + "\n"


class ToReceipt(Listener):
    """Writes `receipt.json`, from the rows of the journal."""

    def __init__(self, folder: RunFolder, log: Callable[[str], None]) -> None:
        self._folder, self._log = folder, log

    def started(self, start: Start) -> None:
        self.write()

    def evaluated(self, result: Evaluated) -> None:
        self.write()

    def ended(self, end: End) -> None:
        self.write()

    def write(self) -> None:
        """Update the file. An error (a full disk, a damaged file) is logged; training continues."""
        try:
            self._folder.write(self._folder.receipt, receipt_text(self._folder).encode())
        except (OSError, ValueError, RunError) as error:
            self._log(f"receipt could not be written: {error}; the next evaluation or start tries again")
