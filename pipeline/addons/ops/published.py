"""A receipt that somebody has published, for `pipeline verify`: read with a check of its parts."""

import re
from typing import Any

from pipeline.addons.ops.receipt import FORMAT
from pipeline.errors import RequestError
from pipeline.files import parse_json, read_limited
from pipeline.record.folder import RunFolder

_MAX_BYTES = 64 << 20
_MAX_WORLD = 4096
_WEIGHTS, _CHECKSUMS = re.compile("sha256:[0-9a-f]{64}"), re.compile("([0-9a-f]{8})+")


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
            and all(
                _is_int(start["step"], 0) and _is_int(start["world"], 1, _MAX_WORLD)
                for start in receipt["starts"]
            )
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
