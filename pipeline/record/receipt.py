"""The receipt: what a run's weights follow from, and what they were, in one file that `pipeline verify` repeats.

Promise: `receipt.json` is whole at any instant, and a run that was killed and went on has the rows of one that nobody
touched, each once. Why that holds: it is derived, from config.yaml, plan.json and the journal alone, so nobody has to keep
it through a kill: it is brought up to date at the next start, and whoever wants it without writing (MLflow's sender) makes
it for himself. A start at step n strikes out what came after n, as the training itself does: what is left is the way that
led to these weights.

There is a row an evaluation. A digest of all weights costs 0.05 s per 100 MiB on rank 0, while the others wait: nothing
beside an evaluation, too much for each step.
"""

import json
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from pipeline.config.load import from_yaml
from pipeline.errors import RunError
from pipeline.files import atomic_write
from pipeline.record.folder import RunFolder
from pipeline.record.journal import read

FORMAT = 1
# MLflow's names, which the journal's facts bear, and ours
_NAMES = {
    "mlflow.source.git.commit": "commit",
    "mlflow.docker.image.uri": "image",
    "mlflow.docker.image.id": "image_id",
}


class Receipt:
    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._offset = 0
        self._run = ""
        self._data: str | None = None
        self._starts: list[dict[str, Any]] = []
        self._evaluations: dict[int, dict[str, Any]] = {}
        self._loss_steps: list[int] = []
        self._losses: list[float] = []
        self._done: str | None = None

    def write(self, log: Callable[[str], None]) -> None:
        """Bring the file up to date. What is in the way, a full disk or a damaged file, costs training nothing."""
        try:
            atomic_write(self._folder.receipt, self.text().encode())
        except (OSError, ValueError, RunError) as error:
            log(f"receipt could not be written: {error}; the next evaluation or start tries again")

    def text(self) -> str:
        """What the file says, or should say, now."""
        for row, after in read(self._folder.journal, self._offset):
            self._take(row)
            self._offset = after
        config = from_yaml(self._folder.config.read_text(), str(self._folder.config))
        contents = {
            "format": FORMAT,
            "run": self._run,
            "config": config.model_dump(mode="json", by_alias=True),
            "plan": json.loads(self._folder.plan.read_text()),
            "data": self._data,
            "starts": self._starts,
            "evaluations": [self._evaluations[step] for step in sorted(self._evaluations)],
            "done": self._done,
        }
        return json.dumps(contents, indent=1) + "\n"

    def _take(self, row: dict[str, Any]) -> None:
        """Fold one row of the journal in."""
        if "train/loss" in row.get("metrics", {}):  # its steps only grow: the first row of a step stands
            self._loss_steps.append(row["step"])
            self._losses.append(row["metrics"]["train/loss"])
        match row.get("event"):
            case "created":
                self._run = row["run"]
            case "started":
                step = row["step"]
                self._starts = [start for start in self._starts if start["step"] < step]
                self._evaluations = {at: kept for at, kept in self._evaluations.items() if at <= step}
                self._done = None
                facts = {_NAMES.get(name, name): value for name, value in row["tags"].items()}
                self._data = facts.pop("data", None)
                own = {name: value for name, value in facts.items() if not name.startswith("mlflow.")}
                self._starts.append({"step": step, **own})
            case "evaluated":
                reported = bisect_right(self._loss_steps, row["step"])
                loss = {"train_loss": self._losses[reported - 1]} if reported else {}
                account = {name: value for name, value in row.items() if name not in ("time", "event")}
                self._evaluations[row["step"]] = account | loss
            case "ended" if row.get("status") == "FINISHED":
                self._done = row["line"]
