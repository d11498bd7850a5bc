"""Reading a configuration: a YAML recipe with `key=value` overrides on top.

Promise: `load` returns a complete and valid configuration. Any mistake raises a RequestError of one
line: the key, the given value, what is allowed and, for a name, the nearest valid name. Why this
holds: YAML scalars are read as strings (`1e-4` is a number, `no` is a word, and nothing becomes a
date), pydantic checks the type and bounds of every field, and unknown or repeated keys are refused.
`pipeline.plan` checks everything that depends on the machine or on the data.
"""

import copy
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from pipeline.config.credentials import split_credentials
from pipeline.config.help import explain, is_section, not_a_section, show, unknown_key
from pipeline.config.recipes import RECIPES, recipe_names
from pipeline.config.schema import MAY_CHANGE_ON_RESUME, Config
from pipeline.config.trust import trust
from pipeline.errors import RequestError, nearest

MAX_YAML_BYTES = 1 << 16
_AUTO = ("auto", "none", "null", "~")
_BEFORE_0_3 = {"run": {"portable": "false"}, "data": {"split_by": "file", "orientation": "ignore"}}
"""Values of the keys that a configuration of an earlier version lacks: how it trained."""
_DATABASES = ("postgresql", "mysql", "mssql", "databricks")


def load(recipe: str, overrides: list[str]) -> Config:
    """Return the configuration of a recipe with `key=value` overrides on top.

    recipe: a name from `recipes/` or the path of a YAML file.
    """
    path = _find(recipe)
    tree = _parse_yaml(_read_text(path), str(path))
    tree.setdefault("recipe", path.stem)
    recipe_tree = copy.deepcopy(tree)
    _apply(tree, overrides)
    run = tree.setdefault("run", {})
    if isinstance(run, dict) and str(run.get("dir", "auto")).lower() in _AUTO:
        run["dir"] = f"runs/{tree['recipe']}"
    track, name = tree.setdefault("track", {}), os.environ.get("MLFLOW_EXPERIMENT_NAME")
    if name and isinstance(track, dict) and str(track.get("experiment", "auto")).lower() in _AUTO:
        track["experiment"] = name
    config = _validate(tree)
    if config.run.resume == "auto":
        with suppress(OSError, RequestError):  # no earlier start, or a damaged file that its reader reports
            saved = (config.run_dir / "config.yaml").read_text(encoding="utf-8", errors="replace")
            stated = {word.partition("=")[0] for word in overrides}
            if path.parent != RECIPES:  # a recipe of this package may have gained keys since
                stated |= {f"{section}.{key}" for section in _BEFORE_0_3 for key in recipe_tree.get(section) or ()}
            config = _validate(_with_earlier_defaults(tree, _parse_yaml(saved, ""), stated))
    config = config.with_changes(_changes(config, recipe_tree, overrides))
    trust(config.model.arch)
    if config.track.uri not in ("auto", "none"):
        check_tracking_uri("track.uri", config.track.uri)
    return config


def recipe_text(recipe: str) -> tuple[str, str]:
    """Return a recipe's name, and its YAML with the name in it, so that any file may hold it.

    The YAML is the file's own text, with its comments, below a line with the name. If that is not
    valid (above `---` or `{…}`), the YAML is generated.
    """
    path = _find(recipe)
    text = _read_text(path)
    tree = {"recipe": path.stem, **_parse_yaml(text, str(path))}
    name = tree["recipe"]
    for candidate in (text, f"recipe: {name}\n{text}"):
        with suppress(RequestError):
            if _parse_yaml(candidate, str(path)) == tree:
                return name, candidate
    return name, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def from_yaml(text: str, origin: str, overrides: list[str] | None = None, *, is_saved: bool = True) -> Config:
    """Return the configuration that `to_yaml` wrote, with overrides on top.

    origin: where the text comes from, for error messages. is_saved: False for a recipe, whose
    missing keys have today's defaults.
    """
    tree = _parse_yaml(text, origin)
    if is_saved:
        tree = _with_earlier_defaults(tree, tree, set())
    _apply(tree, overrides or [])
    config = _validate(tree)
    if any(word.startswith("model.arch=") for word in overrides or []):
        trust(config.model.arch)
    return config


def _with_earlier_defaults(tree: dict[str, Any], saved: dict[str, Any], stated: set[str]) -> dict[str, Any]:
    """Return `tree` with the earlier value of each key that `saved` lacks.

    stated: keys that the user has set, which stay.
    """
    made = copy.deepcopy(tree)
    for section, defaults in _BEFORE_0_3.items():
        for key, value in defaults.items():
            is_new = key not in (saved.get(section) or {}) and f"{section}.{key}" not in stated
            if is_new and isinstance(made.setdefault(section, {}), dict):
                made[section][key] = value
    return made


def check_tracking_uri(name: str, uri: str) -> None:
    """Raise RequestError if MLflow cannot open `uri`. name: the key or variable that has it."""
    given = f"{name}={show(uri)}"
    scheme, _, rest = split_credentials(uri)[0].partition("://")
    kind = scheme.partition("+")[0]
    if kind in ("http", "https"):
        host = re.fullmatch(r"([\w.-]+|\[[\da-fA-F:.]+\])(:(?P<port>\d{1,5}))?([/?#]\S*)?", rest, re.ASCII)
        is_valid = host is not None and 0 < int(host["port"] or 1) < 1 << 16 and not re.search(r"\s", uri)
    elif kind == "sqlite":
        is_valid = re.match(r"/+[^/?]", rest) is not None
        if is_valid and mlflow_changes(rest):
            raise RequestError(f"{given}: MLflow opens only a UTF-8 path without ? and %", "name another file")
        if is_valid and os.path.isdir(rest.removeprefix("/")):
            raise RequestError(f"{given} names a folder", f"give the database file in it, {show(uri)}/mlflow.db")
    else:
        is_valid = uri == "databricks" or (kind in _DATABASES and re.fullmatch(r"\S*[^/\s]\S*", rest) is not None)
    if not is_valid:
        raise RequestError(
            f"{given} is not allowed",
            "give http://HOST:PORT, https://HOST, sqlite:///FILE, postgresql://… or mysql://…, with %20 for a blank and"
            " a user and a password before the host, or set track.uri=none",
        )


def mlflow_changes(path: str) -> bool:
    """Return True if MLflow opens another SQLite file or none.

    It decodes %41, a ? ends the path, and names must be UTF-8.
    """
    return re.search(r"\?|%[0-9a-fA-F]{2}|[\ud800-\udfff]", path) is not None


def refuse_changes(before: Config, now: Config) -> None:
    """Raise RequestError if a key has changed that must not change on resume; name both values."""
    old, new = flatten(before), flatten(now)
    old["run.portable"], new["run.portable"] = before.is_portable, now.is_portable
    if now.data.source == "pack":  # which keeps its orientation
        old.pop("data.orientation"), new.pop("data.orientation")
    different = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    changed = [f"{key}: {old.get(key)} -> {new.get(key)}" for key in different if not _may_change(key)]
    if now.train.epochs < before.train.epochs:
        changed.append(f"train.epochs: {before.train.epochs} -> {now.train.epochs} (it can only be increased)")
    if changed:
        what = f"the run in {now.run_dir} was started"
        places = "run.dir and checkpoint.mirror" if now.checkpoint.mirror else "run.dir"
        or_else = f"give another {places}, or "
        if now.run.resume != "auto":
            what, or_else = f"run.resume={now.run.resume} was trained", "or "
        raise RequestError(
            f"{what} with another configuration: {'; '.join(changed)}",
            f"restore these keys, {or_else}{now.start_again}",
        )


def training_keys(config: Config) -> dict[str, Any]:
    """Return the keys that training follows from, in the form of `flatten`.

    These are the keys that must not change on resume, without the device, and train.epochs.
    """
    keys = flatten(config) | {"run.portable": config.is_portable, "run.deterministic": config.is_deterministic}
    left_out = ["run.device", *(["data.orientation"] if config.data.source == "pack" else [])]
    return {key: keys[key] for key in keys if key == "train.epochs" or not (_may_change(key) or key in left_out)}


def for_evaluation(text: str, path: str, overrides: list[str]) -> tuple[Config, Config]:
    """Return the configuration in the checkpoint `path`, and the same with overrides on top.

    Another data.source takes no data.root and no data.cache from the training. Raises RequestError
    if the overrides change the model.
    """
    trained = from_yaml(text, path)
    sources = [word for word in overrides if word.startswith("data.source=")]
    if sources and sources[-1] != f"data.source={trained.data.source}":
        overrides = ["data.root=auto", "data.cache=none", *overrides]
    now = from_yaml(text, path, overrides)
    before, after = trained.model.model_dump(exclude={"channels_last"}), now.model.model_dump()
    changed = [f"model.{key}={show(after[key])}" for key in before if before[key] != after[key]]
    if changed:
        raise RequestError(f"{', '.join(changed)} cannot be set, because {path} fixes the model", "leave model.* out")
    return trained, now


def _find(recipe: str) -> Path:
    names = recipe_names()
    if recipe in names:
        return RECIPES / f"{recipe}.yaml"
    path = Path(recipe)
    if path.suffix.lower() in (".yaml", ".yml") or "/" in recipe:
        return path
    raise RequestError(
        f"recipe '{show(recipe)}' is unknown",
        f"the recipes are {', '.join(names)}, or give the path of a .yaml file{nearest(recipe, names)}",
    )


def _read_text(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_YAML_BYTES + 1)
        if len(raw) > MAX_YAML_BYTES:
            raise RequestError(f"{path} is larger than 64 KiB", "give the YAML file of a recipe")
        return raw.decode()
    except OSError as error:
        remedy = f"give a YAML file, or one of {', '.join(recipe_names())}{nearest(path.stem, recipe_names(), 0.8)}"
        raise RequestError(f"recipe {path} cannot be read: {error.strerror}", remedy) from None
    except UnicodeDecodeError:
        raise RequestError(f"recipe {path} is not UTF-8 text", "give a YAML file") from None


class NoAliases(yaml.parser.Parser, yaml.composer.Composer):
    """A mixin for a YAML loader that refuses aliases: with them, 200 bytes expand to gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="an alias (*name) is not allowed: repeat the value", problem_mark=mark)
        return super().compose_node(parent, index)


class _StringLoader(NoAliases, yaml.BaseLoader):
    """A YAML loader that returns every scalar as a string and refuses repeated keys and aliases.

    The schema gives the strings their types.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key.value, str):
                raise yaml.MarkedYAMLError(problem="a key is not a string", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# PyYAML does not catch Python's own errors for deep nesting ("[" × 10,000) and for "\\UFFFFFFFF".
_YAML_ERRORS = (yaml.YAMLError, RecursionError, ValueError, OverflowError)


def _parse_yaml(text: str, origin: str) -> dict[str, Any]:
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
        raise RequestError(f"{origin} has no sections", "a recipe is a mapping such as 'model: {arch: resnet18}'")
    return {key: {} if value == "" and is_section(key) else value for key, value in tree.items()}


def _apply(tree: dict[str, Any], overrides: list[str]) -> None:
    """Set each `key=value` in `tree`, in place. A value in [] or {} is read as YAML."""
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise RequestError(f"'{show(word)}' is not key=value, such as train.epochs=10")
        value = text
        if text.startswith(("[", "{")):
            with suppress(*_YAML_ERRORS):
                value = yaml.load(text, _StringLoader)
        *sections, leaf = key.split(".")
        place = tree
        for depth, name in enumerate(sections):
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                wrong_section = depth == 0 and is_section(name)
                raise RequestError(*(not_a_section(name, place) if wrong_section else unknown_key(key, text)))
        place[leaf] = value


def _validate(tree: dict[str, Any]) -> Config:
    try:
        return Config.model_validate(tree)
    except ValidationError as failure:
        errors = failure.errors(include_url=False)
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        problem, remedy = explain(errors[0])
        raise RequestError(*((problem, remedy + more) if remedy else (problem + more,))) from None


def _changes(config: Config, recipe_tree: dict[str, Any], overrides: list[str]) -> str:
    """Return what the overrides change in the recipe's training, as "key=value key=value"."""
    recipe: dict[str, Any] = {}
    with suppress(RequestError):  # a recipe may be valid with its overrides only
        recipe = flatten(_validate(recipe_tree))
    now = flatten(config)
    given = dict.fromkeys(".".join(word.partition("=")[0].split(".")[:2]) for word in overrides)
    return " ".join(
        f"{key}={now[key]}"
        for key in given
        if key in now
        and now[key] != recipe.get(key)
        and (key in ("train.epochs", "train.max_steps") or not _may_change(key))
    )


def _may_change(key: str) -> bool:
    return key in MAY_CHANGE_ON_RESUME or key.partition(".")[0] in MAY_CHANGE_ON_RESUME


def flatten(config: Config) -> dict[str, Any]:
    """Return the configuration as {"section.key": value}."""
    flat: dict[str, Any] = {}
    for name, value in config.model_dump(mode="json", by_alias=True).items():
        flat |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return flat
