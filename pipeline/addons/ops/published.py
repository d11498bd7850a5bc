"""A receipt that somebody has published, for `pipeline verify`: read with a check of its parts."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pipeline.errors import RequestError, one_line
from pipeline.files import parse_json, read_limited
from pipeline.record.folder import RunFolder

_MAX_BYTES = 64 << 20


class _Part(BaseModel):
    """A part of a receipt. It may have more fields than those that a repetition reads."""

    model_config = ConfigDict(strict=True)


class _Start(_Part):
    step: Annotated[int, Field(ge=0)]
    world: Annotated[int, Field(ge=1, le=4096)]


class _Evaluation(_Part):
    step: Annotated[int, Field(ge=1)]
    weights: Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")]
    tensors: Annotated[str, Field(pattern="^([0-9a-f]{8})+$")] = "0" * 8


class _Plan(_Part):
    steps_per_epoch: Annotated[int, Field(ge=1)]


class _Receipt(_Part):
    format: Literal[1]
    config: dict[str, Any]
    plan: _Plan
    data: str | None
    starts: Annotated[list[_Start], Field(min_length=1)]
    evaluations: list[_Evaluation]
    done: str | None


def read_receipt(folder: RunFolder) -> dict[str, Any]:
    """Return the receipt in a run's folder.

    Raises RequestError if there is none, or if it lacks what a repetition needs.
    """
    try:
        receipt: dict[str, Any] = parse_json(read_limited(folder.receipt, _MAX_BYTES))
        _Receipt.model_validate(receipt)
    except (OSError, ValueError) as error:  # pydantic's error is a ValueError
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        remedy = "give a run's folder; the run's own 'pipeline train' command writes its receipt"
        raise RequestError(f"{folder.path} has no readable receipt of format 1 ({reason})", remedy) from None
    return receipt
