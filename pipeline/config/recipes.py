"""The recipes in `recipes/`, and what the comment at the top of each says about it."""

import itertools
from pathlib import Path

RECIPES = Path(__file__).parents[1] / "recipes"


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def describe(name: str) -> str:
    """Return a recipe's name, and the comment at its top up to the first empty line.

    It says what the recipe trains, the target, the time, the processes, the data and the source.
    """
    lines = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("# "), lines)
    return "\n  ".join([name, *(line.removeprefix("# ") for line in comment)])
