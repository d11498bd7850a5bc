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
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.load import from_yaml
from pipeline.errors import RequestError, RunError
from pipeline.files import parse_json
from pipeline.record.checkpoint_files import list_checkpoints, step_of
from pipeline.record.folder import RunFolder
from pipeline.record.journal import read
from pipeline.train.listener import End, Evaluated, Listener, Start

if TYPE_CHECKING:  # a receipt is read without torch
    from pipeline.train.state import TrainState

# the names of facts in the journal, which are MLflow's, and in the receipt
_NAMES = {
    "mlflow.source.git.commit": "commit", "mlflow.docker.image.uri": "image",
    "mlflow.docker.image.id": "image_id",
}  # fmt: skip


def headline(row: dict[str, Any]) -> tuple[str, float]:
    """Return the name and value of the figure that a model is known by."""
    return ("mAP", row["map"]) if "map" in row else ("top-1", row["top1"])


def rank(row: dict[str, Any], watch: str = "") -> tuple[float, float, int]:
    """Return what the best evaluation has the highest of: see `TrainState.add_evaluation`."""
    loss = row.get("loss")
    figures = float(headline(row)[1]), -(math.inf if loss is None else float(loss))
    first, second = figures[::-1] if watch == "val/loss" else figures
    return first, second, -int(row["step"])


class Receipt:
    """The receipt of one run. It keeps what it has read, and reads only new rows of the journal."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._offset, self._run = 0, ""
        self._parse = lru_cache(1)(from_yaml)  # again only if the file has changed: it takes 15 ms
        self._data: str | None = None
        self._starts: list[dict[str, Any]] = []
        self._evaluations: dict[int, dict[str, Any]] = {}
        self._losses: dict[int, float] = {}  # of a step that was trained again, the last
        self._done: str | None = None

    def contents(self) -> dict[str, Any]:
        """Return the receipt now. Raises OSError, ValueError and RunError for damaged files."""
        for row, after in read(self._folder.journal, self._offset):
            self._add(row)
            self._offset = after
        config = self._parse(self._folder.config.read_text(encoding="utf-8"), str(self._folder.config))
        return {
            "format": 1,
            "run": self._run,
            "config": config.model_dump(mode="json", by_alias=True),
            "plan": parse_json(self._folder.plan.read_text(encoding="utf-8")),
            "data": self._data,
            "starts": self._starts,
            "evaluations": [self._evaluations[step] for step in sorted(self._evaluations)],
            "done": self._done,
        }

    def text(self) -> str:
        """Return the text of an up-to-date receipt.json."""
        return json.dumps(self.contents(), indent=1) + "\n"

    def _add(self, row: dict[str, Any]) -> None:
        if (loss := row.get("metrics", {}).get("train/loss")) is not None:
            self._losses[row["step"]] = loss
        match row.get("event"):
            case "created":
                self._run = row["run"]
            case "started":
                self._add_start(row["step"], row["tags"])
            case "evaluated":
                result = {name: value for name, value in row.items() if name not in ("time", "event")}
                if before := [step for step in self._losses if step <= row["step"]]:
                    result["train_loss"] = self._losses[max(before)]
                self._evaluations[row["step"]] = result
            case "ended" if row.get("status") == "FINISHED":
                self._done = row["line"]

    def _add_start(self, at: int, tags: dict[str, Any]) -> None:
        """Add a start, and remove what a run that was killed had done after that step."""
        self._done = None
        self._evaluations = {step: found for step, found in self._evaluations.items() if step <= at}
        facts = {_NAMES.get(name, name): value for name, value in tags.items()}
        self._data = facts.pop("data", None)
        facts = {name: value for name, value in facts.items() if not name.startswith("mlflow.")}
        self._starts = [*(start for start in self._starts if start["step"] < at), {"step": at, **facts}]


def receipt_row(state: "TrainState") -> dict[str, Any]:
    """Return the row of the evaluated model; valid on rank 0. All processes call this together."""
    from pipeline.addons.models.trained import digest_and_checksums

    evaluation = state.evaluation
    assert evaluation is not None
    weights = state.strategy.full_state({"model": state.eval_model.state_dict()})["model"]
    digest, checksums = digest_and_checksums(weights)
    return {
        "step": evaluation.step,
        "weights": f"sha256:{digest}",
        "tensors": checksums,
        **evaluation.main,
        "loss": None,  # JSON has no NaN
        **evaluation.figures,
        "images": f"{evaluation.images}/{evaluation.total}",
        **({"not_finite": evaluation.not_finite} if evaluation.not_finite else {}),
    }


class ToReceipt(Listener):
    """Writes `receipt.json`, from the rows of the journal."""

    def __init__(self, folder: RunFolder, log: Callable[[str], None]) -> None:
        self._folder, self._receipt, self._log = folder, Receipt(folder), log

    def started(self, start: Start) -> None:
        self.write()

    def evaluated(self, result: Evaluated) -> None:
        self.write()

    def ended(self, end: End) -> None:
        self.write()

    def write(self) -> None:
        """Update the file. An error (a full disk, a damaged file) is logged; training continues."""
        try:
            self._folder.write(self._folder.receipt, self._receipt.text().encode())
        except (OSError, ValueError, RunError) as error:
            self._log(f"receipt could not be written: {error}; the next evaluation or start tries again")


def best_checkpoint(target: str) -> Path:
    """Return the checkpoint with the best validation: see `rank`.

    target: the run's folder. Raises RequestError if it is none or keeps no evaluated checkpoint.
    """
    folder = RunFolder(Path(target))
    try:
        receipt = parse_json(folder.receipt.read_text(encoding="utf-8"))
        watch = receipt.get("config", {}).get("train", {}).get("watch", "")
        rows = [row for row in receipt["evaluations"] if not row.get("not_finite")]
        evaluated = sorted((rank(row, watch) for row in rows), reverse=True)
    except (OSError, ValueError, KeyError, TypeError):
        remedy = "give a run's folder, or a checkpoint without --best"
        raise RequestError(f"--best cannot read {folder.receipt}", remedy) from None
    kept = {step_of(path): path for path in reversed(list_checkpoints(folder.checkpoints))}
    for *_, step in evaluated:
        if -step in kept:
            return kept[-step]
    problem = f"{target} has no best checkpoint: none has a validation with finite logits"
    raise RequestError(problem, "leave --best out")
