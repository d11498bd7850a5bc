"""Reading a configuration: a YAML recipe with `key=value` overrides on top.

Promise: `load` returns a complete and valid configuration. Any mistake raises a RequestError of one
line: the key, the given value, what is allowed and, for a name, the nearest valid name. Why this
holds: YAML scalars are read as strings (`1e-4` is a number, `no` is a word, and nothing becomes a
date), pydantic checks the type and bounds of every field, and unknown or repeated keys are refused.
`pipeline.planning` checks everything that depends on the machine or on the data.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from pipeline.config.schema import Config
from pipeline.errors import RequestError, nearest
from pipeline.lazy import addon

RECIPES = Path(__file__).parents[1] / "recipes"
MAX_YAML_BYTES = 1 << 16
PUBLISHED = ("timm", "torchvision")
"""Values of model.init that mean the published weights of model.arch."""
_AUTO = ("auto", "none", "null", "~")
_BEFORE_0_3 = {"run.portable": "false", "data.split_by": "file", "data.orientation": "ignore"}
"""Values of the keys that a configuration of an earlier version lacks: how it trained."""


def load(recipe: str, overrides: list[str]) -> Config:
    """Return the configuration of a recipe with `key=value` overrides on top.

    recipe: a name from `recipes/` or the path of a YAML file.
    """
    path, text = read_recipe(recipe)
    tree = {"recipe": path.stem, **parse_yaml(text, str(path))}
    stated = {word.partition("=")[0] for word in overrides}
    if path.parent != RECIPES:  # a recipe of this package may have gained keys since an earlier start
        stated |= _keys(tree)
    _apply(tree, overrides)
    _set_if_auto(tree, "run", "dir", f"runs/{tree['recipe']}")
    _set_if_auto(tree, "track", "experiment", os.environ.get("MLFLOW_EXPERIMENT_NAME"))
    addon("models.class_weights").read_file(tree)
    config = _validate(tree)
    if config.model.init in PUBLISHED:
        _apply(tree, addon("models.published").settle(config, _keys(tree)))
        config = _validate(tree)
    if config.run.resume == "auto":
        with suppress(OSError, RequestError):  # no earlier start, or a damaged file that its reader reports
            saved = (config.run_dir / "config.yaml").read_text(encoding="utf-8", errors="replace")
            _set_earlier_defaults(tree, stated | _keys(parse_yaml(saved, "")))
            config = _validate(tree)
    config._changes = addon("ops.fixed_keys").changes_to_recipe(config, overrides)
    addon("models.trust").trust(config.model.arch)
    if config.track.uri not in ("auto", "none"):
        addon("mlflow.uri").check_tracking_uri("track.uri", config.track.uri)
    return config


def _set_if_auto(tree: dict[str, Any], section: str, key: str, value: str | None) -> None:
    keys = tree.setdefault(section, {})
    if value and isinstance(keys, dict) and str(keys.get(key, "auto")).lower() in _AUTO:
        keys[key] = value


def from_yaml(text: str, origin: str, overrides: list[str] | None = None, *, is_saved: bool = True) -> Config:
    """Return the configuration that `to_yaml` wrote, with overrides on top.

    origin: where the text comes from, for error messages. is_saved: False for a recipe, whose
    missing keys have today's defaults.
    """
    tree = parse_yaml(text, origin)
    if is_saved:
        _set_earlier_defaults(tree, _keys(tree))
    _apply(tree, overrides or [])
    config = _validate(tree)
    if any(word.startswith("model.arch=") for word in overrides or []):
        addon("models.trust").trust(config.model.arch)
    return config


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def read_recipe(recipe: str) -> tuple[Path, str]:
    """Return the path and the text of a recipe."""
    path, names = Path(recipe), recipe_names()
    remedy = f"give the path of a .yaml file, or one of {', '.join(names)}{nearest(path.stem, names)}"
    if recipe in names:
        path = RECIPES / f"{recipe}.yaml"
    elif path.suffix.lower() not in (".yaml", ".yml") and "/" not in recipe:
        raise RequestError(f"recipe '{_show(recipe)}' is unknown", remedy)
    try:
        return path, read_limited(path, MAX_YAML_BYTES).decode()
    except OSError as error:
        raise RequestError(f"recipe {path} cannot be read: {error.strerror}", remedy) from None
    except ValueError:
        raise RequestError(f"recipe {path} is not UTF-8 text of up to 64 KiB", "give a YAML file") from None


def read_limited(path: Path, max_bytes: int) -> bytes:
    """Return the contents of a file. Raises OSError, and ValueError if it has more bytes."""
    with open(path, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes >> 20} MiB")
    return data


class NoAliases(yaml.parser.Parser, yaml.composer.Composer):
    """A mixin for a YAML loader that refuses aliases: with them, 200 bytes expand to gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="an alias (*name) is not allowed", problem_mark=mark)
        return super().compose_node(parent, index)


class _StringLoader(NoAliases, yaml.BaseLoader):
    """A YAML loader that returns every scalar as a string, for the schema to give it its type."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key.value, str) or key.value in seen:
                problem = f"key {key.value!r} is given twice, or is not a string"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# PyYAML does not catch Python's own errors for deep nesting ("[" × 10,000) and for "\\UFFFFFFFF".
_YAML_ERRORS = (yaml.YAMLError, RecursionError, ValueError, OverflowError)


def parse_yaml(text: str, origin: str) -> dict[str, Any]:
    """Return the tree of a recipe, whose scalars are strings. origin: where the text comes from."""
    try:
        tree = yaml.load(text, _StringLoader)
    except _YAML_ERRORS as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error) or type(error).__name__
        raise RequestError(f"{origin}{line} is not valid YAML: {problem}") from None
    if tree in ("", None):
        return {}
    if not isinstance(tree, dict):
        remedy = "a recipe is a mapping such as 'model: {arch: resnet18}'"
        raise RequestError(f"{origin} has no sections", remedy)
    return {key: {} if value == "" else value for key, value in tree.items()}


def _apply(tree: dict[str, Any], overrides: list[str]) -> None:
    """Set each `key=value` in `tree`, in place. A value in [] or {} is read as YAML."""
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise RequestError(f"'{_show(word)}' is not key=value, such as train.epochs=10")
        value = text
        if text.startswith(("[", "{")):
            with suppress(*_YAML_ERRORS):
                value = yaml.load(text, _StringLoader)
        *sections, leaf = key.split(".")
        place = tree
        for depth, name in enumerate(sections, 1):
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                given = f"{'.'.join(sections[:depth])}={_show(place)}"
                raise RequestError(f"{given} is not a section", f"{_show(key)} cannot be set in it")
        place[leaf] = value


def _keys(tree: dict[str, Any]) -> set[str]:
    sections = {name: inside for name, inside in tree.items() if isinstance(inside, dict)}
    return {f"{name}.{key}" for name, inside in sections.items() for key in inside}


def _set_earlier_defaults(tree: dict[str, Any], stated: set[str]) -> None:
    _apply(tree, [f"{key}={value}" for key, value in _BEFORE_0_3.items() if key not in stated])


def _validate(tree: dict[str, Any]) -> Config:
    try:
        config = Config.model_validate(tree)
    except ValidationError as failure:
        errors = failure.errors(include_url=False)
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        problem, remedy = addon("ops.keys").explain(errors[0])
        raise RequestError(problem + more, remedy) from None
    addon("ops.conflicts").check_combinations(config)
    return config


def _show(value: object) -> str:
    return str(addon("ops.credentials").show(value))
