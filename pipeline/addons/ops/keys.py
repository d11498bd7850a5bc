"""The keys for people: help texts, the errors of invalid keys and values, words of `model.args`."""

import re
import sys
import textwrap
from functools import cache
from typing import Any

from pipeline.addons.ops.credentials import show
from pipeline.config.schema import Config
from pipeline.config.sections import Section
from pipeline.config.values import Argument
from pipeline.errors import nearest


def describe_keys(width: int = 80) -> str:
    """Return the help text: by section, each key with its default, meaning and allowed values."""
    lines, before = [], ""
    for key, (schema, default) in all_keys().items():
        section = key.partition(".")[0] if "." in key else "top level"
        if key == "recipe":
            continue
        if section != before:
            lines += ["", f"{section}:"] if before else [f"{section}:"]
        before, text = section, " ".join(schema["description"].split())
        lines.append(f"  {key}={'none' if default is None and 'none: ' in text else show(default)}")
        for paragraph in (text, f"Allowed: {_allowed(schema)}."):
            lines += [f"      {line}" for line in textwrap.wrap(paragraph, width - 6)]
    return "\n".join(lines)


def explain(error: Any) -> tuple[str, str]:
    """Return problem and remedy of an error of pydantic: the key, its value, the allowed values."""
    location, given = [str(part) for part in error["loc"]], error["input"]
    cause = error.get("ctx", {}).get("error")
    key = ".".join(location[:2])  # without the place in a list
    if isinstance(cause, UnicodeEncodeError) or (error["type"] == "string_unicode" and key in all_keys()):
        problem = f"{key}={show(given)} is not {sys.getfilesystemencoding()} text, as this locale needs"
        return problem, "rename it, or set LC_ALL=C.UTF-8"
    if key in Config.model_fields and key not in all_keys():
        inside = ", ".join(name for name in all_keys() if name.startswith(f"{key}."))
        return f"{key}={show(given)} is not allowed, because {key} is a section", f"give its keys {inside}"
    if key not in all_keys() or error["type"] == "extra_forbidden":
        return _unknown_key(key or str(given), "" if error["type"] == "string_unicode" else given), ""
    schema, default = all_keys()[key]
    if error["type"] == "missing" and location == key.split("."):  # otherwise a list has too few elements
        return f"{key} is missing", f"give {_allowed(schema)}"
    example = schema.get("examples", [default])[0]
    such_as = f", such as '{key}={show(example)}'" if isinstance(example, list | tuple) else ""
    return f"{key}={show(given)} is not allowed", f"give {_allowed(schema)}{such_as}"


def _unknown_key(key: str, given: object) -> str:
    while isinstance(given, dict) and given:  # if the whole section is unknown, name the first key in it
        inner, given = next(iter(given.items()))
        key = f"{key}.{inner}"
    if key in all_keys():
        section, _, name = key.partition(".")
        value = show(given)
        return f"'{key}: {value}' is not allowed in a recipe: write '{section}: {{{name}: {value}}}'"
    close = nearest(key, list(all_keys())) or f"; the sections are {', '.join(Config.model_fields)}"
    return f"{show(key)}={show(given)}: there is no key '{show(key)}'{close}"


@cache
def all_keys() -> dict[str, tuple[dict[str, Any], Any]]:
    """Return each dotted key with its JSON schema and its default, in the order of the schema."""
    schema = Config.model_json_schema(by_alias=True)
    keys: dict[str, tuple[dict[str, Any], Any]] = {}
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            section = schema["$defs"][field.annotation.__name__]["properties"]
            for inner_name, inner in field.annotation.model_fields.items():
                alias = inner.alias or inner_name
                keys[f"{name}.{alias}"] = (section[alias], inner.default)
        else:
            keys[name] = (schema["properties"][name], field.default)
    return keys


def _allowed(schema: dict[str, Any]) -> str:
    """Return the values that a JSON schema allows, in words."""
    match schema:
        case {"allowed": words}:
            return str(words)
        case {"anyOf": options}:
            return ", or ".join(map(_allowed, options))
        case {"enum": words}:
            return " | ".join(words)
        case {"prefixItems": items}:
            return f"{len(items)} values [{', '.join(map(_allowed, items))}]"
    names = {"integer": "an integer", "number": "a number", "boolean": "true | false", "null": "auto | none"}
    name = names.get(schema.get("type", ""), "a one-line string")
    if {"minimum", "maximum"} <= schema.keys():
        return f"{name} from {_number(schema['minimum'])} to {_number(schema['maximum'])}"
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {_number(schema[name])}" for name, sign in signs.items() if name in schema]
    return f"{name} {' and '.join(bounds)}".rstrip()


def _number(value: float) -> str:
    return "2^63−1" if value == 2**63 - 1 else f"{value:.16g}"


def parse_arguments(value: object) -> dict[str, Any]:
    """Return keyword arguments with typed values; raise ValueError for anything else."""
    if not isinstance(value, dict) or not all(str(name).isidentifier() for name in value):
        raise ValueError("not keyword arguments")
    return {
        name: [_parse_argument(item) for item in given] if isinstance(given, list) else _parse_argument(given)
        for name, given in value.items()
    }


def check_columns(names: dict[str, Any]) -> dict[str, Any]:
    """Return names of a table's columns; raise ValueError if one is for none that is used."""
    if names.keys() - {"path", "image", "label", "split", "group"}:
        raise ValueError("not a column of a table")
    return names


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
