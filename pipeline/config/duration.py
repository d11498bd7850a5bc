"""Lengths of training, as a recipe states them."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Duration:
    """A length of training in epochs, steps or percent of all steps."""

    amount: float
    unit: str

    @classmethod
    def parse(cls, text: object) -> "Duration":
        """Parse `10 epochs`, `500 steps`, `5 %` (of all steps) or `0`, or raise ValueError."""
        if isinstance(text, Duration):
            return text
        words = "0 steps" if str(text).strip() == "0" else str(text).strip()
        match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)\s*(epochs?|steps?|%)", words, re.ASCII)
        if not match or (match[2].startswith("step") and "." in match[1]):
            raise ValueError("not a duration")
        return cls(float(match[1]), match[2] if match[2] == "%" else match[2].removesuffix("s") + "s")

    def __str__(self) -> str:
        return f"{f'{self.amount:.6f}'.rstrip('0').rstrip('.')} {self.unit}"  # `parse` does not read 1e-06
