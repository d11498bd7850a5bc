"""A run as its receipt describes it, for `pipeline verify`. Anybody may have written it."""

from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field

from pipeline.addons.models.inputs import check_run_folder
from pipeline.config.load import from_yaml, read_limited
from pipeline.config.schema import Config
from pipeline.errors import RequestError, one_line
from pipeline.files import parse_json
from pipeline.record.checkpoint_files import list_checkpoints, step_of
from pipeline.record.folder import RunFolder

_MAX_BYTES = 64 << 20


# each part may have more fields than those that a repetition reads
class _Start(BaseModel, strict=True):
    step: Annotated[int, Field(ge=0)]
    world: Annotated[int, Field(ge=1, le=4096)]


class _Evaluation(BaseModel, strict=True):
    step: Annotated[int, Field(ge=1)]
    weights: Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")]
    tensors: Annotated[str, Field(pattern="^([0-9a-f]{8})+$")] = "0" * 8


class _Plan(BaseModel, strict=True):
    steps_per_epoch: Annotated[int, Field(ge=1)]


class _Receipt(BaseModel, strict=True):
    format: Literal[1]
    config: dict[str, Any]
    plan: _Plan
    data: str | None
    starts: Annotated[list[_Start], Field(min_length=1)]
    evaluations: list[_Evaluation]
    done: str | None


@dataclass(frozen=True)
class Run:
    receipt: dict[str, Any]
    folder: RunFolder

    @classmethod
    def read(cls, path: Path) -> "Run":
        """Return the run in a folder. Raises RequestError if its receipt cannot be repeated."""
        check_run_folder(path)
        folder = RunFolder(path)
        try:
            receipt: dict[str, Any] = parse_json(read_limited(folder.receipt, _MAX_BYTES))
            _Receipt.model_validate(receipt)
        except (OSError, ValueError) as error:  # pydantic's error is a ValueError
            reason = error.strerror if isinstance(error, OSError) else one_line(error)
            remedy = "give a run's folder; the run's own 'pipeline train' command writes its receipt"
            raise RequestError(f"{path} has no readable receipt of format 1 ({reason})", remedy) from None
        return cls(receipt, folder)

    @cached_property
    def rows(self) -> dict[int, dict[str, Any]]:
        """Evaluations by step, in ascending order."""
        return {row["step"]: row for row in sorted(self.receipt["evaluations"], key=itemgetter("step"))}

    def config(self, changes: list[str] | None = None) -> Config:
        """Return the configuration in the receipt, with `changes`. Raises RequestError."""
        text = yaml.safe_dump(self.receipt["config"], allow_unicode=True)
        return from_yaml(text, f"the receipt of {self.folder.path}", changes)

    def starts_after(self, step: int) -> list[dict[str, Any]]:
        """Return the starts that trained the steps after `step`; [] if the run began later."""
        starts: list[dict[str, Any]] = self.receipt["starts"]
        before = [start for start in starts if start["step"] <= step]
        return before[-1:] + starts[len(before) :] if before else []

    def checkpoints(self) -> dict[int, Path]:
        """Return the checkpoints by step: the newest if there are several of one step."""
        return {step_of(path): path for path in reversed(list_checkpoints(self.folder.checkpoints))}

    def facts(self, name: str) -> str:
        """Return what the starts say of a version, a device and so on."""
        said = {one_line(start.get(name, "unknown"), 100) for start in self.receipt["starts"]}
        return " or ".join(sorted(said))
