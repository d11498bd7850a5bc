"""The keyword arguments of a function that makes a model, as `model.args` gives them."""

import re
from typing import Any

from pipeline.config.values import Argument


def parse_arguments(value: object) -> dict[str, Any]:
    """Return keyword arguments with typed values; raise ValueError for anything else."""
    if not isinstance(value, dict) or not all(str(name).isidentifier() for name in value):
        raise ValueError("not keyword arguments")
    return {
        name: [_parse_argument(item) for item in given] if isinstance(given, list) else _parse_argument(given)
        for name, given in value.items()
    }


def _parse_argument(value: object) -> Argument:
    """Return the value that a word means: a number, true, false, none, or itself."""
    if value is None or isinstance(value, int | float):
        return value
    words = {"true": True, "false": False, "none": None, "null": None, "~": None}
    if not isinstance(value, str) or not (0 < len(value) <= 200 and value.isprintable()):
        raise ValueError("not a number or a word")
    if value.lower() in words:
        return words[value.lower()]
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", value, re.ASCII | re.IGNORECASE):
        return value
    number = float(value) if re.search("[.eE]", value) else int(value)
    if abs(number) >= 1 << 20:
        raise ValueError("too large")
    return number
