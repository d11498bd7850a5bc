"""HELP"""

import difflib
from functools import cache
from typing import Any

from pipeline.config.credentials import without_password
from pipeline.config.schema import Config, Section


def describe_keys() -> str:
    """Every key with its default, what is allowed and what it does, for `--help`."""
    lines = []
    for key, (schema, default) in all_keys().items():
        if key != "recipe":
            text = " ".join(schema.get("description", "").split())
            lines.append(f"  {key}={show(default)}\n      {text} ({_allowed(schema)})")
    return "\n".join(lines)


def nearest(word: str, words: list[str]) -> str:
    """`; did you mean X?` for the nearest of `words`, or nothing. A word may lack its section."""
    close = [key for key in words if key.endswith(f".{word}")] or difflib.get_close_matches(
        word, words, n=1, cutoff=0.5
    )
    return f"; did you mean {close[0]}?" if close else ""


def error_line(error: Any) -> str:
    parts = [str(part) for part in error["loc"]]
    while parts and ".".join(parts) not in all_keys() and parts[-1].isdigit():  # an element of a list: name the list
        parts.pop()
    key, given = ".".join(parts), error["input"]
    whole = len(parts) == len(error["loc"])
    if error["type"] == "extra_forbidden":
        return unknown_key(key, given)
    if error["type"] == "string_unicode" and key not in all_keys():  # it is the name of a key that is not UTF-8
        return unknown_key(".".join([*parts, given]), "")
    if error["type"] == "value_error" and key not in all_keys():  # a rule over several fields words its own line
        return str(error["ctx"]["error"])
    if is_section(key):
        return not_a_section(key, given)
    schema, _ = all_keys()[key]
    if error["type"] == "missing" and whole:  # else it is an element of a list that is too short
        return f"{key} is missing: {_allowed(schema)}"
    return f"{key}={show(given)} is not allowed: {_allowed(schema)}"


def is_section(key: str) -> bool:
    return key in Config.model_fields and key not in all_keys()


def not_a_section(key: str, given: object) -> str:
    inside = ", ".join(name for name in all_keys() if name.startswith(f"{key}."))
    return f"{key}={show(given)} is not a section; its keys are {inside}"


def unknown_key(key: str, given: object) -> str:
    while isinstance(given, dict) and given:  # a whole section is unknown: name the first key in it
        inner, given = next(iter(given.items()))
        key = f"{key}.{inner}"
    close = nearest(key, list(all_keys())) or f"; the sections are {', '.join(Config.model_fields)}"
    return f"{show(key)}={show(given)}: there is no key '{show(key)}'{close}"


def show(value: object) -> str:
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return str(value).lower()
    text = without_password(f"[{', '.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value))
    text = text if len(text) <= 60 else text[:57] + "..."
    return text if text.isprintable() else text.encode("unicode_escape").decode()


@cache
def all_keys() -> dict[str, tuple[dict[str, Any], Any]]:
    """Every dotted key -> (its JSON schema, its default), in the order of this file."""
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
    """A JSON schema in words; of a pattern, those that its field has for it."""
    if "allowed" in schema:
        return str(schema["allowed"])
    if "anyOf" in schema:
        return " or ".join(_allowed(option) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return " | ".join(schema.get("enum", [schema.get("const")]))
    if "format" in schema:
        above = " above 0" * (schema["format"] == "interval")
        return f"a duration{above} such as '10 epochs', '500 steps' or '5 %'"
    if schema.get("type") == "array":
        items = schema["prefixItems"]
        return f"{len(items)} values [{', '.join(map(_allowed, items))}]"
    kind = {
        "integer": "a whole number", "number": "a number", "boolean": "true | false", "string": "a text of one line",
        "null": "auto | none",
    }[schema.get("type", "string")]  # fmt: skip
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return kind + " and".join(f" {sign} {schema[name]:.12g}" for name, sign in bounds.items() if name in schema)
