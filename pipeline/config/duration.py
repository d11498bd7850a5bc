"""Lengths of training, as a recipe states them."""

import re
from dataclasses import dataclass
from typing import Literal

Unit = Literal["epochs", "steps", "%"]


@dataclass(frozen=True)
class Duration:
    """A length of training in epochs, steps or percent of all steps."""

    amount: float
    unit: Unit

    @classmethod
    def parse(cls, text: object) -> "Duration":
        """Parse `10 epochs`, `500 steps`, `5 %` (of all steps) or `0`, or raise ValueError."""
        if isinstance(text, Duration):
            return text
        match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)\s*(epochs?|steps?|%)", str(text).strip(), re.ASCII)
        if match:
            amount, word = float(match[1]), match[2]
            unit: Unit = "%" if word == "%" else "epochs" if word.startswith("epoch") else "steps"
            if unit != "steps" or amount.is_integer():
                return cls(amount, unit)
        elif str(text).strip() == "0":
            return cls(0, "steps")
        raise ValueError("not a duration")

    def __str__(self) -> str:
        return f"{f'{self.amount:.6f}'.rstrip('0').rstrip('.')} {self.unit}"  # `parse` does not read 1e-06
