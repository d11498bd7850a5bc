"""The interface of whatever is told, on rank 0, what happens in a run.

`records.open_records` lists the listeners in the order in which they are told. The other ranks have
none, so the code that trains asks nowhere who it is.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import BadImage
from pipeline.train.evaluation import Evaluation


@dataclass(frozen=True)
class Start:
    """A start of a run whose state is loaded."""

    step: int
    checkpoint: Path | None  # the file that it resumes from
    facts: dict[str, Any]  # tags of the run
    evaluated: dict[str, Any] | None  # the receipt's row of the model that it resumes from, if evaluated


@dataclass(frozen=True)
class Update:
    """An update of the weights."""

    step: int
    epoch: int
    sample_ids: list[int] = field(default_factory=list)  # of the global batch, in order, if `run.trace`
    batch_sha256: str = ""


@dataclass(frozen=True)
class Evaluated:
    """An evaluation of the model."""

    evaluation: Evaluation
    predictions: Any  # `addons.report.predictions`
    bad_images: list[BadImage]
    row: dict[str, Any] = field(default_factory=dict)  # of the receipt
    is_best: bool = False


@dataclass(frozen=True)
class End:
    """The end of a run, with or without a result."""

    step: int
    status: str  # FINISHED, FAILED or KILLED, as MLflow has it
    line: str
    best: Evaluation | None
    seconds_left: Callable[[], float | None]  # until this process must end

    @property
    def is_finished(self) -> bool:
        return self.status == "FINISHED"


class Listener:
    """Is told what happens in a run. A method does nothing unless a listener overrides it."""

    def started(self, start: Start) -> None:
        """Handle the start of training."""

    def found(self, bad_images: list[BadImage]) -> None:
        """Handle training images that cannot be decoded. Each is told once in a run."""

    def stepped(self, update: Update) -> None:
        """Handle an update of the weights."""

    def reported(self, step: int, metrics: dict[str, float], best: Evaluation | None) -> None:
        """Handle the metrics of the steps since the last report; on a GPU, a step later."""

    def measured(self, step: int, metrics: dict[str, float]) -> None:
        """Handle the seconds of an epoch, by what they were spent on."""

    def evaluated(self, result: Evaluated) -> None:
        """Handle an evaluation of the model."""

    def saved(self, checkpoint: Path) -> None:
        """Handle a complete checkpoint, in the thread that wrote it."""

    def ended(self, end: End) -> None:
        """Handle the end of training. The other ranks wait."""

    def closed(self, end: End) -> None:
        """Handle the end of this process. After a result, the other ranks have left."""
