"""The recipes in `recipes/`, and what the comment at the top of each says about it.

That comment begins with a line per fact, `# Target: …`, for each of FACTS. A line that begins with
no name continues the fact before it. An empty comment line ends the facts; details follow.
"""

import textwrap
from functools import partial
from pathlib import Path

RECIPES = Path(__file__).parents[1] / "recipes"
FACTS = ("What", "Target", "Expected time", "Processes", "Data", "Source")


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def describe(path: Path) -> dict[str, str]:
    """Return the facts in a recipe's first comment, by name in lower case."""
    facts: dict[str, str] = {}
    name = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.removeprefix("#").strip()
        if not line.startswith("#") or not text:
            break
        before, colon, after = text.partition(": ")
        if colon and before in FACTS:
            name, text = before.lower(), after
        facts[name] = f"{facts[name]} {text}" if name in facts else text
    return facts


def describe_all() -> list[dict[str, str]]:
    """Return the name and the facts of every recipe."""
    return [{"name": name, **describe(RECIPES / f"{name}.yaml")} for name in recipe_names()]


def table(recipes: list[dict[str, str]], width: int) -> str:
    """Return the recipes as text: a block for each, wrapped to `width` columns."""
    blocks = []
    fill = partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
    for facts in recipes:
        lines = [fill(f"{facts['name']}: {facts['what']}", subsequent_indent="  ")]
        for fact in FACTS[1:]:
            lines.append(fill(f"  {fact.lower():<15}{facts[fact.lower()]}", subsequent_indent=" " * 17))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
