"""LOAD"""

from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from pipeline.config.help import all_keys, error_line, is_section, nearest, not_a_section, show, unknown_key
from pipeline.config.schema import FREE_ON_RESUME, Config
from pipeline.errors import RequestError

RECIPES = Path(__file__).parents[1] / "recipes"
MAX_YAML_BYTES = 1 << 16


def load(recipe: str, overrides: list[str]) -> Config:
    """The configuration of `recipe` (a name from `recipes/` or a path to YAML) with `key=value` overrides on top."""
    path = _find(recipe)
    tree = _read_yaml(path)
    tree.setdefault("recipe", path.stem)
    _apply(tree, overrides)
    run = tree.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("dir", f"runs/{tree['recipe']}")
    return _validate(tree)


def recipe_text(recipe: str) -> tuple[str, str]:
    """A recipe's name, and its YAML with the name in it: the same recipe whatever the file it is put into is called.

    Its own words, with their comments, where a line above them gives the name; not above `---` or `{…}`, say.
    """
    path = _find(recipe)
    text = _read_text(path)
    tree = {"recipe": path.stem, **_parse_yaml(text, str(path))}
    name = tree["recipe"]
    for words in (text, f"recipe: {name}\n{text}"):
        with suppress(RequestError):
            if _parse_yaml(words, str(path)) == tree:
                return name, words
    return name, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def from_yaml(text: str, origin: str, overrides: list[str] | None = None) -> Config:
    """A configuration that `to_yaml` wrote, with overrides on top."""
    tree = _parse_yaml(text, origin)
    _apply(tree, overrides or [])
    return _validate(tree)


def refuse_changes(before: Config, now: Config) -> None:
    """RequestError if a resumption changes what it may not, naming each key with both values."""
    old, new = _leaves(before), _leaves(now)
    changed = [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
        and not any(key == free or key.startswith(f"{free}.") for free in FREE_ON_RESUME)
    ]
    if now.train.epochs < before.train.epochs:
        changed.append(f"train.epochs: {before.train.epochs} -> {now.train.epochs} (it may only grow)")
    if changed:
        raise RequestError(
            f"the run in {now.run_dir} was started with another configuration: {'; '.join(changed)}: put it back, give"
            " another run.dir, or start anew with run.resume=never"
        )


def refuse_another_model(trained: Config, now: Config, path: str) -> None:
    """RequestError if words of a command change which model the weights in the checkpoint `path` are of."""
    before, after = trained.model.model_dump(exclude={"channels_last"}), now.model.model_dump()
    changed = [f"model.{key}={show(after[key])}" for key in before if before[key] != after[key]]
    if changed:
        raise RequestError(f"{', '.join(changed)} cannot be set: {path} is of one model: leave model.* out")


def _find(recipe: str) -> Path:
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    if recipe in names:
        return RECIPES / f"{recipe}.yaml"
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml") or "/" in recipe:
        return path
    raise RequestError(
        f"recipe {recipe!r} is unknown: the recipes are {', '.join(names)}, or give the path of a .yaml file"
        + nearest(recipe, names)
    )


def _read_yaml(path: Path) -> dict[str, Any]:
    return _parse_yaml(_read_text(path), str(path))


def _read_text(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_YAML_BYTES + 1)
        if len(raw) > MAX_YAML_BYTES:
            raise RequestError(f"recipe {path} is larger than 64 KiB: that is no recipe")
        return raw.decode()
    except OSError as error:
        raise RequestError(f"recipe {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RequestError(f"recipe {path} is not UTF-8 text") from None


class _TextLoader(yaml.BaseLoader):
    """YAML in which every scalar is text and a key may stand once; the schema says what a text means.

    Aliases are refused: a recipe of 200 bytes can spell gigabytes with them.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="an alias (*name) stands for a value: write it out", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key.value, str):
                raise yaml.MarkedYAMLError(problem="a key is not a word", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} stands twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# besides its own errors PyYAML lets through what Python says to "[" × 10,000 and to "\\UFFFFFFFF"
_YAML_ERRORS = (yaml.YAMLError, RecursionError, ValueError, OverflowError)


def _parse_yaml(text: str, origin: str) -> dict[str, Any]:
    try:
        tree = yaml.load(text, _TextLoader)
    except _YAML_ERRORS as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error) or type(error).__name__
        raise RequestError(f"{origin}{where} is not YAML that can be read: {problem}") from None
    if tree in ("", None):
        return {}
    if not isinstance(tree, dict):
        raise RequestError(f"{origin} holds no sections: a recipe is a mapping such as 'model: {{arch: resnet18}}'")
    return {key: {} if value == "" and is_section(key) else value for key, value in tree.items()}


def _apply(tree: dict[str, Any], overrides: list[str]) -> None:
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise RequestError(
                f"'{show(word)}' is not key=value, such as train.epochs=10{nearest(key, list(all_keys()))}"
            )
        try:
            value = yaml.load(text, _TextLoader) if text[:1] in "[{" and text else text
        except _YAML_ERRORS:
            value = text
        *sections, leaf = key.split(".")
        place = tree
        for depth, name in enumerate(sections):
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                wrong = depth == 0 and is_section(name)
                raise RequestError(not_a_section(name, place) if wrong else unknown_key(key, text))
        place[leaf] = value


def _validate(tree: dict[str, Any]) -> Config:
    try:
        return Config.model_validate(tree)
    except ValidationError as failure:
        errors = failure.errors(include_url=False)
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise RequestError(error_line(errors[0]) + more) from None


def _leaves(config: Config) -> dict[str, Any]:
    tree = config.model_dump(mode="json", by_alias=True)
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return flat
